"""The GPU fails under a server with open streams: every client is told at once, and the server ends with a line that says why."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from blinkpy.models.weights.model_folder import DEMO_FOLDER

ROOT = Path(__file__).parents[2]
POLICY = Path(__file__).parents[1] / "support" / "gpu" / "faulty_policy.py"
START_S, STREAMS, NOTICED_S = 200.0, 8, 2.0
# Large enough that a stream of 4,000 tokens lasts for seconds.
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16}
SIZES |= {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}


class Client(threading.Thread):
    """One stream: its events with the time of each."""

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
def test_every_stream_is_told_and_the_server_says_why(tmp_path: Path, control: str) -> None:
    for path in DEMO_FOLDER.glob("*.json*"):
        shutil.copy(path, tmp_path)
    facts = json.loads((DEMO_FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | SIZES))
    told = tmp_path / "fault"
    command = [sys.executable, "-m", "blinkpy", "serve", str(tmp_path), "--served-model-name", "demo", "--port", "0"]
    command += ["--device", "cuda", "--control", control, "--load-format", "dummy", "--num-pages", "2304"]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--policy", f"{POLICY}:rank"]
    errors: list[str] = []
    environment = {**os.environ, "BLINKPY_TEST_FAULT": str(told)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        ready = process.stdout.readline()
        watchdog.cancel()
        match = re.search(r"http://\S+", ready)
        assert match is not None, "".join(errors)
        url = match[0]
        clients = [Client(url) for _ in range(STREAMS)]
        deadline = time.monotonic() + 30
        while not all(len(client.events) > 3 for client in clients):
            assert time.monotonic() < deadline, "not every stream began"
            time.sleep(0.01)
        assert httpx.get(f"{url}/health").status_code == 200
        told.touch()
        began = time.monotonic()
        while (health := httpx.get(f"{url}/health")).status_code == 200:
            assert time.monotonic() - began < NOTICED_S, "the server still says that it is well"
            time.sleep(0.01)
        noticed = time.monotonic() - began
        for client in clients:
            client.join(NOTICED_S)
        ends = [client.events[-1] for client in clients]
        print(f"/health says so after {noticed:.2f} s, the last stream ends after {max(at for at, _ in ends) - began:.2f} s")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_unavailable")
        assert all(event.get("error", {}).get("code") == "engine_unavailable" for _, event in ends), ends
        assert all(at - began < NOTICED_S for at, _ in ends)
        assert process.wait(20) == 1
        reader.join(5)
        (line,) = (line for line in errors if line.startswith("blinkpy: error: "))
        assert re.search(r"the engine ended with exit code 1 \(the GPU failed: .*cudaError\w+ \(\d+\)\)", line), line
        assert not any("Traceback" in line for line in errors), "".join(errors)
        print(line.strip())
    finally:
        process.kill()
        process.wait()
        reader.join(5)
        process.stdout.close()
        process.stderr.close()
