"""Limits on the shape of JSON, found in its bytes before a parser makes objects of them."""

import re

import numpy as np

from blinkpy.dpu.api_errors import ApiError

# A string, also one without an end, which a parser refuses: so no byte is looked at twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_shape(body: bytes | bytearray, max_values: int, max_depth: int) -> None:
    """Raise ApiError with status 413 for more values, 400 for deeper nesting. What is no JSON may pass."""
    if len(body) <= max_depth:
        return
    opened = body.count(b"[") + body.count(b"{")
    # Each value but the first stands behind a comma, or inside of what is opened.
    if opened <= max_depth and (len(body) < max_values or opened + body.count(b",") < max_values):
        return
    bare = _STRING.sub(b"", body)
    values = bare.count(b",") + bare.count(b"[") + bare.count(b"{") + 1
    if values > max_values:
        raise ApiError(413, f"The body has more than {max_values} values.", code="too_many_values", limit="max_body_values")
    brackets = np.frombuffer(bare.translate(None, _NO_BRACKETS), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    if steps.size and int(np.cumsum(steps, dtype=np.int64).max()) > max_depth:
        raise ApiError(400, f"The body is nested more than {max_depth} deep.", code="too_deep", limit="max_body_depth")
