#!/usr/bin/env python3
"""Train blinkpy's demonstration model: a small Llama on a shelf of public-domain books.

    python tools/train_demo_model.py --books BOOKS --out OUT --device cuda

writes a complete Hugging Face model folder (config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
chat_template.jinja, model.safetensors in bfloat16). It needs torch, tokenizers, safetensors and NumPy.

Half of every batch is running text of the books, half are chats cut out of them (see demo_corpus.py). A share of each
book is held out; the checkpoint with the lowest loss on it, of a moving average of the weights, is the one kept.

Ten megabytes of text are little even for a model of this size: it begins to learn them by heart after a few passes. So
a few teachers of the same shape are trained first, strongly regularised, and the model learns from the mean of their
predictions (Hinton et al., Distilling the Knowledge in a Neural Network, 2015), which holds more than the next token.

Data, initial weights and batches depend on `--seed` alone; a GPU adds in an order of its own, so that a second run
gives the same quality but not the same bits.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from demo_corpus import (
    BEGIN,
    CHAT_TEMPLATE,
    END,
    PAD,
    SPECIAL_TOKENS,
    ChatWriter,
    Vocabulary,
    load_books,
    train_tokenizer,
)
from demo_llama import Llama, Shape
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLE_PROMPTS = ("Tell me a story about a dog.", "Who are you?", "It was a dark night", "Where are you going, Tom?")


@dataclass(frozen=True)
class Stream:
    """One long row of tokens and the places where a window may begin: at the token before a paragraph, which the
    window replaces by `<|begin|>`, or at the `<|begin|>` of a chat."""

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
    """Mean loss in nats per token over windows side by side that cover the stream."""
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
    """New tokens after `prompt`, without `stop`; temperature 0 is greedy. The whole text is computed again for each
    token: slow and short, for the samples in the log."""
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
    """Trains models of one shape on the same text; `validate` gives a model's held-out losses of text and chats."""

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
        """A new model, with the best moving average of its weights."""
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


