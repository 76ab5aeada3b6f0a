"""Offline use: `blinkpy.LLM(model).generate(prompts)`, with the server's queues, scheduler and engine.

The engine is a separate process; this process is its only front end. Names follow vLLM's offline API.
"""

import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from blinkpy.config import Config, ConfigError, check_asked
from blinkpy.config import options as config_options
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import PromptScores
from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.http.chat_dialect import ChatDialect
from blinkpy.dpu.http.fields.chat_fields import chat_request
from blinkpy.dpu.http.message_answer import message_of
from blinkpy.dpu.link.connectors import open_queue_pair
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.dpu.text.chat_template import ChatError, load_template
from blinkpy.dpu.text.tokenizer import NOTHING, Shown, Tokenizer
from blinkpy.dpu.tools.harmony_calls import unmarked
from blinkpy.dpu.tools.message_parser import Expected
from blinkpy.models.weights.model_folder import find_model
from blinkpy.output_work import OutputWork
from blinkpy.outputs import RequestOutput
from blinkpy.process_exit import describe_exit
from blinkpy.processes import Child, ChildError
from blinkpy.progress import OutputCount, Progress
from blinkpy.prompts import Conversation, Prompt, as_dict, as_dicts, encodable, id_array, prompt_list
from blinkpy.queues.request_parameters import PARAMETERS
from blinkpy.queues.words import Int32
from blinkpy.sampling_params import SamplingParams
from blinkpy.serving.engine_loop import EngineLoop
from blinkpy.serving.engine_process import ENGINE_STOP_S, START_SILENCE_S, private_name, remove_leftovers
from blinkpy.transport.contract import WorkerIdentity
from blinkpy.transport.segment import unlink_stale

ATTACH_S = 10.0
LEASE_MS = 60_000  # long, because no other process waits for the slots, and a debugger may stop this process

logger = logging.getLogger("blinkpy.llm")

Bar = bool | Callable[..., Any] | None  # as `shown` of OutputCount


