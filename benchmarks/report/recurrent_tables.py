"""The table of recurrent layers' prompts, by blocks of tokens and token by token."""

from typing import Any

from benchmarks.report.part_tables import Results, when

HEAD = ["layer of", "prompts", "tokens of each", "tokens/s, token by token", "tokens/s, by blocks", "faster"]


def recurrent_prompts(results: Results) -> dict[str, Any]:
    """A row for each layer, number of prompts and length."""
    found = results.read("recurrent_prompts")
    if not found:
        return {"rows": []}
    rows = []
    for case in found["results"]["layers"]:
        single, blocks = case["tokens"]["tokens_per_s"], case["blocks"]["tokens_per_s"]
        sizes = case["layer"], str(case["sequences"]), f"{case['length']:,}"
        rows.append([*sizes, f"{single:,}", f"{blocks:,}", f"{blocks / single:.1f}x"])
    return {"origin": f"{found['results']['environment']['gpu']}, {when(found)}", "head": HEAD, "rows": rows}
