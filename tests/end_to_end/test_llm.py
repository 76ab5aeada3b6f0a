"""The offline API, through the same queues and the same engine as the server."""

import asyncio
import itertools
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support.compiled_grammars import automaton_of_regex
from support.front_end.chat_templates import HARMONY, HERMES
from support.waiting import wait_for
from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from blinkpy import LLM, SamplingParams
from blinkpy.config import ConfigError
from blinkpy.dpu.text.tokenizer import NOTHING
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.queues import words as W

TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


@pytest.fixture(scope="module")
def null() -> Iterator[LLM]:
    with LLM("demo", device="null", slots=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", device="cpu", dtype="float32") as llm:
        yield llm


def test_more_prompts_than_slots_all_end_in_their_order(null: LLM) -> None:
    prompts = [f"number {i}" for i in range(50)]
    outputs = null.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True, seed=1))
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.prompt_token_ids == null.tokenizer.encode(output.prompt or "").tolist()
        (done,) = output.outputs
        assert len(done.token_ids) == 5
        assert done.finish_reason == "length"


def test_prompts_may_be_text_or_token_ids_one_or_several(null: LLM) -> None:
    params = SamplingParams(max_tokens=3, seed=5, ignore_eos=True)
    ids = null.tokenizer.encode("hello").tolist()
    wanted = [output.outputs[0].token_ids for output in null.generate("hello", params)]
    assert len(wanted) == 1
    assert [output.outputs[0].token_ids for output in null.generate(ids, params)] == wanted
    assert [output.outputs[0].token_ids for output in null.generate([ids, "hello"], params)] == wanted * 2
    objects: list[Any] = [{"prompt": "hello"}, {"prompt_token_ids": ids}]
    assert [output.outputs[0].token_ids for output in null.generate(objects, params)] == wanted * 2
    for one in objects:
        assert [output.outputs[0].token_ids for output in null.generate(one, params)] == wanted
    assert null.generate([]) == []


def test_outputs_of_one_prompt_share_its_pages_and_are_what_their_seeds_give(null: LLM) -> None:
    prompts = ["a story of a dog and a house " * 8, "x"]
    (long, short), hits = (
        null.generate(prompts, SamplingParams(n=5, max_tokens=6, seed=3, ignore_eos=True)),
        W.COUNTER["prefix_hit_tokens"],
    )
    assert [done.index for done in long.outputs + short.outputs] == [*range(5), *range(5)]
    for i, prompt in enumerate(prompts):
        for k in (0, 4):
            (alone,) = null.generate(prompt, SamplingParams(max_tokens=6, seed=3 + k, ignore_eos=True))
            assert (long, short)[i].outputs[k].token_ids == alone.outputs[0].token_ids
    before = null._pair.transport.read_engine()[hits]
    (output,) = null.generate("another " * 60, SamplingParams(n=5, max_tokens=2))
    pages = (len(output.prompt_token_ids) - 1) // null._pair.facts.page_size
    assert pages > 0
    assert null._pair.transport.read_engine()[hits] - before == 4 * pages * null._pair.facts.page_size, "one prefill"
    for n in (0, 129, True):
        with pytest.raises(ValueError, match="n must be 1 to 128"):
            SamplingParams(n=n)


def test_each_prompt_can_have_its_own_parameters(null: LLM) -> None:
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 4, 2)]
    assert [len(output.outputs[0].token_ids) for output in null.generate(["a", "b", "c"], each)] == [1, 4, 2]
    with pytest.raises(ValueError, match="2 prompts, but 3 sampling parameters"):
        null.generate(["a", "b"], each)


