"""Sinks of generated text: collected for a whole answer, or streamed to the client."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import orjson

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import Generation, TokenLogprobs
from blinkpy.dpu.http.answers import Answer, Choice, Turns, Usage, likeliest
from blinkpy.dpu.http.anthropic_answer import AnthropicAnswer
from blinkpy.dpu.http.fields.http_request import StreamUsage
from blinkpy.dpu.http.response_answer import ResponseAnswer
from blinkpy.dpu.http.wire.byte_budget import ByteBudget
from blinkpy.dpu.http.wire.connection import Connection
from blinkpy.dpu.text.detokenizer import Detokenizer

AnyAnswer = Answer | ResponseAnswer | AnthropicAnswer
LINE_END = b"\r\n"
SIZE_LINES = [b"%x\r\n" % size for size in range(512)]  # lines with the sizes of chunks, built in advance
BACKLOG_BYTES = 8 << 20  # default limit of unread bytes of a slow client, whatever the number of events
TEXT_BYTES, PAIR_BYTES = 128, 128  # bytes of memory per piece of text, and per log probability
UNREAD_BYTES = 1 << 16  # a stream's unread bytes beyond this count toward the worker's limit
REPORT_BYTES = 1 << 16  # an answer reports its memory after each growth by this
LONG_BYTES = 1 << 16  # bytes of an answer that takes more than a millisecond to write


class Collector:
    """Gathers the choices of one request.

    choices: choices generated per prompt; the answer contains the `n` likeliest.
    with_logprobs: whether the answer has log probabilities.
    shows_prompt: whether it also has the prompts' log probabilities, as a field.
    done: set when all choices have ended, or one has failed (see `error`).
    awaited: all futures that a task may wait for.
    dropped: whether the client no longer wants the answer.
    budget: memory limit of all answers of the worker.
    """

    def __init__(
        self,
        answer: AnyAnswer,
        n: int = 1,
        with_logprobs: bool = True,
        shows_prompt: bool = False,
        budget: ByteBudget | None = None,
        owner: str = "",
    ):
        self._budget, self._owner, self._bytes, self._reported = budget, owner, 0, REPORT_BYTES
        self.answer, self._n, self._with_logprobs, self.shows_prompt = answer, n, with_logprobs, shows_prompt
        self.choices = n
        self.generations: list[Generation] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.awaited = [self.done]
        self.error: ApiError | None = None
        self.dropped = False
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        self._ended = 0

    def on_text(self, generation: Generation, text: str, logprobs: list[TokenLogprobs]) -> None:
        self._texts[generation.index].append(text)
        self._bytes += TEXT_BYTES + len(text)
        if logprobs:
            self._logprobs[generation.index] += logprobs
            self._bytes += PAIR_BYTES * sum(2 + len(entry.top) for entry in logprobs)
        if self._bytes > self._reported and self._budget is not None:
            self._reported = self._bytes + REPORT_BYTES
            self._budget.hold(self, self._bytes, self._give_up, self._owner)

    def expect(self, size: int) -> None:
        """Reserve bytes for the answer, in addition to its text. Raises ApiError if the limit is reached."""
        self._bytes += size
        if size and self._budget is not None:
            self._budget.hold(self, self._bytes, self._give_up, self._owner)
            if self.error is not None:
                raise self.error.again()

    @property
    def is_long(self) -> bool:
        """Whether body() takes too long for one turn of the event loop."""
        return self._bytes > LONG_BYTES

    def _give_up(self, error: ApiError) -> None:
        """Drop the text for lack of memory. A complete answer stays, because it is already being sent, and is freed soon."""
        if not self.done.done():
            self._texts.clear()
            self._logprobs.clear()
            self.error = error
            self.done.set_result(None)

    def send(self) -> None:
        """No operation: the answer is sent when it is complete."""

    def ended(self, generation: Generation) -> None:
        self._ended += 1
        self.answer.stop_sequence = generation.stop_text
        if generation.error is not None and self.error is None:
            self.error = generation.error
        if (self._ended == len(self.generations) or self.error is not None) and not self.done.done():
            self.done.set_result(None)

    def stop(self) -> None:
        """No operation; Streamer overrides it."""

    def close(self) -> None:
        """Break reference cycles, and release the memory."""
        self.generations = []
        if self._budget is not None:
            self._budget.release(self)

    def usage(self) -> Usage:
        """Tokens over all choices, without those generated after a stop string."""
        prompts, generations = self.generations[:: self.choices], self.generations
        counts = (
            sum(g.prompt_length for g in prompts),
            sum(g.tokens for g in generations),
            sum(g.cached_tokens for g in prompts),
            sum(g.reasoning.tokens for g in generations if g.reasoning is not None),
        )
        predicting = [g for g in generations if g.prediction is not None]
        if not predicting:
            return Usage(*counts, drafted_tokens=sum(g.drafted for g in generations))
        accepted = sum(g.predicted for g in predicting)
        rejected = sum(max(0, len(g.prediction) - g.predicted) for g in predicting if g.prediction is not None)
        return Usage(*counts, drafted_tokens=accepted, rejected_tokens=rejected)

    def body(self) -> Turns[bytes]:
        """The whole answer; call it once `done` is set without an error. For a short answer, use at_once()."""
        ended = [(g.index, g.finish_reason or "") for g in self.generations]
        scores = {g.index: g.scores if self.shows_prompt else None for g in self.generations}
        choices = [Choice(i, "".join(self._texts[i]), reason, self._logprobs[i], scores[i]) for i, reason in ended]
        if self.choices > self._n:
            choices = likeliest(choices, self.choices, self._n)
        if not self._with_logprobs:
            choices = [replace(choice, logprobs=()) for choice in choices]
        yield
        return (yield from self.answer.whole(choices, self.usage()))


class PlainText:
    """Writes the chunks of most tokens directly: those after the first event of a choice whose text depends only on its tokens.

    frame: see Answer.frame; chunks: the stream's chunks.
    """

    __slots__ = ("_around", "_before", "_behind", "_chunks", "_detokenizer")

    def __init__(self, detokenizer: Detokenizer, frame: tuple[bytes, bytes], chunks: list[bytes]):
        self._detokenizer, self._chunks = detokenizer, chunks
        self._before, self._behind = frame[0], frame[1] + LINE_END
        self._around = sum(map(len, frame))

    def push(self, token: int) -> None:
        """Add the event of a token, if it has text."""
        text = self._detokenizer.push(token)
        if text:
            content = orjson.dumps(text)
            size = self._around + len(content)
            line = SIZE_LINES[size] if size < len(SIZE_LINES) else b"%x\r\n" % size
            self._chunks.append(b"".join((line, self._before, content, self._behind)))


class Streamer(Collector):
    """Writes events to the connection, one write per step.

    started: set by the first event; an earlier error can still get a status code.
    usage: which events have token counts.
    on_slow: called once, if the client leaves more than max_backlog events or max_bytes unread.
    chunked: use the chunked transfer coding, which HTTP/1.0 lacks.
    """

    def __init__(
        self,
        answer: AnyAnswer,
        connection: Connection,
        max_backlog: int,
        usage: StreamUsage,
        on_slow: Callable[[], None],
        max_bytes: int = BACKLOG_BYTES,
        chunked: bool = True,
    ):
        super().__init__(answer)
        self._max_bytes, self._chunked = max_bytes, chunked
        self._usage_at_end, self._usage_each = usage
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.awaited.append(self.started)
        self._connection, self._transport = connection, connection.transport
        self._max_backlog, self._on_slow = max_backlog, on_slow
        self._chunks: list[bytes] = []  # events not yet written, mostly in HTTP/1.1's chunked encoding
        self._open = False  # whether the response has started and the client is connected
        self._backlog = 0  # events since the client had last read all bytes

    def open(self, head: bytes) -> None:
        """Start the response: write its head and the events so far. After that, each step writes its events. If all choices have
        already ended, `end` writes everything.
        """
        self._open = not self._connection.disconnected
        if self.done.done():
            self._chunks.insert(0, head)
        elif self._open:
            self._transport.write(b"".join([head, *self._chunks]))
            self._chunks.clear()

    def on_text(self, generation: Generation, text: str, logprobs: list[TokenLogprobs]) -> None:
        event = self.answer.event(generation.index, text, logprobs)
        if event:
            self._add(event)
        if generation.is_plain and self._chunked and not self._usage_each:
            frame = self.answer.frame(generation.index)
            generation.plain = frame and PlainText(generation.detokenizer, frame, self._chunks)

    def ended(self, generation: Generation) -> None:
        self.answer.stop_sequence = generation.stop_text
        if generation.error is None and generation.finish_reason is not None:
            self._add(self.answer.last_event(generation.index, generation.finish_reason))
        super().ended(generation)
        if not self.started.done():
            self.started.set_result(None)

    def end(self) -> bytes:
        """The unwritten events, and the end of the stream."""
        failed = self.error
        last = self.answer.end(self.usage(), self._usage_at_end) if failed is None else self.answer.error_event(failed)
        if self._chunked:
            last = (b"%x\r\n%b\r\n" % (len(last), last) if last else b"") + b"0\r\n\r\n"
        chunks = b"".join(self._chunks)
        self._chunks.clear()
        return chunks + last

    def stop(self) -> None:
        self._open = False

    def close(self) -> None:
        super().close()
        self._on_slow = lambda: None

    def _add(self, event: bytes) -> None:
        if self._usage_each:
            event = self.answer.with_usage(event, self.usage())
        self._chunks.append(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)

    def send(self) -> None:
        chunks = self._chunks
        if not chunks:
            return
        if not self._open:
            if not self.started.done():
                self.started.set_result(None)
            return
        count = len(chunks)
        if count == 1:
            data = chunks.pop()
        else:
            data = b"".join(chunks)
            chunks.clear()
        transport = self._transport
        transport.write(data)
        unread = transport.get_write_buffer_size()
        if unread:
            if unread > UNREAD_BYTES:
                self._connection.hold_unread()
            self._backlog += count
            if self._backlog > self._max_backlog or unread > self._max_bytes:
                self.stop()
                self._on_slow()
        else:
            self._backlog = 0
