"""The demonstration model as a Hugging Face model folder."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from demo_corpus import BEGIN, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS
from demo_llama import Shape
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor


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
