"""What the front end takes from inside uvicorn, which promises none of it: a release that changes it fails here, by name."""

import asyncio
import inspect
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from blinkpy.dpu.http.connection import SCOPE_KEY, Connection
from blinkpy.dpu.worker import Server

RELEASE = f"uvicorn {version('uvicorn')}"
PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
REQUIRED = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "uvicorn")


def test_the_range_ends_at_a_release_that_was_tried() -> None:
    assert version("uvicorn") in REQUIRED.specifier
    (end,) = (s.version for s in REQUIRED.specifier if s.operator == "<")
    assert end.startswith("0."), "uvicorn's minor releases change what these tests look at: the range must name the next one"


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("ours", "theirs", "added"),
    [
        (Connection, HttpToolsProtocol, {"abort", "hold_unread", "end_by_closing", "end_if_stuck", "leave"}),
        (Server, uvicorn.Server, {"hang_up", "leave"}),
    ],
)
def test_methods_still_override(ours: type, theirs: type, added: set[str]) -> None:
    """Each public method of the subclasses, but those that it adds, has its counterpart with the same parameters."""
    methods = {name: member for name, member in vars(ours).items() if inspect.isfunction(member) and not name.startswith("_")}
    for name in methods.keys() - added:
        there = getattr(theirs, name, None)
        assert there is not None, f"{RELEASE} calls no {theirs.__name__}.{name}: {ours.__name__}'s is dead"
        assert parameters(methods[name]) == parameters(there), f"{RELEASE}: {theirs.__name__}.{name} has other parameters"
    for name in added:
        assert not hasattr(theirs, name), f"{RELEASE} has {theirs.__name__}.{name} too, which {ours.__name__} replaces unawares"


def test_attributes_are_still_there() -> None:
    server = uvicorn.Server(uvicorn.Config(app=lambda scope: None))
    assert (server.should_exit, server.force_exit, server.started) == (False, False, False), RELEASE
    assert server.server_state.default_headers == [], RELEASE  # of each answer, as its event loop sets them


def test_a_response_goes_out_as_streams_expect() -> None:
    """The head is written when the response starts, in chunked encoding: a stream then writes chunks of its own."""
    written, ended = bytearray(), asyncio.Event()
    facts = {"write.side_effect": written.extend, "is_closing.return_value": False, "get_extra_info.return_value": None}
    transport = Mock(spec=asyncio.Transport, **facts)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        connection = scope[SCOPE_KEY]
        cycle = connection.cycle
        assert connection in connection.connections
        assert (cycle.response_started, cycle.response_complete, cycle.disconnected) == (False, False, False)
        assert isinstance(cycle.message_event, asyncio.Event)
        assert connection.body_arrived == (not cycle.more_body)
        assert connection.body_arrived
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        assert cycle.response_started
        assert written.startswith(b"HTTP/1.1 200 "), "the head is held back until there is a body"
        assert b"transfer-encoding: chunked" in written.lower()
        assert written.endswith(b"\r\n\r\n")
        written.clear()
        await send({"type": "http.response.body", "body": b"last words", "more_body": False})
        assert written == b"a\r\nlast words\r\n0\r\n\r\n"
        assert cycle.response_complete
        ended.set()

    async def request() -> None:
        config = uvicorn.Config(app, http=Connection, lifespan="off", interface="asgi3", log_config=None)
        config.load()
        connection = Connection(config, ServerState(), {}, asyncio.get_running_loop())
        connection.connection_made(transport)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        assert connection.headers == [(b"host", b"here")]
        await asyncio.gather(*connection.tasks)
        connection.connection_lost(None)

    asyncio.run(request())
    assert ended.is_set(), f"{RELEASE}: what failed in the application is in the log"
