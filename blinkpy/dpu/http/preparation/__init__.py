"""From a request's body to a submission: parse, check, apply the chat template, tokenize."""
