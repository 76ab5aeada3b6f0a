"""Paths of requests: a proxy's rule for a path holds for every spelling of it that this server answers.

The references are the two ways in which proxies read a path: as it came, and normalised by RFC 3986 or more.
"""

import re
from urllib.parse import quote, unquote, unquote_to_bytes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.endpoints import ENDPOINTS, OPEN_PATHS
from blinkpy.dpu.http.fields.request_head import path_below, path_of, without_slash

ROUTES = tuple(endpoint.path for endpoint in ENDPOINTS if "NAME" not in endpoint.path)
UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def dots_removed(path: str) -> str:
    """By the algorithm of RFC 3986, section 5.2.4, step by step."""
    rest, output = path, list[str]()
    while rest:
        if rest.startswith("../"):
            rest = rest[3:]
        elif rest.startswith("./"):
            rest = rest[2:]
        elif rest.startswith("/./") or rest == "/.":
            rest = "/" + rest[3:]
        elif rest.startswith("/../") or rest == "/..":
            rest = "/" + rest[4:]
            if output:
                output.pop()
        elif rest in (".", ".."):
            rest = ""
        else:
            end = rest.find("/", 1)
            end = len(rest) if end < 0 else end
            output.append(rest[:end])
            rest = rest[end:]
    return "".join(output)


def normalised(path: str) -> str:
    """RFC 3986, section 6.2.2: unreserved characters without escape, escapes in capitals, dot segments removed."""

    def plain(escape: re.Match[str]) -> str:
        letter = chr(int(escape[0][1:], 16))
        return letter if letter in UNRESERVED else escape[0].upper()

    return dots_removed(re.sub("%[0-9A-Fa-f]{2}", plain, path))


def as_a_file(path: str) -> str:
    """As proxies do that match decoded paths: all escapes decoded, slashes merged, dot segments removed."""
    return dots_removed(re.sub("//+", "/", unquote(path)))


VIEWS = (str, normalised, as_a_file, lambda path: normalised(re.sub("//+", "/", path)))

PIECES = (
    "/",
    "//",
    "/.",
    "/..",
    "%2f",
    "%2F",
    "%2e",
    ".",
    "%",
    "%zz",
    "%00",
    "%ff",
    "%C3%A9",
    ";",
    "\\",
    "%5c",
    "*",
    "~",
    "?a=/x",
)
WORDS = ("metrics", "METRICS", "v1", "models", "completions", "chat", "health", "load", "tokenize", "tiny", "m%65trics", "%761")
targets = st.lists(st.sampled_from(PIECES) | st.sampled_from(WORDS) | st.sampled_from(ROUTES), max_size=8).map("".join)


def path_or_none(target: bytes) -> str | None:
    """path_of, and None for a target that is refused."""
    try:
        return path_of(target)
    except ApiError as error:
        if (error.status, error.code) != (400, "invalid_path"):
            raise
        return None


def route_of(target: str) -> str | None:
    """The route of a target; None if it is refused."""
    path = path_or_none(target.encode())
    return None if path is None else without_slash(path, OPEN_PATHS)


@given(targets.map(lambda rest: "/" + rest))
@example("/%6detrics")
@example("//metrics")
@example("/x/../metrics")
@example("/v1/models/..%2f..%2fmetrics")
@example("/metrics/")
def test_every_proxy_sees_the_route_that_is_chosen(target: str) -> None:
    route, path = route_of(target), target.partition("?")[0]
    for view in VIEWS:
        seen = view(path)
        if route in OPEN_PATHS:
            assert seen == route
        elif route in ROUTES:
            assert seen.removesuffix("/") == route
        elif route is not None and route.startswith("/v1/models/"):
            assert seen.startswith("/v1/models/")
        elif route is not None:
            assert path not in ROUTES, "it has a spelling that is served"


@given(
    st.text(max_size=20),
    st.booleans(),
    st.sampled_from(["", "http://host", "HTTPS://[::1]:80"]),
    st.sampled_from(["", "?", "?a=/../b"]),
)
def test_names_of_any_letters_come_through(name: str, slash: bool, origin: str, query: str) -> None:
    target = f"{origin}/v1/models/{quote(name, safe='', errors='ignore')}{'/' * slash}{query}"
    name = unquote(quote(name, safe="", errors="ignore"))
    *segments, last = name.split("/")
    good = name.isprintable() and "" not in segments and not {".", ".."} & {*segments, last} and bool(last or not slash)
    if name and good:
        assert route_of(target) == "/v1/models/" + name.replace("/", "%2F")
    elif name:
        assert route_of(target) is None


@given(st.binary(max_size=12))
def test_any_bytes_are_a_path_or_refused(rest: bytes) -> None:
    path, raw = path_or_none(b"/" + rest), b"/" + rest.partition(b"?")[0]
    if path is not None:
        assert path.replace("%2F", "/") == unquote_to_bytes(raw).decode().replace("%2F", "/")


@pytest.mark.parametrize("route", [route for route in ROUTES if route not in OPEN_PATHS])
def test_a_slash_at_the_end_is_the_same_route_where_a_key_is_needed(route: str) -> None:
    assert route_of(f"{route}/") == route
    assert route_of(f"{route}//") is None


@pytest.mark.parametrize("route", sorted(OPEN_PATHS - {"/"}))
def test_open_paths_have_one_spelling(route: str) -> None:
    """An exact rule of a proxy is enough to restrict them."""
    spelled = f"{route}/"
    assert spelled not in ROUTES
    assert route_of(spelled) == spelled


def test_a_root_is_removed_once_and_as_a_whole() -> None:
    for path, below in (("/llm/a", "/a"), ("/llm", ""), ("/llmx", "/llmx"), ("/a/llm", "/a/llm"), ("/llm/", "/")):
        assert path_below(path, "/llm") == below
    assert path_below("/a", "") == "/a"
