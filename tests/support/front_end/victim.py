"""A server under attack, and a client that the attack must not disturb."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.front_end.fake_engine import FACTS, FakeEngine
from support.front_end.http_server import RunningServer, completion_bytes, serving
from support.waiting import BUSY_S, wait_for


class Victim(threading.Thread):
    """A client that reads a stream and counts its events. text: text of the events."""

    def __init__(self, server: RunningServer):
        super().__init__(daemon=True)
        self.text, self.events, self._left = "", 0, False
        self._sock = socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S)
        self._sock.sendall(completion_bytes(prompt=[70, 71, 72], max_tokens=1_000_000, stream=True))

    def run(self) -> None:
        with self._sock, self._sock.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"data: ") and not self._left:
                    self.text += json.loads(line[6:])["choices"][0]["text"]
                    self.events += 1
                if self._left:
                    return  # closing cancels the stream

    def leave(self) -> None:
        self._left = True
        self.join(30)
        assert not self.is_alive()


@contextmanager
def attacked(folder, **limits: object) -> Iterator[tuple[RunningServer, Victim]]:
    """A server with these limits, and a victim that must receive its whole text by the end."""
    facts = FACTS._replace(max_model_len=1 << 20, num_pages=1 << 20)
    with FakeEngine(facts=facts, step_s=0.001) as engine, serving(engine, folder, **limits) as server:
        victim = Victim(server)
        victim.start()
        wait_for(lambda: victim.events > 0)
        yield server, victim
        victim.leave()
        expected = server.complete([70, 71, 72], max_tokens=3).json()["choices"][0]["text"] * len(victim.text)
        assert victim.text == expected[: len(victim.text)]