class LLM:
    """A model with a separate engine, for batches of prompts. A context manager; close() ends the engine.

    model: a folder, a hub id, or "demo" for the built-in model.
    show_progress: False hides the progress of the start. By default, a terminal shows a progress bar on standard error;
        elsewhere, each phase prints a line, and a long phase one more every 10 s. If `logging` shows the logger "blinkpy.llm" at
        level INFO, it gets these lines instead.
    options: engine options by the names in docs/cli.md, such as device="cpu" or max_model_len=2048.
    Raises ConfigError for an invalid option or an unusable model, and RuntimeError if the engine fails.
    """

    def __init__(self, model: str = "demo", *, show_progress: bool | None = None, **options: Any):
        foreign = {"model", "name", "workers", "shutdown_s"}
        allowed = {item.name for _, item in config_options("engine")} - foreign | {"chat_template", "engine_timeout_ms"}
        for name in options:
            if name not in allowed:
                raise ConfigError(f"unknown option {name!r} of LLM; known options: {', '.join(sorted(allowed))}")
        check_asked(options)
        name = private_name()
        self.config = Config().with_options({"lease_ms": LEASE_MS, **options, "model": model, "name": name})
        self._lock = threading.Lock()
        remove_leftovers()
        with open(os.devnull, "w") as nowhere:
            progress = Progress(nowhere if show_progress is False else None, logger=logger)
            self.config = find_model(self.config, progress)
            folder = Path(self.config.model.model)
            self.tokenizer = Tokenizer(folder)
            self._default = self.tokenizer.request_defaults()
            child = Child("engine", self.config)
            loops = list[EngineLoop]()
            self._end = weakref.finalize(self, _end_engine, child, name, loops)
            try:
                child.wait_ready(START_SILENCE_S, progress, progress.tick)
                self._engine = child
                self._loop = EngineLoop(partial(open_queue_pair, self.config, WorkerIdentity(0)))
                loops.append(self._loop)
                if not self._loop.connected(ATTACH_S):
                    raise RuntimeError(f"the engine failed: {self._loop.engines.status()}")
            except ChildError as error:
                self._end()
                raise ConfigError(str(error)) if error.usage else RuntimeError(str(error)) from error
            except BaseException:
                self._end()
                raise
            finally:
                seconds = progress.close()
        logger.info("the engine is ready after %.1f s", seconds)
        limit = 64 * self._pair.context + 4096
        template = load_template(folder, self.tokenizer.config, self.config.model.chat_template, limit)
        self._dialect = ChatDialect(template, self.config.model, self.tokenizer.model_type)
        self.tokenizer.end_with(self._dialect.ends)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. A second call has no effect."""
        self._end()

    def default_sampling_params(self) -> SamplingParams:
        """The default of generate(), from the model's generation_config.json."""
        return SamplingParams(**{p.name: getattr(self._default, p.name) for p in PARAMETERS if p.from_model})

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with encode(text) and decode(token_ids)."""
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = False,
        use_tqdm: Bar = None,
    ) -> list[RequestOutput]:
        """Continue prompts. Returns an output for each prompt, in order.

        prompts: a text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
        sampling_params: one for all prompts, or a list with one per prompt.
        parse_special: encode text spelled like a special token as that token; for texts in the form of a chat
            template.
        use_tqdm: show how many outputs have ended; None: a bar on a terminal, elsewhere a line every 10 s, as for
            `show_progress`. A callable such as tqdm is called with `total` and `desc`, and makes a bar with update(n) and
            close().
        Raises ValueError for a prompt or parameter that can't be served, before any generation, and RuntimeError if the engine
        fails.
        """
        given = prompt_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        encode = partial(self.tokenizer.encode, parse_special=parse_special)
        ids = [encode(p) if isinstance(p, str) else id_array(p) for p in given]
        return self._run(texts, ids, self._params_of_prompts(sampling_params, len(ids)), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        use_tqdm: Bar = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several. Each output has a `message`.

        messages: lists of {"role", "content"} and further fields of OpenAI's messages.
        tools, tool_choice, chat_template_kwargs, add_generation_prompt, continue_final_message: see
            docs/api.md and docs/tools.md.
        Other parameters and errors: as for generate().
        """
        one = isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence)  # invalid values get an error below
        several: Any = [messages] if one or (messages and isinstance(messages[0], Mapping)) else messages
        try:
            fields = {
                "tools": as_dicts(tools),
                "tool_choice": as_dict(tool_choice),
                "chat_template_kwargs": as_dict(chat_template_kwargs),
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
            }
            requests = [chat_request({"messages": as_dicts(one), **fields}, self._default) for one in several]
            prompts = [self._dialect.prompt(request, self.tokenizer.specials) for request in requests]
            takes_grammars = self._pair.facts.grammar_share > 0
            fields_of = [r.grammar if r.grammar is not None and (r.grammar.needed or takes_grammars) else None for r in requests]
            closes = self.tokenizer.spells_bytes
            grammars = [None if field is None else automaton_of_grammar(field.grammar, closes=closes) for field in fields_of]
        except ApiError as error:
            raise ValueError(error.message) from error
        except GrammarError as error:
            raise ValueError(error.with_param("tools")[1]) from error
        except ChatError as error:
            raise ValueError(str(error)) from error
        params = self._params_of_prompts(sampling_params, len(prompts))
        for i, grammar in enumerate(grammars):
            if grammar is not None and params[i].grammar is not None:
                raise ValueError(f"prompt {i}: 'grammar' can't be used with tools, which have their own grammar")
            params[i] = params[i] if grammar is None else replace(params[i], grammar=grammar)
        ids = [self.tokenizer.encode(encodable(text), False, parse_special=True) for text, _ in prompts]
        texts = [self.tokenizer.specials.unmark(text) for text, _ in prompts]
        return self._run(texts, ids, params, use_tqdm, [expected for _, expected in prompts])

    def _params_of_prompts(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        """The parameters of each prompt."""
        chosen: Any = self.default_sampling_params() if params is None else params
        is_list = isinstance(chosen, Iterable) and not isinstance(chosen, SamplingParams)
        several = list(chosen) if is_list else [chosen]
        wrong = [one for one in several if not isinstance(one, SamplingParams)]
        if wrong:
            raise ValueError(f"sampling_params must be a SamplingParams, or a list with one per prompt, not {wrong[0]!r}")
        of_prompts = several if is_list else several * count
        if len(of_prompts) != count:
            raise ValueError(f"{count} prompts, but {len(of_prompts)} sampling parameters")
        return of_prompts

    def _run(
        self,
        texts: Sequence[str | None],
        ids: Sequence[Int32],
        params: Sequence[SamplingParams],
        shown: Bar,
        expected: Sequence[Expected | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate all outputs.

        shown: see OutputCount.
        expected: for chats, the permitted parts of each answer in addition to content.
        """
        showing = [NOTHING if expected is None or expected[i] is None else self._dialect.shown for i in range(len(ids))]
        works = [self._works(i, ids[i], params[i], showing[i]) for i in range(len(ids))]
        with self._lock, contextlib.closing(OutputCount(shown, sum(map(len, works)), logger)) as count:

            def tick(ended: int) -> None:
                for _ in range(ended - count.done):
                    count.advance()
                count.show()

            try:
                self._loop.run((one for rank in itertools.zip_longest(*works) for one in rank if one is not None), tick)
            except ApiError as error:
                raise RuntimeError(_failure(error, works)) from error
        spell = self.tokenizer.spell
        outputs = [[work.output(i, spell) for i, work in enumerate(of_prompt)] for of_prompt in works]
        if expected is not None:
            outputs = [
                [replace(one, text=unmarked(one.text), message=message_of(one.text, may)) for one in several]
                for several, may in zip(outputs, expected, strict=True)
            ]
        scores = [of_prompt[0].prompt_logprobs(spell) for of_prompt in works]
        return [
            RequestOutput(str(i), texts[i], ids[i].tolist(), done, prompt_logprobs=scores[i]) for i, done in enumerate(outputs)
        ]

    @property
    def _pair(self) -> QueuePair:
        """The queue pair. Raises RuntimeError if the engine is lost, or this LLM is closed."""
        if not self._end.alive:
            raise RuntimeError("this LLM is closed: make a new one")
        pair = self._loop.engines.pair
        if pair is None:
            code = self._engine.exit_code()
            raise RuntimeError(f"the engine failed: {self._loop.engines.status() if code is None else describe_exit(code)}")
        return pair

    def _works(self, index: int, ids: Int32, params: SamplingParams, showing: Shown) -> list[OutputWork]:
        """All outputs of a prompt. If they can share a page of it, the others start after the first one's first token.

        showing: special tokens with text.
        """
        context = self._pair.context
        try:
            if len(ids) == 0:
                raise ValueError("it has no tokens")
            if not (0 <= int(ids.min()) and int(ids.max()) < self._pair.facts.vocab_size):
                raise ValueError(f"its token ids must be 0 to {self._pair.facts.vocab_size - 1}")
            if len(ids) >= min(context, self._pair.longest_prompt + 1):
                raise ValueError(f"it has {len(ids)} tokens, but the context length is {context}")
            if any(token >= self._pair.facts.vocab_size for token in params.stop_token_ids or ()):
                raise ValueError(f"stop_token_ids must be 0 to {self._pair.facts.vocab_size - 1}")
            sampling = params.request_parameters(context - len(ids), self.tokenizer.eos_ids)
            rules = params.token_rules(self._pair.facts.vocab_size, partial(self.tokenizer.encode, add_special_tokens=False))
            self._pair.require_space(params.grammar, rules)
            scores = None if params.prompt_logprobs is None else PromptScores(ids.tolist(), params.prompt_logprobs)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
        works: list[OutputWork] = []
        for variant in sampling.variants(params.n):
            leader = works[0].generation if works and len(ids) > self._pair.facts.page_size else None
            shown = None if works else scores
            works.append(OutputWork(index, ids, variant, params, self.tokenizer, leader, showing, rules, shown))
        return works


def _failure(error: ApiError, works: Sequence[Sequence[OutputWork]]) -> str:
    """An error of one prompt, or of the engine, as text for the user."""
    failed = next((work.generation for of_prompt in works for work in of_prompt if work.generation.error is error), None)
    if failed is None or error.status == 503:
        return f"the engine failed: {error.message}"
    return f"prompt {failed.index}: {error.message}"


def _end_engine(child: Child, segment: str, loops: list[EngineLoop]) -> None:
    for loop in loops:
        loop.close()
    child.end(ENGINE_STOP_S)
    unlink_stale(segment)  # in case the engine was killed
