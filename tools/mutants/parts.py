"""The parts of the package beyond the verified core, each with the tests that hunt its mutants."""

from typing import NamedTuple

from blinkpy.sources import PACKAGE

ROOT = PACKAGE.parent
_FRONT = "tests/plain/front_end"
_MODELS = "tests/plain/models"
_INTERPRETED = "tests/compiled/kernels/interpreted"


class Part(NamedTuple):
    """sources: folders and files of the package. tests: files of tests below the root."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]

    def test_files(self) -> list[str]:
        """All files of tests."""
        paths = [path for test in self.tests for path in (sorted((ROOT / test).rglob("test_*.py")) or [ROOT / test])]
        return [path.relative_to(ROOT).as_posix() for path in dict.fromkeys(paths)]


def _front(*names: str) -> tuple[str, ...]:
    return tuple(f"{_FRONT}/test_{name}.py" for name in names)


PARTS = {
    "http": Part(
        ("dpu/http/fields", "dpu/http/answers.py", "dpu/http/answer_sinks.py", "dpu/http/chat_dialect.py", "dpu/http/service.py",
         "dpu/http/request_handler.py",
         "dpu/http/message_answer.py", "dpu/http/response_answer.py", "dpu/http/anthropic_answer.py",
         "dpu/http/stored_responses.py", "dpu/http/stored_responses.py", "dpu/generation.py",
         "dpu/api_errors.py"),
        ("tests/verified/test_http_oracle.py",
         *_front("request_fields", "api_fields", "chat_fields", "answer_shapes", "answer_forms", "answer_sinks", "choices",
                 "token_rule_fields", "response_tools", "constrained_calls", "allowed_tools", "anthropic", "response_store",
                 "stored_responses")),
    ),
    "admission": Part(("dpu/admission",), _front("admission", "fair_queue", "keys", "gate", "access")),
    "fleet": Part(("dpu/fleet",), ("tests/plain/fleet", *_front("fleet", "engines_file"))),
    "text": Part(
        ("dpu/text",),
        _front("detokenizer", "special_tokens", "request_preparation", "chat_content", "tool_chats", "conversation_round_trips",
               "call_format_round_trips"),
    ),
    "tools": Part(
        ("dpu/tools",),
        ("tests/verified/test_http_oracle.py",
         *_front("tool_calls", "tool_chats", "harmony", "harmony_chats", "constrained_calls", "allowed_tools", "call_grammar",
                 "tagged_calls", "call_format_round_trips", "custom_tools")),
    ),
    "grammar": Part(("dpu/grammar",), ("tests/plain/grammar",)),
    "readers": Part(
        ("models/description", "models/families", "models/weights",
         "models/paged_cache.py"),
        tuple(f"{_MODELS}/test_{name}.py" for name in (
            "model_files", "folder_reader", "fp8_checkpoints", "compressed_tensors", "model_description", "cache_scales",
            "ring_sizes", "published_models", "gpu_refusals", "packed_weights", "fp8_models", "latent_models",
            "config_defaults")),
    ),
    "kernels": Part(
        ("kernels/norm.py", "kernels/activation.py", "kernels/fp8_rows.py", "kernels/quantised_matrices.py",
         "kernels/tile_product.py", "kernels/attention",
         "kernels/linear", "kernels/moe"),
        tuple(f"{_INTERPRETED}/test_{name}.py" for name in ("block_edges", "experts", "layers", "linear", "ring_kernels")),
    ),
}  # fmt: skip
