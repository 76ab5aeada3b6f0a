"""Sinks of text: collected for a whole answer, or written to the client as it comes."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import orjson

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import Generation
from blinkpy.dpu.http.answers import Answer, Choice, Usage, likeliest
from blinkpy.dpu.http.connection import Connection
from blinkpy.dpu.http.fields.http_request import StreamUsage
from blinkpy.dpu.http.response_answer import ResponseAnswer
from blinkpy.dpu.token_logprobs import TokenLogprobs

BACKLOG_BYTES = 8 << 20  # what a slow client may leave unread, whatever the number of events


class Collector:
    """Gathers the choices of one request. choices: of each prompt; `n` of them are the answer, the likeliest if there are
    more. with_logprobs: whether the answer shows them; shows_prompt: and those of the prompts, as a field. done: set when all
    have ended, or with the first error, which error then is. awaited: all that somebody may wait for."""

    def __init__(self, answer: Answer | ResponseAnswer, n: int = 1, with_logprobs: bool = True, shows_prompt: bool = False):
        self.answer, self._n, self._with_logprobs, self.shows_prompt = answer, n, with_logprobs, shows_prompt
        self.choices = n
        self.generations: list[Generation] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.awaited = [self.done]
        self.error: ApiError | None = None
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        self._ended = 0

    def on_text(self, generation: Generation, text: str, logprobs: list[TokenLogprobs]) -> None:
        self._texts[generation.index].append(text)
        self._logprobs[generation.index] += logprobs

    def send(self) -> None:
        """Nothing goes out before the end."""

    def ended(self, generation: Generation) -> None:
        self._ended += 1
        if generation.error is not None and self.error is None:
            self.error = generation.error
        if (self._ended == len(self.generations) or self.error is not None) and not self.done.done():
            self.done.set_result(None)

    def usage(self) -> Usage:
        """Tokens over all choices, without those generated after a stop string."""
        prompts, generations = self.generations[:: self.choices], self.generations
        counts = (
            sum(g.prompt_length for g in prompts),
            sum(g.tokens for g in generations),
            sum(g.cached_tokens for g in prompts),
            sum(g.reasoning.tokens for g in generations if g.reasoning is not None),
        )
        return Usage(*counts)

    def body(self) -> bytes:
        """The whole answer, once done without an error."""
        ended = [(g.index, g.finish_reason or "") for g in self.generations]
        scores = {g.index: g.scores if self.shows_prompt else None for g in self.generations}
        choices = [Choice(i, "".join(self._texts[i]), reason, self._logprobs[i], scores[i]) for i, reason in ended]
        if self.choices > self._n:
            choices = likeliest(choices, self.choices, self._n)
        if not self._with_logprobs:
            choices = [replace(choice, logprobs=()) for choice in choices]
        return self.answer.whole(choices, self.usage())


class Streamer(Collector):
    """Writes events to the connection, all of a step at once. started: set with the first event, so that an error before it can
    still be an answer with a status of its own. usage: where token counts are shown. on_slow: called once, when the client leaves
    too much unread."""

    def __init__(
        self,
        answer: Answer | ResponseAnswer,
        connection: Connection,
        max_backlog: int,
        usage: StreamUsage,
        on_slow: Callable[[], None],
    ):
        super().__init__(answer)
        self._usage_at_end, self._usage_each = usage
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.awaited.append(self.started)
        self._connection, self._transport = connection, connection.transport
        self._max_backlog, self._on_slow = max_backlog, on_slow
        self._chunks: list[bytes] = []  # of HTTP/1.1's chunked encoding, not written yet: an event in each
        self._frame: tuple[bytes, bytes] | None = None  # of the events of an only choice, once it had its first one
        self._open = False  # the response has started
        self._backlog = 0  # events since the client had read everything
        self._slow = False

    def open(self) -> None:
        """The response has started: write the events that wait, and from now on those of each step. Where all have come, they go
        out with the end."""
        self._open = True
        if self._chunks:
            self._connection.held.write(b"".join(self._chunks))
            self._chunks.clear()
        if not self.done.done():
            self._connection.held.release()

    def on_text(self, generation: Generation, text: str, logprobs: list[TokenLogprobs]) -> None:
        frame = self._frame
        if frame is not None and not logprobs:
            before, behind = frame
            content = orjson.dumps(text)
            size = len(before) + len(content) + len(behind)
            self._chunks.append(b"%x\r\n%b%b%b\r\n" % (size, before, content, behind))
            return
        event = self.answer.event(generation.index, text, logprobs)
        if event:
            self._add(event)
        if len(self.generations) == 1 and not self._usage_each:
            self._frame = self.answer.frame(generation.index)

    def ended(self, generation: Generation) -> None:
        if generation.error is None and generation.finish_reason is not None:
            self._add(self.answer.last_event(generation.index, generation.finish_reason))
        super().ended(generation)
        if not self.started.done():
            self.started.set_result(None)

    def end(self) -> bytes:
        """What the stream ends with."""
        if self.error is not None:
            return self.answer.error_event(self.error)
        return self.answer.end(self.usage(), self._usage_at_end)

    def _add(self, event: bytes) -> None:
        if self._usage_each:
            event = self.answer.with_usage(event, self.usage())
        self._chunks.append(b"%x\r\n%b\r\n" % (len(event), event))

    def send(self) -> None:
        chunks = self._chunks
        if not chunks:
            return
        if not self._open:
            if not self.started.done():
                self.started.set_result(None)
            return
        count = len(chunks)
        data = chunks.pop() if count == 1 else b"".join(chunks)
        chunks.clear()
        if self._connection.gone or self._slow:
            return
        transport = self._transport
        transport.write(data)
        unread = transport.get_write_buffer_size()
        if unread:
            self._backlog += count
            if self._backlog > self._max_backlog or unread > BACKLOG_BYTES:
                self._slow = True
                self._on_slow()
        else:
            self._backlog = 0