def write_folder(folder: Path, shape: Shape, tokenizer: Tokenizer, weights: dict[str, Tensor]) -> None:
    """The Hugging Face model folder, weights in bfloat16."""
    begin, end, pad = (SPECIAL_TOKENS.index(token) for token in (BEGIN, END, PAD))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    generation = {
        "bos_token_id": begin, "eos_token_id": [end], "pad_token_id": pad,
        "do_sample": True, "temperature": 0.7, "top_p": 0.9,
    }  # fmt: skip
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (BEGIN, END, PAD)],
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", config), ("generation_config.json", generation), ("tokenizer_config.json", tokenizer_config)
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    stored = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def print_samples(model: Llama, tokenizer: Tokenizer, seed: int) -> None:
    end = SPECIAL_TOKENS.index(END)
    for temperature in (0.0, 0.8):
        for text in SAMPLE_PROMPTS:
            prompt = tokenizer.encode(f"{BEGIN}<|user|>{text}{END}<|assistant|>", add_special_tokens=False).ids
            tokens = generate(model, prompt, end, temperature, 0.9, 160, seed)
            answer = tokenizer.decode(tokens, skip_special_tokens=False)
            print(f"\n[temperature {temperature}] {text}\n{answer}", flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--books", type=Path, required=True, help="folder of *.txt books, UTF-8, lines wrapped, paragraphs apart")
    add("--out", type=Path, required=True, help="folder for the model")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device (default: %(default)s)")
    add("--minutes", type=float, default=10.0, help="shorten the training to this time (default: %(default)s)")
    add("--steps", type=int, default=3000, help="length of the model's schedule (default: %(default)s)")
    add("--teachers", type=int, default=3, help="models to learn from; 0: from the text alone (default: %(default)s)")
    add("--teacher-steps", type=int, default=1600)
    add("--teacher-weight-decay", type=float, default=0.8)
    add("--teacher-dropout", type=float, default=0.2)
    add("--batch", type=int, default=16, help="rows per step (default: %(default)s)")
    add("--context", type=int, default=2048, help="tokens per row, also the model's limit (default: %(default)s)")
    add("--vocab-size", type=int, default=4096)
    add("--hidden-size", type=int, default=256)
    add("--intermediate-size", type=int, default=768)
    add("--layers", type=int, default=6)
    add("--learning-rate", type=float, default=4e-3, help="peak of the cosine schedule (default: %(default)s)")
    add("--warmup", type=int, default=100, help="steps until the peak (default: %(default)s)")
    add("--weight-decay", type=float, default=0.1)
    add("--dropout", type=float, default=0.1)
    add("--average", type=float, default=0.99, help="decay of the weights' moving average (default: %(default)s)")
    add("--held-out", type=float, default=0.04, help="share of each book for validation (default: %(default)s)")
    add("--chats", type=int, default=100_000, help="chats to cut out of the books (default: %(default)s)")
    add("--report", type=int, default=200, help="steps between validations (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help="torch.compile (default: on a GPU)")
    add("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for name in ("minutes", "steps", "teacher_steps", "batch", "context", "report", "warmup", "chats"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if options.compile is None:
        options.compile = options.device.startswith("cuda")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    started = time.monotonic()
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")

    training, held_out = load_books(options.books, options.held_out)
    vocabulary = Vocabulary.of(training)
    plain = [f"{paragraph}\n\n" for book in training for paragraph in book]
    tokenizer = train_tokenizer(plain, options.vocab_size)
    begin = SPECIAL_TOKENS.index(BEGIN)

    def running_text(books: list[list[str]]) -> list[str]:
        return [part for book in books for part in (BEGIN, *(f"{paragraph}\n\n" for paragraph in book), END)]

    def chats(books: list[list[str]], count: int, seed: int) -> list[str]:
        writer = ChatWriter(books, vocabulary, seed)
        return [writer.document() for _ in range(count)]

    text_stream = Stream.of(running_text(training), tokenizer, device, shift=1)
    chat_stream = Stream.of(chats(training, options.chats, options.seed), tokenizer, device, shift=0)
    text_check = Stream.of(running_text(held_out), tokenizer, device, shift=1)
    chat_check = Stream.of(chats(held_out, max(1, options.chats // 200), options.seed + 1), tokenizer, device, shift=0)
    shape = Shape(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=options.hidden_size, num_hidden_layers=options.layers,
        intermediate_size=options.intermediate_size, max_position_embeddings=options.context,
    )  # fmt: skip
    print(
        f"{sum(p.numel() for p in Llama(shape).parameters()):,} parameters; "
        f"tokens: text {len(text_stream.tokens):,}, chats {len(chat_stream.tokens):,}; "
        f"held out: {len(text_check.tokens):,} and {len(chat_check.tokens):,}; "
        f"prepared in {time.monotonic() - started:.1f} s",
        flush=True,
    )

    def validate(model: Llama) -> tuple[float, float]:
        model.eval()
        rows = max(1, options.batch // 2)
        return (
            held_out_loss(model, text_check, options.context, begin, rows),
            held_out_loss(model, chat_check, options.context, begin, rows),
        )

    trainer = Trainer(shape, text_stream, chat_stream, validate, options)
    seconds = 60 * options.minutes
    teachers = []
    for number in range(options.teachers):
        print(f"teacher {number + 1} of {options.teachers}", flush=True)
        recipe = Recipe(
            options.teacher_steps, 0.5 * seconds / options.teachers, options.learning_rate,
            options.teacher_weight_decay, options.teacher_dropout, options.seed + 1 + number,
        )  # fmt: skip
        teachers.append(trainer.train(recipe))
    print("model", flush=True)
    recipe = Recipe(
        options.steps, 0.5 * seconds if teachers else seconds, options.learning_rate,
        options.weight_decay, options.dropout, options.seed,
    )  # fmt: skip
    model = trainer.train(recipe, teachers)
    best = {name: p.detach() for name, p in model.named_parameters()}
    write_folder(options.out, shape, tokenizer, best)
    model.load_state_dict({name: tensor.to(torch.bfloat16).float() for name, tensor in best.items()})
    text_loss, chat_loss = validate(model)
    held_bytes = sum(len(f"{paragraph}\n\n".encode()) for book in held_out for paragraph in book)
    bits_per_byte = text_loss * len(text_check.tokens) / held_bytes / math.log(2)
    print(
        f"as stored (bfloat16): held-out loss {text_loss:.4f} nats per token of text "
        f"(perplexity {math.exp(text_loss):.1f}, {bits_per_byte:.3f} bits per byte), {chat_loss:.4f} of chats; "
        f"{time.monotonic() - started:.1f} s in all",
        flush=True,
    )
    print_samples(model, tokenizer, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
