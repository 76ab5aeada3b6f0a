"""Bugs planted between an HTTP request and its submission, and back: support.front_end.http_oracle must find each."""

from support.seeded_bugs import Bug

# fmt: off
PATCHES: dict[str, list[tuple[str, str, str]]] = {
    "answer_sinks": [
        ("cached tokens are summed over all choices", "sum(g.cached_tokens for g in prompts)",
         "sum(g.cached_tokens for g in generations)"),
        ("a prompt counts for each choice", "sum(g.prompt_length for g in prompts)", "sum(g.prompt_length for g in generations)"),
        ("the tokens of the first choice are those of all", "sum(g.tokens for g in generations)",
         "sum(g.tokens for g in generations[:1])"),
        ("log probabilities are shown without their field", "if not self._with_logprobs:", "if False:"),
        ("continuous counts are those of the step before", "event = self.answer.with_usage(event, self.usage())",
         "self._old, event = self.usage(), self.answer.with_usage(event, getattr(self, '_old', self.usage()))"),
        ("drafts of other kinds count as predicted", "accepted = sum(g.predicted for g", "accepted = sum(g.drafted for g"),
        ("predicted tokens that other drafts said are not rejected", "len(g.prediction) - g.predicted)",
         "len(g.prediction) - g.drafted)"),
        ("the tokens of the first choice's prediction are those of all", "for g in predicting if g.prediction",
         "for g in predicting[:1] if g.prediction"),
    ],
    "shared_fields": [
        ("stop strings are stripped", '"stop": tuple(dict.fromkeys(stop))',
         '"stop": tuple(dict.fromkeys(s.strip() or s for s in stop))'),
        ("a value of 0 counts as absent", "if type(value) in (int, float):", "if value and type(value) in (int, float):"),
        ("penalties are swapped", "given[name] = PARAMETER[name].from_request(value)",
         "given[{'presence_penalty': 'frequency_penalty'}.get(name, name)] = PARAMETER[name].from_request(value)"),
        ("the fields of stream_options are swapped",
         "StreamUsage(options.include_usage is True, options.continuous_usage_stats is True)",
         "StreamUsage(options.continuous_usage_stats is True, options.include_usage is True)"),
        ("salts are stripped", "hashlib.sha256(value.encode())", "hashlib.sha256(value.strip().encode())"),
        ("a bias goes to the next token", "found[int(key)] = number", "found[int(key) + 1] = number"),
        ("one token less fits than the context holds", "if space < 1 or limit > space:", "if space < 1 or limit >= space:"),
        ("one token more fits than the context holds", "if space < 1 or limit > space:", "if space < 1 or limit > space + 1:"),
    ],
    "request_parameters": [("all choices have one seed", "(self.seed + i - low)", "(self.seed - low)")],
    "generation": [
        ("a stop string ends a text at min_tokens", "self.tokens > self.min_tokens", "self.tokens >= self.min_tokens"),
        ("a stop token is never in the text", "if finish != FINISH_STOP or self.include_stop:", "if finish != FINISH_STOP:"),
        ("held text is lost at the end", "                self._text += self._stops.finish()\n", "                pass\n"),
        ("offsets are those behind each token", "token_logprobs(record, self.top_logprobs, self._characters)",
         "token_logprobs(record, self.top_logprobs, max(0, 9 - self._characters))"),
    ],
    "answers": [
        ("the likeliest are the shortest", "/ max(1, len(choice.logprobs))", ""),
        ("prompts show as many tokens as outputs", "scores.first(scores.shown)", "scores.entries"),
        ("each event names the role", '(b\'"delta":{"content":\' if self.chat',
         '(b\'"delta":{"role":"assistant","content":\' if self.chat'),
    ],
    "request_handler": [
        ("every class is latency-sensitive", "TIERS[tier], names)", "0, names)"),
        ("weights are whole numbers", "round(tenant.weight * WEIGHT_ONE)", "max(1, round(tenant.weight)) * WEIGHT_ONE"),
        ("ignore_eos drops the request's own stop ids", "dict.fromkeys((*request.stop_ids, *(",
         "dict.fromkeys((*(() if request.ignore_eos else request.stop_ids), *("),
        ("scores come for each choice", "if scores is not None and choice == 0 and", "if scores is not None and choice >= 0 and"),
        ("the first choice alone has the prediction", "generation.prediction = request.predicted",
         "generation.prediction = None if choice else request.predicted"),
    ],
    "tenant": [("every tier is the key's", "return asked if asked in self.service_tiers else None", "return self.service_tier")],
    "message_answer": [
        ("a call that breaks off counts as whole", "self._calls and reason == STOP and not self._parser.cut", "self._calls"),
        ("hidden reasoning is content", "elif self._include_reasoning or isinstance(event, Content):\n                part",
         "else:\n                event = event if self._include_reasoning else Content(event.text)\n                part"),
    ],
    "anthropic_answer": [
        ("cached tokens count twice", "usage.prompt_tokens - usage.cached_tokens", "usage.prompt_tokens"),
        ("a call that breaks off is a call", '"tool_use" if called and not cut else', '"tool_use" if called else'),
        ("hidden thinking is shown", "if kind == THINKING and not self._request.include_reasoning:", "if False:"),
    ],
    "anthropic_blocks": [
        ("texts of a result run together", 'else "\\n".join(part.text for part', 'else "".join(part.text for part'),
    ],
    "anthropic_fields": [
        ("only the first stop sequence counts", "tuple(dict.fromkeys(given.stop_sequences or ()))",
         "tuple(dict.fromkeys((given.stop_sequences or ())[:1]))"),
        ("an answer continues calls", 'if last["role"] == "assistant" and "tool_calls" not in last and last["content"]:',
         'if last["role"] == "assistant" and last["content"]:'),
        ("top_p of 0 stays", 'if sampling["top_p"] == 0:', 'if sampling["top_p"] is False:'),
    ],
    "response_fields": [
        ("a summary of reasoning hides its text", "self.content or self.summary or ()", "self.summary or self.content or ()"),
    ],
    "message_parser": [
        ("the closing tag is no reasoning", "        self.tokens = self._begun\n        self._seen = None if",
         "        self.tokens = self._begun - (self._tags.close in seen)\n        self._seen = None if"),
        ("calls are never parallel", "(self.calls == 1 or self._expected.parallel):\n                yield event",
         "self.calls == 1:\n                yield event"),
    ],
    "response_answer": [
        ("a response names another top_p", '"top_p": request.parameters.top_p', '"top_p": request.parameters.temperature'),
        ("a response that was cut is complete", 'return "incomplete" if self._finish_reason == "length" else "completed"',
         'return "completed"'),
        ("an item does not end before the next one", 'self._items[-1].end("completed")) if self._items else b""',
         'self._items[-1].end("completed")) if len(self._items) > 1 else b""'),
    ],
    "request_jobs": [
        ("an echo has no special tokens, but its offsets count them",
         'return Echo("".join(pieces) + detokenizer.finish(), offsets)',
         'return Echo(given if isinstance(given, str) else "".join(pieces) + detokenizer.finish(), offsets)'),
    ],
    "stop_strings": [
        ("the shortest of two stop strings counts", "ended = max(ended, length)", "ended = min(ended or length, length)"),
        ("a failed match forgets its begin", "length = failures[i][length]\n                if stop[length] == character",
         "length = 0\n                if stop[length] == character"),
    ],
    "token_rules": [("only the start of a text is banned", "len(spaced) == len(alone) and spaced[0]", "False and spaced[0]")],
    "token_feed": [
        ("each draft in a plain stream is predicted", "generation.predicted += flags & WAS_PREDICTED != 0",
         "generation.predicted += 1"),
    ],
    "queue_pair": [
        ("a prediction begins the prompt", "np.concatenate([prompt, prediction])", "np.concatenate([prediction, prompt])"),
    ],
}
# fmt: on
HTTP_BUGS = tuple(Bug(what, module, *patch) for module, patches in PATCHES.items() for what, *patch in patches)
