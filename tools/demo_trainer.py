"""Training of the demonstration model: streams of tokens, recipes, held-out losses, and the trainer."""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from demo_corpus import BEGIN, SPECIAL_TOKENS
from demo_llama import Llama, Shape
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Stream:
    """A row of tokens, and the positions at which a window may begin.

    A position is the token before a paragraph, which the window replaces by `<|begin|>`, or the `<|begin|>` of a chat.
    """

    tokens: Tensor  # int32 [n], on the training device
    starts: Tensor  # int64 [m], sorted, on the CPU

    @classmethod
    def of(cls, parts: Sequence[str], tokenizer: Tokenizer, device: torch.device, shift: int) -> Self:
        encodings = tokenizer.encode_batch(list(parts), add_special_tokens=False)
        tokens = np.concatenate([np.array(encoding.ids, dtype=np.int32) for encoding in encodings])
        starts = np.cumsum([0, *(len(encoding.ids) for encoding in encodings[:-1])], dtype=np.int64) - shift
        return cls(torch.from_numpy(tokens).to(device), torch.from_numpy(starts[starts >= 0]))

    def windows(self, starts: Tensor, length: int, begin: int) -> Tensor:
        """int64 [len(starts), length + 1]: inputs and, one further, targets."""
        offsets = torch.arange(length + 1, device=self.tokens.device)
        rows = self.tokens[starts[:, None] + offsets].long()
        rows[:, 0] = begin
        return rows

    def random(self, rows: int, length: int, begin: int, generator: torch.Generator) -> Tensor:
        usable = int(torch.searchsorted(self.starts, len(self.tokens) - length))
        if not usable:
            raise SystemExit(f"the books are too short for windows of {length} tokens: shorten --context")
        chosen = torch.randint(usable, (rows,), generator=generator)
        return self.windows(self.starts[chosen].to(self.tokens.device), length, begin)


@torch.no_grad()
def held_out_loss(model: Llama, stream: Stream, length: int, begin: int, rows: int) -> float:
    """Mean loss in nats per token over consecutive windows that cover the stream."""
    length = min(length, len(stream.tokens) - 1)
    starts = torch.arange(0, len(stream.tokens) - length, length, device=stream.tokens.device)
    total = 0.0
    for chunk in starts.split(rows):
        batch = stream.windows(chunk, length, begin)
        logits = model(batch[:, :-1])
        total += F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum").item()
    return total / (len(starts) * length)


@torch.no_grad()
def generate(
    model: Llama, prompt: Sequence[int], stop: int, temperature: float, top_p: float, limit: int, seed: int
) -> list[int]:
    """New tokens after `prompt`, without `stop`. Temperature 0 is greedy.

    Recomputes the whole text for each token: slow, for the short samples in the log.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + limit, model.shape.max_position_embeddings):
        logits = model(torch.tensor([tokens], device=device))[0, -1].float().cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            probabilities, order = (logits / temperature).softmax(0).sort(descending=True)
            probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0
            token = int(order[torch.multinomial(probabilities, 1, generator=generator)])
        if token == stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Recipe:
    """How to train one model."""

    steps: int
    seconds: float  # the clock ends the schedule early, with its low rates, on a slow machine
    learning_rate: float
    weight_decay: float
    dropout: float
    seed: int


class Trainer:
    """Trains models of one shape on the same text.

    validate: returns a model's held-out losses of text and chats.
    """

    def __init__(
        self, shape: Shape, text: Stream, chats: Stream, validate: Callable[[Llama], tuple[float, float]],
        options: argparse.Namespace,
    ) -> None:  # fmt: skip
        self.shape, self.text, self.chats, self.validate, self.options = shape, text, chats, validate, options
        self.device = torch.device(options.device)

    def batch(self, generator: torch.Generator) -> Tensor:
        length, rows = self.options.context, self.options.batch
        begin = SPECIAL_TOKENS.index(BEGIN)
        text = self.text.random(rows - rows // 2, length, begin, generator)
        return torch.cat((text, self.chats.random(rows // 2, length, begin, generator)))

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def train(self, recipe: Recipe, teachers: Sequence[Llama] = ()) -> Llama:
        """Train a new model. Returns it with the best moving average of its weights."""
        options = self.options
        torch.manual_seed(recipe.seed)
        generator = torch.Generator().manual_seed(recipe.seed)
        model = Llama(self.shape, recipe.dropout).to(self.device)
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim == 2], "weight_decay": recipe.weight_decay},
            {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=self.device.type == "cuda")
        averages = [p.detach().clone() for p in parameters]
        best, best_loss = averages, math.inf

        def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets)

        def probabilities(teacher: Llama, inputs: Tensor) -> Tensor:
            return teacher(inputs).flatten(0, 1).float().softmax(-1)

        if options.compile:
            loss_of, probabilities = torch.compile(loss_of), torch.compile(probabilities)
        running = torch.zeros((), device=self.device)
        started = reported = time.monotonic()
        step, since, progress = 0, 0, 0.0
        while progress < 1:
            rate = min((step + 1) / options.warmup, 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * progress)))
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * rate
            batch = self.batch(generator)
            inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].flatten()
            model.train()
            with self.autocast():
                if teachers:
                    with torch.no_grad():
                        targets = sum((probabilities(teacher, inputs) for teacher in teachers[1:]),
                                      probabilities(teachers[0], inputs)) / len(teachers)  # fmt: skip
                loss = loss_of(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            with torch.no_grad():
                keep = min(options.average, step / (step + 10))
                torch._foreach_lerp_(averages, [p.detach() for p in parameters], 1 - keep)
            running += loss.detach()
            elapsed = time.monotonic() - started
            progress = max(step / recipe.steps, elapsed / recipe.seconds)
            if step % options.report == 0 or progress >= 1:
                speed = (step - since) * batch.shape[0] * options.context / max(time.monotonic() - reported, 1e-9)
                trained = [p.detach().clone() for p in parameters]
                assign(parameters, averages)
                text_loss, chat_loss = self.validate(model)
                if text_loss + chat_loss < best_loss:
                    best, best_loss = [p.detach().clone() for p in parameters], text_loss + chat_loss
                assign(parameters, trained)
                left = elapsed / min(progress, 1) - elapsed
                print(
                    f"  step {step:5d}  loss {running.item() / (step - since):.4f}  "
                    f"rate {rate * recipe.learning_rate:.2e}  {speed / 1000:7.1f}k tokens/s  "
                    f"{elapsed:5.1f} s, {left:5.1f} s left  held out: text {text_loss:.4f}, chats {chat_loss:.4f}",
                    flush=True,
                )
                running.zero_()
                reported, since = time.monotonic(), step
        assign(parameters, best)
        return model.eval()


@torch.no_grad()
def assign(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
