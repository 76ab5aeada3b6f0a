"""Sends random requests to a server with a scripted engine, and compares submissions, answers, streams and counts with
support.front_end.http_model."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.front_end import chat_templates
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine, Request
from support.front_end.http_cases import FLEX, GRAMMARS, MESSAGES_GRAMMARS, TENANTS, CaseMaker
from support.front_end.http_messages import found_message
from support.front_end.http_model import (
    COMPLETIONS,
    EOS,
    MESSAGES,
    PLAIN,
    RESPONSES,
    Case,
    ExpectedChoice,
    Model,
    is_own_draft,
    logprob_of,
)
from support.front_end.http_server import RunningServer, serving
from support.front_end.scripted_model import folder_with
from support.front_end.tenants import bearer, write_keys
from tokenizers import Tokenizer as Encoder

from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.layout import QueueSizes
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import TOP_LOGPROBS, WAS_DRAFTED

WORDS = 1 << 14  # of the largest automaton
CONTEXT, PAGE = 1024, 4
ORACLE_FACTS = FACTS._replace(
    max_model_len=CONTEXT,
    num_pages=4096,
    page_size=PAGE,
    grammar_share=4,
    grammar_words=WORDS,
    grammar_arena=4 * WORDS,
    predictions=1,
)
ORACLE_SIZES = QueueSizes(**{**SIZES.__dict__, "slots": 16, "sq_entries": 16, "prompt_tokens": 6 * WORDS, "hash_entries": 2048})


class SpeakingEngine(FakeEngine):
    """An engine that generates the case's speech for each choice."""

    def __init__(self) -> None:
        self._case: Case | None = None
        self._first = 0
        super().__init__(facts=ORACLE_FACTS, sizes=ORACLE_SIZES, step_s=0.0001)

    def begin(self, case: Case) -> None:
        self._case, self._first = case, len(self.submitted)

    @property
    def taken(self) -> list[Request]:
        """The case's submissions."""
        return self.submitted[self._first :]

    def place(self, request: Request) -> tuple[int, int]:
        """The numbers of a request's prompt in the case, and of its choice of this prompt."""
        assert self._case is not None
        same = [other for other in self.taken if other.prompt == request.prompt]
        return self._case.prompts.index(request.prompt), next(i for i, other in enumerate(same) if other is request)

    @property
    def hit_pages(self) -> int:
        """Hit pages of the latest request. Choices after the first find the whole prompt."""
        if self._case is None or not self.taken or self.taken[-1].prompt not in self._case.prompts:
            return 0
        prompt, choice = self.place(self.taken[-1])
        return (len(self._case.prompts[prompt]) - 1) // PAGE if choice else self._case.hits[prompt]

    @hit_pages.setter
    def hit_pages(self, pages: int) -> None:
        pass

    def says(self, request: Request) -> int:
        if request.made < 0 or self._case is None or request.prompt not in self._case.prompts:
            return super().says(request)
        prompt, choice = self.place(request)
        speeches = self._case.speeches[prompt]
        speech = speeches[min(choice, len(speeches) - 1)]
        return speech[request.made % len(speech)]

    def drafted(self, request: Request, token: int) -> int:
        return super().drafted(request, token) or (WAS_DRAFTED if request.made > 0 and is_own_draft(token) else 0)

    def likely(self, token: int) -> tuple[list[int], list[float]]:
        tokens, logprobs = super().likely(token)
        return tokens, [logprob_of(token), *logprobs[1:]]


@contextlib.contextmanager
def oracle_server(folder: Path, plain: bool, **options: Any) -> Iterator["HttpOracle"]:
    """A server with its engine and the keys of TENANTS. folder: for a model and the keys. plain: its model neither reasons nor
    calls. options: see `serving`."""
    model = folder_with(folder / f"model-{plain}", PLAIN if plain else chat_templates.THINKING)
    keys = write_keys(folder / "keys", **TENANTS)
    encoder = Encoder.from_file(str(model / "tokenizer.json"))
    with SpeakingEngine() as engine, serving(engine, model, api_keys=str(keys), **options) as server:
        yield HttpOracle(server, engine, Model(encoder, CONTEXT, PAGE, plain))


