"""From a request's body to what is submitted: parsed, checked, written into the chat template, tokenized."""
