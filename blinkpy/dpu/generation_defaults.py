"""Request parameters that a model's generation_config.json sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blinkpy.queues.request_parameters import PARAMETERS, RequestParameters


def default_sampling(generation_config: Mapping[str, Any]) -> RequestParameters:
    """Defaults from a model's generation_config.json, as vLLM takes them; `do_sample: false` there means greedy.

    Values that are null are skipped. Raises ValueError for one that is out of range.
    """
    values: dict[str, Any] = {}
    for parameter in PARAMETERS:
        value = generation_config.get(parameter.name)
        if value is None or not parameter.from_model:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not parameter.in_bounds(value):
            raise ValueError(f"generation_config.json: {parameter.name} is {value!r}")
        values[parameter.name] = parameter.from_request(value if parameter.is_float else int(value))
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    return RequestParameters(**values)