class HttpOracle:
    """Checks cases against one server. Raises AssertionError with the first difference."""

    def __init__(self, server: RunningServer, engine: SpeakingEngine, model: Model):
        self.server, self.engine, self.model = server, engine, model
        self._salts: dict[tuple[str, str], int] = {}
        self.asked: list[tuple[int, int, int]] = []  # of the queue for slots: tokens of prompts, maximum tokens, and slots
        admission: Any = server.server.app.service.admission
        enter = admission.enter

        def noting(tenant: Any, tokens: int, most: int, slots: int, *rest: Any) -> Any:
            self.asked.append((tokens, most, slots))
            return enter(tenant, tokens, most, slots, *rest)

        admission.enter = noting

    def run(self, seed: int, count: int) -> None:
        """Check `count` random cases."""
        maker = CaseMaker(seed, self.model)
        for number in range(count):
            case = maker.case()
            try:
                self.check(case)
                if number % 10 == 0:
                    self.refuse(case)
            except Exception as error:
                shown = json.dumps({"path": case.path, "tenant": case.tenant, **case.body}, ensure_ascii=False)
                raise AssertionError(f"case {number}: {error}\n{shown}") from error

    def refuse(self, case: Case) -> None:
        """Send the case with one token more than the context holds: the error names the field, and the engine gets no request."""
        self.engine.begin(case)
        space = min(CONTEXT - len(prompt) for prompt in case.prompts)
        body = case.body | {case.limit_field: space + 1}
        response = self.server.client.post(case.path, json=body, headers=bearer(case.tenant))
        error = response.json()["error"]
        if case.path == MESSAGES:  # its errors name no fields
            assert (response.status_code, error["type"], self.engine.taken) == (400, "invalid_request_error", []), response.text
            assert f"{space + 1} in the completion" in error["message"], response.text
            return
        assert (response.status_code, error["param"]) == (400, case.limit_field), response.text
        assert (error["code"], self.engine.taken) == ("context_length_exceeded", []), response.text

    def check(self, case: Case) -> None:
        """Send one case and check its answer."""
        self.engine.begin(case)
        response = self.server.client.post(case.path, json=case.body, headers=bearer(case.tenant))
        assert response.status_code == 200, response.text
        self.server.idle()
        said = [[self.model.expected_choice(case, prompt, speech) for speech in speeches]
                for prompt, speeches in zip(case.prompts, case.speeches, strict=True)]  # fmt: skip
        self._submissions(case)
        self._admitted(case)
        if case.path == RESPONSES:
            self._response(case, response.text, said[0][0])
            return
        if case.path == MESSAGES:
            one = said[0][0]
            found = found_message(case, response.text, one, PAGE)
            self._equal(case, [found], [self._message(case, one) | {"finish": one.finish}])
            return
        wanted = self._wanted(case, said)
        got = self._streamed(case, response.text) if case.body.get("stream") else self._whole(case, response.json())
        self._equal(case, got, wanted)

    def _equal(self, case: Case, got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
        """Compare choices of an answer with the expected choices."""
        assert len(got) == len(wanted), f"{len(got)} choices, not {len(wanted)}"
        for one, other in zip(got, wanted, strict=True):
            if case.calls:
                self._cut(case, one, other)
            assert one == other, f"the answer has\n{one}\nand not\n{other}"

    # ---- submissions

    def _submissions(self, case: Case) -> None:
        taken = self.engine.taken
        assert len(taken) == len(case.prompts) * case.choices, f"{len(taken)} submissions"
        for request in taken:
            assert request.prompt in case.prompts, f"a prompt of tokens {request.prompt}, not {case.prompts}"
            prompt, choice = self.engine.place(request)
            entry = request.entry
            for name, value in self.model.entry(case, case.prompts[prompt], choice).items():
                got = entry[name].item()
                assert got == value, f"the submission has {name} {got}, not {value}"
            assert set(entry["stop_ids"].tolist()) - {-1} == self.model.stop_ids(case), entry["stop_ids"]
            tenant, tier = TENANTS[case.tenant], case.body.get("service_tier")
            assert (entry["tenant"], entry["tenant_weight"]) == (tenant["number"], round(100 * tenant.get("weight", 1)))
            assert entry["best_effort"] == {"flex": 1, "priority": 0}.get(tier, FLEX[case.tenant]), tier
            assert request.prediction == (self.model.prediction(case) or []), f"a prediction of tokens {request.prediction}"
            self._salt(case, entry["cache_salt"].item())
            self._rules(case, request)
        for prompt in range(len(case.prompts)):
            assert sum(self.engine.place(request)[0] == prompt for request in taken) == case.choices

    def _admitted(self, case: Case) -> None:
        """Compare the size of the request's ticket: each prompt once, and each choice with its limit."""
        lengths, choices = list(map(len, case.prompts)), case.choices
        most = sum(choices * (len(prompt) + self.model.limit(case, prompt)) for prompt in case.prompts)
        assert self.asked[-1] == (sum(lengths), most, choices * len(lengths)), f"the queue got a ticket for {self.asked[-1]}"

    def _salt(self, case: Case, salt: int) -> None:
        """Check that salts are equal for equal texts of one tenant, and otherwise different."""
        key = case.tenant, case.body.get("cache_salt", "")
        assert self._salts.setdefault(key, salt) == salt, f"two salts for {key}"
        assert len(set(self._salts.values())) == len(self._salts), f"{key} shares a salt with another"

    def _rules(self, case: Case, request: Request) -> None:
        body = case.body
        asked = any(body.get(name) for name in ("logit_bias", "allowed_token_ids", "bad_words"))
        assert (len(request.rules) > 0) == asked
        if asked:
            rules = TokenRules.of_words(request.rules, ORACLE_FACTS.vocab_size)
            assert rules.biases == {int(token): bias for token, bias in body.get("logit_bias", {}).items()}
            assert sorted(rules.allowed or ()) == sorted(body.get("allowed_token_ids", ()))
            assert bool(rules.banned) == bool(body.get("bad_words"))
            assert sorted(map(list, rules.banned)) == sorted(self._banned(body.get("bad_words", ())))
        grammar = next((one for one in (*GRAMMARS, *MESSAGES_GRAMMARS) if one[0].items() <= body.items()), None)
        assert (len(request.grammar) > 0) == (grammar is not None), (
            "a grammar without a field for it, or no grammar for the field"
        )
        if grammar is not None:
            automaton = ByteAutomaton.of_words(request.grammar)
            for texts, accepted in ((grammar[1], True), (grammar[2], False)):
                for text in texts:
                    assert automaton.accepts(text.encode()) == accepted, f"{text!r} under {grammar[0]}"

    def _banned(self, words: Sequence[str]) -> Iterator[list[int]]:
        """Tokens of each word at the start of a text, and after a space if they differ there."""
        for word in words:
            alone, spaced = (
                list(self.model.encoder.encode(before + word.strip(), add_special_tokens=False).ids) for before in ("", " ")
            )
            yield alone
            if len(spaced) == len(alone) and spaced[0] != alone[0]:
                yield spaced

    # ---- chats and completions

    def _wanted(self, case: Case, said: list[list[ExpectedChoice]]) -> list[dict[str, Any]]:
        """The expected choices of the answer."""
        wanted: list[dict[str, Any]] = []
        for prompt, choices in zip(case.prompts, said, strict=True):
            order = sorted(choices, key=lambda one: -sum(map(logprob_of, one.tokens)) / len(one.tokens) * -1, reverse=True)
            n = int(case.body.get("n") or 1)
            for one in choices if case.choices == n else order[:n]:
                wanted.append({"index": len(wanted), **self._choice(case, prompt, one)})
        return wanted

    def _choice(self, case: Case, prompt: list[int], said: ExpectedChoice) -> dict[str, Any]:
        only_echo = case.body.get("max_tokens") == 0
        tokens = [] if only_echo else said.tokens
        logprobs: list[float | None] | None = None if case.logprobs is None else [logprob_of(token) for token in tokens]
        if case.path == COMPLETIONS:
            echo = ""
            if case.body.get("echo"):
                given = case.body["prompt"]
                given = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
                echo = given[case.prompts.index(prompt)]
                if not isinstance(echo, str) or case.logprobs is not None or case.body.get("prompt_logprobs") is not None:
                    echo = self.model.text(prompt, case.body.get("skip_special_tokens") is not False, chat=False)
                logprobs = logprobs and [None, *map(logprob_of, prompt[1:]), *logprobs] if not only_echo else logprobs
                if only_echo and logprobs is not None:
                    logprobs = [None, *map(logprob_of, prompt[1:])]
            finish = "length" if only_echo else said.finish
            return {"text": echo + ("" if only_echo else said.text), "finish": finish, "logprobs": logprobs or None}
        return {**self._message(case, said), "finish": said.finish, "logprobs": logprobs or None}

    @staticmethod
    def _cut(case: Case, got: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Compare the calls of a text that may be cut anywhere, and its finish reason: `tool_calls` only after whole calls. Then
        make both answers equal."""
        calls, said = got["calls"], wanted["calls"]
        assert len(calls) <= len(said), f"calls {calls}"
        for number, (call, other) in enumerate(zip(calls, said, strict=False), 1):
            begun = other[1].startswith(call[1]) if number == len(calls) else call[1] == other[1]
            assert call[0] == other[0] and begun, f"call {call}, not {other}"
        whole = bool(calls) and calls[-1][1] == said[len(calls) - 1][1]
        if "finish" in got:
            reason = "tool_calls" if whole and wanted["finish"] == "stop" else wanted["finish"]
            assert got["finish"] == reason, f"finish_reason {got['finish']} with {calls}, not {reason}"
        if wanted.pop("whole"):
            assert calls == said, f"calls {calls}, not {said}"
        elif got["content"].startswith(wanted["content"]):
            wanted["content"] = got["content"]  # and the start of a call
        wanted |= {name: got[name] for name in ("calls", "finish") if name in got}

    def _message(self, case: Case, said: ExpectedChoice) -> dict[str, Any]:
        """Content, reasoning and calls of a chat, without white space between them."""
        reasoning, _, rest = said.text.partition("</think>") if case.thinking else ("", "", said.text)
        content = rest.partition("\n<tool_call>")[0] if case.calls else rest
        if case.plain:
            return {"content": content, "reasoning": "", "calls": []}
        if not case.thinking and not case.body.get("tools"):
            return {"content": content, "reasoning": "", "calls": []}
        calls = case.calls if case.parallel else case.calls[:1]
        message = {"content": content.strip(), "reasoning": "" if case.hides_reasoning else reasoning.strip(), "calls": calls}
        return message | ({"whole": said.tokens[-1] == EOS and not case.broken} if case.calls else {})

    def _got(
        self, case: Case, index: int, content: str, reasoning: str, calls: list[Any], finish: str, logprobs: Any
    ) -> dict[str, Any]:
        if case.path == COMPLETIONS:
            return {"index": index, "text": content, "finish": finish, "logprobs": logprobs}
        if case.thinking or case.body.get("tools"):
            content, reasoning = content.strip(), reasoning.strip()
        return {
            "index": index,
            "content": content,
            "reasoning": reasoning,
            "calls": calls,
            "finish": finish,
            "logprobs": logprobs,
        }

    def _whole(self, case: Case, answer: dict[str, Any]) -> list[dict[str, Any]]:
        self._head(case, answer, "chat.completion" if case.chat else "text_completion")
        self._usage(case, answer["usage"], final=True)
        found = []
        for choice in answer["choices"]:
            message = choice.get("message", {})
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
            text = (message.get("content") or "") if case.chat else choice["text"]
            logprobs = self._logprobs(case, choice["logprobs"])
            reasoning = message.get("reasoning_content") or ""
            found.append(self._got(case, choice["index"], text, reasoning, calls, choice["finish_reason"], logprobs))
            self._prompt_scores(case, choice, answer)
        return found

    def _prompt_scores(self, case: Case, choice: dict[str, Any], answer: dict[str, Any]) -> None:
        count = case.body.get("prompt_logprobs")
        assert ("prompt_logprobs" in choice) == (count is not None and not case.chat)
        if "prompt_logprobs" in choice:
            tables = choice["prompt_logprobs"]
            prompt = case.prompts[choice["index"] // (case.body.get("n") or 1)]
            assert (len(tables), tables[0]) == (len(prompt), None)
            for token, table in zip(prompt[1:], tables[1:], strict=True):
                likely = [(token + distance) % ORACLE_FACTS.vocab_size for distance in (-2, -1, *range(TOP_LOGPROBS - 2))][:count]
                assert set(table) == {str(other) for other in (*likely, token)}, "log probabilities of other tokens"
                assert (table[str(token)]["logprob"], table[str(token)]["rank"]) == (logprob_of(token), 3)

    def _streamed(self, case: Case, text: str) -> list[dict[str, Any]]:
        blocks = text.split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""], blocks[-2:]
        events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
        options = case.body.get("stream_options") or {}
        at_end, each = bool(options.get("include_usage")), bool(options.get("continuous_usage_stats"))
        assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
        if at_end:
            last = events.pop()
            assert last["choices"] == []
            self._usage(case, last["usage"], final=True)
        counts = [event.get("usage") for event in events]
        assert all(("usage" in event) == (at_end or each) for event in events), "usage without its option, or no usage with it"
        assert all((count is not None) == each for count in counts)
        if each:
            for count in counts:
                self._usage(case, count, final=False)
            done = [count["completion_tokens"] for count in counts]
            assert done == sorted(done), "counts decrease"
            self._usage(case, counts[-1], final=True)
        parts: dict[int, dict[str, Any]] = {}
        for event in events:
            self._head(case, event, "chat.completion.chunk" if case.chat else "text_completion")
            (choice,) = event["choices"]
            self._part(case, choice, parts)
        assert all(part["finish"] for part in parts.values())
        made = ((i, part, [tuple(call) for call in part["calls"]]) for i, part in sorted(parts.items()))
        return [self._got(case, i, p["text"], p["reasoning"], calls, p["finish"], p["logprobs"] or None) for i, p, calls in made]

    def _part(self, case: Case, choice: dict[str, Any], parts: dict[int, dict[str, Any]]) -> None:
        """Add one event of a stream to its choice."""
        new = choice["index"] not in parts
        part = parts.setdefault(choice["index"], {"text": "", "reasoning": "", "calls": [], "logprobs": [], "finish": None})
        assert part["finish"] is None, "an event after the end of its choice"
        delta = choice.get("delta", {"content": choice.get("text", "")})
        assert not case.chat or ("role" in delta) == new, "the role comes once, first"
        part["text"] += delta.get("content") or ""
        part["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(part["calls"]):
                assert call["id"] and call["type"] == "function"
                part["calls"].append([call["function"]["name"], ""])
            part["calls"][call["index"]][1] += call["function"]["arguments"]
        part["logprobs"] += self._logprobs(case, choice["logprobs"]) or []
        part["finish"] = choice["finish_reason"]

    def _head(self, case: Case, answer: dict[str, Any], kind: str) -> None:
        assert (answer["object"], answer["model"]) == (kind, "tiny")
        asked = case.body.get("request_id")
        assert asked is None or answer["id"] == f"{'chatcmpl' if case.chat else 'cmpl'}-{asked}", answer["id"]
        self._tier(case, answer["service_tier"])

    def _tier(self, case: Case, shown: str) -> None:
        tier, own = case.body.get("service_tier"), "flex" if FLEX[case.tenant] else "default"
        assert shown == (tier if tier in ("flex", "priority") else own), f"service_tier {shown} for {tier}"

    def _logprobs(self, case: Case, shown: dict[str, Any] | None) -> list[float | None] | None:
        """The log probabilities of the generated tokens, after a check of the alternatives."""
        assert shown is None or case.logprobs is not None, "log probabilities without their field"
        if shown is None:
            return None
        if case.chat:
            return self._chat_logprobs(case, shown["content"])
        assert len({len(shown[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
        offsets = shown["text_offset"]
        assert offsets == sorted(offsets), f"offsets {offsets}"
        for name, value, table in zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True):
            assert (table is None) == (value is None), f"{value} with {table}"
            assert table is None or (name in table and len(table) <= 1 + (case.logprobs or 0)), f"{name!r} among {table}"
        return list(shown["token_logprobs"])

    @staticmethod
    def _chat_logprobs(case: Case, content: list[dict[str, Any]]) -> list[float | None]:
        for entry in content:
            likely = [one["logprob"] for one in entry["top_logprobs"]]
            assert likely == [-0.5 - rank for rank in range(case.logprobs or 0)], likely
            assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"] or "\\x" in entry["token"], entry
        return [entry["logprob"] for entry in content]

    # ---- counts

    def _usage(self, case: Case, usage: dict[str, Any], final: bool) -> None:
        """Check the usage: each prompt counts once, each choice separately; cached tokens belong to prompts."""
        names = ("input_tokens", "output_tokens") if case.path == RESPONSES else ("prompt_tokens", "completion_tokens")
        prompt, completion = (usage[name] for name in names)
        cached = usage[f"{names[0]}_details"]["cached_tokens"]
        reasoning = usage[f"{names[1]}_details"]["reasoning_tokens"]
        said = [
            self.model.expected_choice(case, p, s)
            for p, speeches in zip(case.prompts, case.speeches, strict=True)
            for s in speeches
        ]
        total = 0 if case.body.get("max_tokens") == 0 else sum(len(one.tokens) for one in said)
        hits = PAGE * sum(case.hits)
        thoughts = sum(self.model.reasoning_tokens(case, one) for one in said)
        assert prompt == sum(map(len, case.prompts)), f"{prompt} prompt tokens"
        assert usage["total_tokens"] == prompt + completion
        assert cached <= prompt and reasoning <= completion
        if final:
            assert completion == total, f"{completion} completion tokens, not {total}"
            assert reasoning == thoughts, f"{reasoning} reasoning tokens, not {thoughts}"
            assert cached == hits, f"{cached} cached tokens, not {hits}"
        assert completion <= total and cached <= hits
        if case.path != RESPONSES:
            self._drafts(case, usage["completion_tokens_details"], said, final)

    def _drafts(self, case: Case, details: dict[str, int], said: list[ExpectedChoice], final: bool) -> None:
        """Check that each predicted token counts as accepted or rejected. Without a prediction, other drafts count."""
        limits = [self.model.limit(case, prompt) for prompt in case.prompts for _ in range(case.choices)]
        drafts = [self.model.drafts(case, one, limit) for one, limit in zip(said, limits, strict=True)]
        predicted, accepted = self.model.prediction(case), details.get("accepted_prediction_tokens", 0)
        wanted = sum(own if predicted is None else from_it for own, from_it in drafts)
        assert accepted <= wanted and (accepted == wanted or not final), f"{accepted} accepted drafts, not {wanted}"
        if predicted is None:
            assert "rejected_prediction_tokens" not in details and details.get("accepted_prediction_tokens") != 0, details
        else:
            assert details["rejected_prediction_tokens"] == case.choices * len(predicted) - accepted, details

    # ---- responses

    def _response(self, case: Case, text: str, said: ExpectedChoice) -> None:
        answer = json.loads(text) if not case.body.get("stream") else self._events(text)
        body, length = case.body, said.finish == "length"
        assert (answer["status"], answer["object"]) == ("incomplete" if length else "completed", "response")
        assert answer["incomplete_details"] == ({"reason": "max_output_tokens"} if length else None)
        asked: dict[str, Any] = {
            "temperature": 0.6,
            "top_p": 0.9,
            "max_output_tokens": None,
            "instructions": None,
            "top_logprobs": 0,
        }
        asked |= {"metadata": {}, "parallel_tool_calls": True}
        for name, default in asked.items():
            assert answer[name] == body.get(name, default), f"{name} {answer[name]}"
        assert [tool["name"] for tool in answer["tools"]] == [tool["name"] for tool in body.get("tools", ())]
        assert answer["tool_choice"] == body.get("tool_choice", "auto" if body.get("tools") else "none")
        assert body.get("request_id") is None or answer["id"] == f"resp_{body['request_id']}"
        self._tier(case, answer["service_tier"])
        self._usage(case, answer["usage"], final=True)
        wanted = self._message(case, said)
        got: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
        for item in answer["output"]:
            if item["type"] == "function_call":
                got["calls"].append((item["name"], item["arguments"]))
                continue
            got["content" if item["type"] == "message" else "reasoning"] += "".join(part["text"] for part in item["content"])
        if case.thinking or body.get("tools"):
            got |= {name: got[name].strip() for name in ("content", "reasoning")}
        if case.calls:
            self._cut(case, got, wanted | {"finish": said.finish})
            wanted = got if wanted.pop("whole") is False else wanted
        assert got == wanted, f"the answer has\n{got}\nand not\n{wanted}"
        shown = [entry for item in answer["output"] for part in item.get("content", ()) for entry in part.get("logprobs", ())]
        values = self._chat_logprobs(case, shown)
        if case.logprobs is None:
            assert not shown, "log probabilities without their field"
        elif not case.thinking and not case.calls:
            assert values == [logprob_of(token) for token in said.tokens]

    def _events(self, text: str) -> dict[str, Any]:
        """The response in the last event of a stream; its items must equal those of the earlier events."""
        events: list[dict[str, Any]] = []
        for block in text.split("\n\n")[:-1]:
            name, _, data = block.partition("\ndata: ")
            events.append(json.loads(data))
            assert name == f"event: {events[-1]['type']}"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:2] == ["created", "in_progress"] and kinds[-1] in ("completed", "incomplete")
        last: dict[str, Any] = events[-1]["response"]
        items = list(self._items(events[2:-1]))
        assert items == last["output"], f"the events have\n{items}\nand the last one\n{last['output']}"
        return last

    @staticmethod
    def _items(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The items of the events. Each item begins, grows and ends before the next."""
        text, begun = "", 0
        for event in events:
            kind = event["type"].removeprefix("response.")
            if kind == "output_item.added":
                text, begun = "", begun + 1
            assert event["output_index"] == begun - 1, "an event of an item that is not open"
            if kind.endswith(".delta"):
                text += event["delta"]
            elif kind in ("output_text.done", "reasoning_text.done"):
                assert event["text"] == text
            elif kind == "function_call_arguments.done":
                assert event["arguments"] == text
            elif kind == "output_item.done":
                yield event["item"]
