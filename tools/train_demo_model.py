#!/usr/bin/env python3
"""Train blinkpy's demonstration model: a small Llama on a shelf of public-domain books.

    python tools/train_demo_model.py --books BOOKS --out OUT --device cuda

writes a complete Hugging Face model folder (config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
chat_template.jinja, model.safetensors in bfloat16). It needs torch, tokenizers, safetensors and NumPy.

Half of every batch is running text of the books, half are chats cut out of them (see demo_corpus.py). A share of each
book is held out; the checkpoint with the lowest loss on it, of a moving average of the weights, is the one kept.

Ten megabytes of text are little even for a model of this size: it begins to memorise them after a few passes. So a few strongly
regularised teachers of the same shape are trained first. The model learns from the mean of their predictions, which holds more
than the next token (Hinton et al., Distilling the Knowledge in a Neural Network, 2015).

Data, initial weights and batches depend on `--seed` alone; a GPU adds in its own order, so that a second run
gives the same quality but not the same bits.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from demo_corpus import (
    BEGIN,
    END,
    SAMPLE_PROMPTS,
    SPECIAL_TOKENS,
    ChatWriter,
    Vocabulary,
    load_books,
    train_tokenizer,
)
from demo_folder import write_folder
from demo_llama import Llama, Shape
from demo_trainer import Recipe, Stream, Trainer, generate, held_out_loss
from tokenizers import Tokenizer


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
    add("--teachers", type=int, default=3, help="models to learn from; 0: only the text (default: %(default)s)")
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
