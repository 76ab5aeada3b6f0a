"""The GPU of a server with open streams fails: every client gets an error, and the server exits with a line that gives the
reason."""

import json
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import Command
from support.waiting import wait_for

from blinkpy.models.weights.model_folder import DEMO_FOLDER

POLICY = Path(__file__).parents[1] / "support" / "gpu" / "faulty_policy.py"
START_S, STREAMS, NOTICED_S = 200.0, 8, 2.0
# So large that a stream of 4,000 tokens takes seconds.
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16}
SIZES |= {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}


class Client(threading.Thread):
    """A client with one stream: its events, each with its time."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self.url = url
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.start()

    def run(self) -> None:
        body = {"model": "demo", "prompt": "It was", "max_tokens": 4000, "temperature": 1, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=30) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.events.append((time.monotonic(), json.loads(line[6:])))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("control", ["gpu", "host"])
def test_a_gpu_fault_ends_every_stream_and_is_logged(tmp_path: Path, control: str) -> None:
    for path in DEMO_FOLDER.glob("*.json*"):
        shutil.copy(path, tmp_path)
    facts = json.loads((DEMO_FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | SIZES))
    reported = tmp_path / "fault"
    options = ["--served-model-name", "demo", "--port", "0", "--device", "cuda", "--control", control, "--load-format", "dummy"]
    options.append("--no-restart")
    options += ["--num-pages", "2304", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--policy", f"{POLICY}:rank"]
    server = Command("serve", str(tmp_path), *options, env={"BLINKPY_TEST_FAULT": str(reported)})
    try:
        url = server.find(re.compile(r"on (http://\S+) "), START_S)[1]
        clients = [Client(url) for _ in range(STREAMS)]
        wait_for(lambda: all(len(client.events) > 3 for client in clients), 30, "every stream began")
        assert httpx.get(f"{url}/health").status_code == 200
        reported.touch()
        began = time.monotonic()
        while (health := httpx.get(f"{url}/health")).status_code == 200:
            assert time.monotonic() - began < NOTICED_S, "the server still reports that it is healthy"
            time.sleep(0.01)
        noticed = time.monotonic() - began
        for client in clients:
            client.join(NOTICED_S)
        ends = [client.events[-1] for client in clients]
        print(f"/health reports it after {noticed:.2f} s, the last stream ends after {max(at for at, _ in ends) - began:.2f} s")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_unavailable")
        assert all(event.get("error", {}).get("code") == "engine_unavailable" for _, event in ends), ends
        assert all(at - began < NOTICED_S for at, _ in ends)
        assert server.wait(20) == 1
        (line,) = (line for line in server.said if line.startswith("blinkpy: error: "))
        assert re.search(r"the engine ended with exit code 1 \(the GPU failed: .*cudaError\w+ \(\d+\)\)", line), line
        assert not any("Traceback" in line for line in server.said), "".join(server.said)
        print(line.strip())
    finally:
        server.kill()