def test_a_stop_string_ends_a_text_and_is_not_in_it(null: LLM) -> None:
    params = {"max_tokens": 40, "seed": 7, "ignore_eos": True}
    (whole,) = null.generate("x", SamplingParams(**params))[0].outputs
    text = whole.text
    stop = text[len(text) // 2 :][:2]
    (done,) = null.generate("x", SamplingParams(**params, stop=stop))[0].outputs
    assert done.text == text[: text.index(stop)]
    assert done.finish_reason == "stop"
    # The last token completes the output, although the engine may have sent more.
    decode, count = null.get_tokenizer().decode, len(done.token_ids)
    assert done.token_ids == whole.token_ids[:count]
    assert stop in decode(done.token_ids) and stop not in decode(done.token_ids[:-1]), done.token_ids


def test_laws_of_random_requests(demo: LLM, rng: np.random.Generator) -> None:
    """Any combination of parameters: each output fulfils its request, and its counts, texts and reasons agree."""
    decode, texts = demo.get_tokenizer().decode, ["Once upon a time", "The cat sat on the mat. " * 3, "x"]
    for _ in range(10):
        count, prompts = int(rng.integers(1, 4)), [str(rng.choice(texts)) for _ in range(rng.integers(1, 3))]
        given: dict[str, Any] = {"n": count, "max_tokens": int(rng.integers(1, 12)), "temperature": float(rng.choice([0.0, 1.0]))}
        given |= {"stop": str(rng.choice(["e", "the", " a"]))} if rng.random() < 0.3 else {}
        asked = {name: int(rng.integers(0, 4)) if rng.random() < 0.5 else None for name in ("logprobs", "prompt_logprobs")}
        outputs = demo.generate(prompts, SamplingParams(**given, **asked, seed=int(rng.integers(1000))))
        assert [output.prompt for output in outputs] == prompts
        for output in outputs:
            assert output.finished and [done.index for done in output.outputs] == list(range(count))
            scores = output.prompt_logprobs
            assert (scores is None) == (asked["prompt_logprobs"] is None), given
            if scores is not None:
                assert scores[0] is None and len(scores) == len(output.prompt_token_ids)
                assert all(token in (table or {}) for token, table in zip(output.prompt_token_ids[1:], scores[1:], strict=True))
            for done in output.outputs:
                assert 1 <= len(done.token_ids) <= given["max_tokens"] and done.finish_reason in ("stop", "length")
                assert decode(done.token_ids).startswith(done.text) and given.get("stop", "never") not in done.text
                assert done.finish_reason == "stop" or len(done.token_ids) == given["max_tokens"]
                assert (done.logprobs is None) == (asked["logprobs"] is None)
                if done.logprobs is not None:
                    assert all(token in table for token, table in zip(done.token_ids, done.logprobs, strict=True))
            same = {tuple(done.token_ids) for done in output.outputs}
            assert len(same) == 1 or given["temperature"] > 0


def test_token_ids_end_at_the_vocabulary(null: LLM) -> None:
    """In every field of a request that has token ids."""
    size = null._pair.facts.vocab_size
    for token, fits in ((size - 1, True), (size, False)):
        asked: list[tuple[Any, dict[str, Any]]] = [([[1, token]], {})]
        asked += [("x", {name: [token]}) for name in ("stop_token_ids", "allowed_token_ids")] + [
            ("x", {"logit_bias": {token: 1.0}})
        ]
        for prompt, options in asked:
            if fits:
                assert len(null.generate(prompt, SamplingParams(max_tokens=1, **options))) == 1
            else:
                with pytest.raises(ValueError, match=rf"(0 to {size - 1}\b|{size})"):
                    null.generate(prompt, SamplingParams(max_tokens=1, **options))


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        ([[]], {}, "prompt 0: it has no tokens"),
        ([[1, -1]], {}, "prompt 0: its token ids must be 0 to"),
        ([[1], [1 << 30]], {}, "prompt 1: its token ids must be 0 to"),
        ([[1], [1, 1 << 31]], {}, "prompt 1: its token ids must be 0 to"),
        ([[-(1 << 70)]], {}, "prompt 0: its token ids must be 0 to"),
        ([[1]], {"max_tokens": 3, "min_tokens": 4}, "prompt 0: min_tokens must be at most max_tokens, 3, not 4"),
        ([[1]], {"max_tokens": None, "min_tokens": 1 << 30}, "prompt 0: min_tokens must be at most"),
        ([[1] * 100_000], {}, "prompt 0: it has 100000 tokens"),
        (["x"], {"max_tokens": 1 << 30}, "prompt 0: max_tokens must be at most"),
        (["x"], {"stop_token_ids": range(9)}, "stop_token_ids must be at most 8 ids"),
        (["x"], {"stop_token_ids": [1, 1 << 30]}, "prompt 0: stop_token_ids must be 0 to"),
        ([{"prompt": "x", "cache_salt": "y"}], {}, "not ['prompt', 'cache_salt']"),
        ([{}], {}, "only 'prompt' or 'prompt_token_ids'"),
        (["x\ud800"], {}, "surrogates not allowed"),
    ],
)
def test_an_invalid_prompt_is_refused_before_any_request_runs(
    null: LLM, prompt: list[Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        null.generate(prompt, SamplingParams(**options))


def test_an_error_names_only_fields_of_the_request(demo: LLM) -> None:
    """Each combination of the parameters that may leave no token."""
    given: dict[str, Any] = {"grammar": automaton_of_regex("[a-z]+"), "stop_token_ids": [5], "bad_words": ["x"]}
    given["allowed_token_ids"] = [3, 4, 5]
    for names in itertools.chain.from_iterable(itertools.combinations(given, size) for size in range(len(given) + 1)):
        params = SamplingParams(**{name: given[name] for name in names})
        (work,) = demo._works(0, np.array([3, 4], np.int32), params, NOTHING)
        blamed = next((name for name in ("allowed_token_ids", "bad_words") if name in names), "")
        blamed = blamed or ("stop_token_ids" if {"grammar", "stop_token_ids"} <= {*names} else "")
        assert work.generation.excluding == blamed, names


def test_the_longest_prompt_leaves_one_token(null: LLM) -> None:
    context = min(null._pair.context, null._pair.longest_prompt + 1)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    assert len(null.generate([[1] * (context - 1)], params)[0].outputs[0].token_ids) == 1
    for length in (context, context + 1):
        with pytest.raises(ValueError, match=f"prompt 0: it has {length} tokens, but the context length is"):
            null.generate([[1] * length], params)


@pytest.mark.parametrize(
    "prompts",
    [
        5, None, b"x", [b"x"], ["a", 5], [None], [[1, "a"]], [[1.5]], [True], [[True]], [["a"]],
        {"prompt": 5}, {"prompt": [1]}, {"prompt_token_ids": "1"}, {"prompt_token_ids": [1.0]},
    ],
)  # fmt: skip
def test_an_invalid_prompt_is_reported(null: LLM, prompts: Any) -> None:
    """An invalid prompt is not read as token ids."""
    with pytest.raises(ValueError, match="prompt"):
        null.generate(prompts, SamplingParams(max_tokens=1))


def test_prompts_may_come_from_anything_that_gives_them(null: LLM) -> None:
    params, ids = SamplingParams(max_tokens=1), np.array([5, 6])
    for several in (["a", "b"], ("a", "b"), iter(["a", "b"]), ({"prompt": text} for text in "ab")):
        assert len(null.generate(several, params)) == 2
    for one in (ids, [ids], [np.int64(5), 6], range(5, 7), {"prompt_token_ids": ids}):
        assert [done.prompt_token_ids for done in null.generate(one, params)] == [[5, 6]]  # type: ignore[arg-type]
    for wrong in (5, "x", [None], SamplingParams, [params, 5]):
        with pytest.raises(ValueError, match="sampling_params must be"):
            null.generate("a", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ("hi", {}, "'messages' must be an array"),
        (None, {}, "'messages' must be an array"),
        ({"role": "user", "content": "x"}, {}, "'messages' must be an array"),
        ([{"role": "user", "content": "x"}, 5], {}, "'messages[1]' must be an object"),
        ([{"role": "user", "content": "x"}, {1}], {}, "'messages[1]' must be an object, not set"),
        ([{"role": "user", "content": "x"}], {"tools": "x"}, "'tools' must be an array"),
        ([{"role": "user", "content": "x"}], {"tools": [5]}, "'tools[0]' must be an object"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": 5}, "'chat_template_kwargs' must be an object"),
        ([{"role": "user", "content": "x"}], {"add_generation_prompt": "no"}, "'add_generation_prompt' must be a boolean"),
        ([{"role": "user", "content": "x"}], {"continue_final_message": 1}, "'continue_final_message' must be a boolean"),
    ],
)
def test_invalid_messages_are_refused_with_a_reason(null: LLM, messages: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        null.chat(messages, SamplingParams(max_tokens=1), **options)


def test_options_are_the_engines_alone() -> None:
    for name in ("host", "workers", "max_batch"):
        with pytest.raises(ConfigError, match=f"unknown option '{name}' of LLM"):
            LLM("demo", **{name: 1})
    for length, reason in ((1 << 22, "exceeds the model's context"), (1, "must be at least 2")):
        with pytest.raises(ConfigError, match=f"max_model_len.*{reason}"):
            LLM("demo", device="null", max_model_len=length)


def test_the_demonstration_model_writes_text_and_greedy_repeats_itself(demo: LLM) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0)
    prompts = ["It was a dark and", "The captain of the ship", "In the morning she"]
    together = demo.generate(prompts, greedy)
    for prompt, output in zip(prompts, together, strict=True):
        assert demo.generate(prompt, greedy)[0].outputs == output.outputs, "the output depends on the other requests of the batch"
        assert len(re.findall(r"[a-z]{2,}", output.outputs[0].text)) >= 8, f"no words: {output.outputs[0].text!r}"
    seeded = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, top_k=200, seed=11)
    alone = [demo.generate(prompt, seeded)[0].outputs for prompt in prompts]
    assert [output.outputs for output in demo.generate(prompts, seeded)] == alone


def test_log_probabilities_come_with_each_token(demo: LLM, null: LLM) -> None:
    greedy, sampled = (SamplingParams(max_tokens=12, temperature=t, seed=2, logprobs=3) for t in (0.0, 1.5))
    (first,), (second,) = (output.outputs for output in demo.generate(["It was", "The ship"], [greedy, sampled]))
    for done in (first, second):
        assert len(done.logprobs) == len(done.token_ids)
        for token, table in zip(done.token_ids, done.logprobs, strict=True):
            assert token in table
            values = [entry.logprob for entry in table.values()]
            assert len(values) in (3, 4)
            assert values == sorted(values, reverse=True)
            assert sum(map(math.exp, values)) < 1 + 1e-5
    assert [next(iter(table)) for table in first.logprobs] == first.token_ids, "greedy sampling takes the likeliest token"
    assert "".join(table[t].decoded_token for t, table in zip(first.token_ids, first.logprobs, strict=True)) == first.text
    vocab = demo.tokenizer.vocab_size
    (synthetic,) = null.generate("x", SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True))[0].outputs
    for table in synthetic.logprobs or [{}]:
        assert [entry.logprob for entry in table.values()] == pytest.approx([-math.log(vocab - vocab // 16)] * len(table))
    assert null.generate("x", SamplingParams(max_tokens=3))[0].outputs[0].logprobs is None


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "report",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}


def test_calls_without_room_for_grammars(tmp_path: Path) -> None:
    """An optional grammar is omitted; a strict tool, which needs a grammar, is an error."""
    template = tmp_path / "tools.jinja"
    template.write_text("{% for tool in tools %}{{ tool.function.name }} <tool_call>{% endfor %}{{ messages[0].content }}")
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    }
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    with LLM("demo", device="null", slots=8, grammar_slots=0, chat_template=str(template)) as llm:
        for how in ("required", choice):
            (done,) = llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=3), tools=tools, tool_choice=how)
            assert len(done.outputs[0].token_ids) == 3
        strict = {"type": "function", "function": {"name": "h", "strict": True}}
        with pytest.raises(ValueError, match="does not support grammars"):
            llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=3), tools=[strict])


def test_chat_with_tools(tmp_path: Path) -> None:
    """A forced call, a conversation that continues with its result, and an optional call."""
    template = tmp_path / "tools.jinja"
    template.write_text(HERMES)
    ask: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    with LLM("demo", device="cpu", dtype="float32", chat_template=str(template)) as llm:
        several = llm.chat([ask, ask], SamplingParams(max_tokens=60, n=2), tools=[TOOL], tool_choice="required")
        for out in [one for done in several for one in done.outputs]:
            assert out.message is not None
            (call,) = out.message["tool_calls"]
            assert (call["type"], call["function"]["name"], out.message["content"]) == ("function", "report", None)
            assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
        past = [*ask, out.message, {"role": "tool", "tool_call_id": call["id"], "content": "Thanks"}]
        (later,) = llm.chat(past, SamplingParams(max_tokens=5), tools=[TOOL])
        assert later.prompt is not None
        assert "<tool_response>Thanks" in later.prompt
        said = later.outputs[0].message
        assert said is not None and said["role"] == "assistant"
        assert said["content"].rstrip() == later.outputs[0].text.rstrip()  # sampled, so it may end in a space
        (plain,) = llm.chat(ask, SamplingParams(max_tokens=5))
        assert plain.outputs[0].message == {"role": "assistant", "content": plain.outputs[0].text}
        for fields, message in (
            ({"tools": [{"type": "function"}]}, r"tools\[0\].function"),
            ({"tool_choice": "required"}, "the request has no 'tools'"),
            ({"tools": [TOOL], "chat_template_kwargs": {"a": 1}}, "no variable 'a'"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.chat(ask, **fields)


def harmony_model(folder: Path) -> Path:
    """The demonstration model with gpt-oss's template and tokens, which replace its last words and its end token."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((DEMO_FOLDER / name).read_text().replace('"<|end|>"', '"<|endoftext|>"'))
    (folder / "chat_template.jinja").write_text(HARMONY)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for _ in TOKENS:
        merges.remove(next(merge for merge in merges if vocabulary["".join(merge)] == max(vocabulary.values())))
        del vocabulary[max(vocabulary, key=vocabulary.__getitem__)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    encoder = Encoder.from_file(str(folder / "tokenizer.json"))
    encoder.add_special_tokens([AddedToken(name, special=True) for name in TOKENS])
    encoder.save(str(folder / "tokenizer.json"))
    return folder


def test_chat_in_channels(tmp_path: Path) -> None:
    """A grammar makes the engine generate the format's tokens, and a forced call always appears."""
    with LLM(str(harmony_model(tmp_path)), device="cpu", dtype="float32") as llm:
        assert set(TOKENS[-2:]) <= {llm.tokenizer.spell(token)[0] for token in llm.tokenizer.eos_ids}
        ask = [{"role": "user", "content": "Hi"}]
        parameters = TOOL["function"]["parameters"] | {"additionalProperties": False}
        tool = TOOL | {"function": TOOL["function"] | {"parameters": parameters}}
        towards = {int(llm.tokenizer.encode(text, False)[0]): 50.0 for text in (" to", " json")}
        done = llm.chat([ask] * 3, SamplingParams(max_tokens=80, logit_bias=towards), tools=[tool], tool_choice="required")
        for out in (one.outputs[0] for one in done):
            assert out.message is not None
            ((call,), content) = out.message["tool_calls"], out.message["content"]
            assert (out.finish_reason, call["function"]["name"], content) == ("stop", "report", None)
            assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
            head = " to=functions.report<|channel|>commentary json<|message|>"
            assert out.text == head + call["function"]["arguments"]
        (free,) = llm.chat(ask, SamplingParams(max_tokens=30, ignore_eos=True))
        assert free.outputs[0].message is not None
        free.outputs[0].text.encode()


def test_chat_uses_the_template(demo: LLM) -> None:
    conversation = [{"role": "user", "content": "Tell me a story."}]
    one = demo.chat(conversation, SamplingParams(max_tokens=8, temperature=0))
    two = demo.chat([conversation, conversation], SamplingParams(max_tokens=8, temperature=0))
    assert [output.outputs for output in two] == [one[0].outputs] * 2
    assert "Tell me a story." in (one[0].prompt or "")
    same = demo.chat(conversation, SamplingParams(max_tokens=8, temperature=0), tools=None, chat_template_kwargs=None)
    assert same == one
    with pytest.raises(ValueError, match="surrogates not allowed"):
        demo.chat([{"role": "user", "content": "\ud800"}])


def test_a_last_message_is_continued_or_stands_alone(demo: LLM) -> None:
    params, begun = SamplingParams(max_tokens=2, temperature=0), [{"role": "user", "content": "Hi"}]
    last = {"role": "assistant", "content": "It was a dark "}
    (open_end,) = demo.chat([*begun, last], params, continue_final_message=True)
    assert (open_end.prompt or "").endswith("It was a dark ")
    (same,) = demo.chat([*begun, last], params, continue_final_message=True, add_generation_prompt=False)
    assert same == open_end
    (asked,), (closed,) = demo.chat(begun, params), demo.chat(begun, params, add_generation_prompt=False)
    assert asked.prompt != closed.prompt
    assert (asked.prompt or "").startswith(closed.prompt or "-")
    with pytest.raises(ValueError, match="add_generation_prompt"):
        demo.chat([*begun, last], params, continue_final_message=True, add_generation_prompt=True)
    foreign: Any = {"chat_template": "{{ messages }}"}
    with pytest.raises(TypeError, match="chat_template"):
        demo.chat(begun, params, **foreign)


class Bar:
    """A progress bar with tqdm's interface."""

    made: ClassVar[list["Bar"]] = []

    def __init__(self, total: int, desc: str):
        self.total, self.desc, self.steps, self.open = total, desc, 0, True
        self.made.append(self)

    def update(self, steps: int) -> None:
        assert self.open
        self.steps += steps

    def close(self) -> None:
        self.open = False


def test_a_start_tells_its_phases(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """In the log if its level permits, otherwise on standard error, unless the caller disables them."""
    for shown in (None, False):
        with LLM("demo", device="null", show_progress=shown):
            pass
        reported = [line for line in capfd.readouterr().err.splitlines() if re.fullmatch(r"blinkpy: .+ \.\.\..*", line)]
        assert bool(reported) == (shown is None)
    with caplog.at_level("INFO", "blinkpy.llm"), LLM("demo", device="null"):
        pass
    assert "blinkpy:" not in capfd.readouterr().err
    *phases, ready = [record.getMessage() for record in caplog.records if record.name == "blinkpy.llm"]
    assert phases
    assert all(" ..." in phase for phase in phases)
    assert re.fullmatch(r"the engine is ready after \d+\.\d s", ready)


def test_outputs_are_counted_on_standard_error(null: LLM, capfd: pytest.CaptureFixture[str], rng: np.random.Generator) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True, n=int(rng.integers(1, 4)))
    prompts, conversation = ["a"] * int(rng.integers(1, 9)), [{"role": "user", "content": "Hi"}]
    for shown, text in ((None, ""), (False, ""), (True, "blinkpy: generating ...\n")):  # standard error is not a terminal
        later = "" if shown is False else r"(blinkpy: generating \.\.\. \d+%, \d+ s\n)*"  # on a busy machine
        null.generate(prompts, params, use_tqdm=shown)
        assert re.fullmatch(re.escape(text) + later, capfd.readouterr().err)
        null.chat(conversation, params, use_tqdm=shown)
        assert re.fullmatch(re.escape(text) + later, capfd.readouterr().err)
    Bar.made.clear()
    null.generate(prompts, params, use_tqdm=Bar)
    null.chat(conversation, params, use_tqdm=Bar)
    assert null.generate([], params, use_tqdm=Bar) == []
    assert [(bar.total, bar.steps, bar.open) for bar in Bar.made] == [(n, n, False) for n in (len(prompts) * params.n, params.n)]
    assert capfd.readouterr().err == ""


def test_an_interrupted_call_leaves_no_request_behind(null: LLM) -> None:
    """The next call finds all slots free, and gets only its own outputs."""
    params = SamplingParams(max_tokens=2000, ignore_eos=True, seed=1)

    class Interrupting(Bar):
        def update(self, steps: int) -> None:
            raise KeyboardInterrupt

    prompts = ["a"] * 20
    with pytest.raises(KeyboardInterrupt):
        null.generate(prompts, [replace(params, max_tokens=1)] * 3 + [params] * 17, use_tqdm=Interrupting)
    wait_for(lambda: null._pair.in_flight == 0)
    short = replace(params, max_tokens=5)
    assert [output.outputs[0].token_ids for output in null.generate(prompts, short)] == [
        null.generate("a", short)[0].outputs[0].token_ids
    ] * len(prompts)


def test_it_works_within_a_running_event_loop(null: LLM) -> None:
    """A notebook has a running event loop."""
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)

    async def ask() -> list[int]:
        return null.generate("a", params)[0].outputs[0].token_ids

    assert asyncio.run(ask()) == null.generate("a", params)[0].outputs[0].token_ids


def test_chat_takes_parts_as_text_and_refuses_what_is_none(demo: LLM) -> None:
    """This template joins the parts; an image, missing content or content of another type is an error."""
    params = SamplingParams(max_tokens=4, temperature=0)
    parts = [{"type": "text", "text": "Tell"}, {"type": "text", "text": "tale"}]
    one, other = demo.chat([[{"role": "user", "content": content}] for content in (parts, "Telltale")], params)
    assert (one.prompt, one.outputs[0].token_ids) == (other.prompt, other.outputs[0].token_ids)
    ask: dict[str, Any] = {"role": "user", "content": "Hi"}
    one, other = demo.chat([[ask, {"role": "assistant", "content": silent}, ask] for silent in (None, "")], params)
    assert one.prompt == other.prompt, "clients repeat an answer with a call in this form"
    for messages, message in (
        ([{"role": "user", "content": None}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": ["Tell me"]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
    ):
        with pytest.raises(ValueError, match=message):
            demo.chat(messages, params)


def test_defaults_come_from_the_models_generation_config(demo: LLM) -> None:
    own = json.loads((Path(demo.config.model.model) / "generation_config.json").read_text())
    params = demo.default_sampling_params()
    for name in ("temperature", "top_p", "top_k"):
        assert getattr(params, name) == own.get(name, getattr(SamplingParams(), name))


def test_a_dead_engine_is_an_error_at_once_and_close_cleans_up() -> None:
    llm = LLM("demo", device="null")
    segment = Path(f"/dev/shm/blinkpy.{llm.config.engine.name}")
    assert segment.exists()
    os.kill(llm._engine.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="engine"):
        llm.generate("x")
    assert time.monotonic() - began < 30  # far below a start's time limit
    llm.close()
    llm.close()
    assert not segment.exists()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")
