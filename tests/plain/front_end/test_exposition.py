"""The answer of /metrics: names, also vLLM's, compared with values that a test set; and the dashboard that
reads them."""

import json
import re
import runpy
from dataclasses import fields
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from blinkpy.config import Config, EngineOptions, TransportOptions
from blinkpy.dpu.metrics import BLOCK_BYTES, ENDINGS, GAUGES, HISTOGRAMS, Metrics
from blinkpy.dpu.watch.energy_meter import EnergyMeter, chosen_gpu, start_energy_meter
from blinkpy.dpu.watch.exposition import Exposition
from blinkpy.dpu.worker import may_meter
from blinkpy.queues import words as W

ROOT = Path(__file__).parents[3]
SAMPLE = re.compile(r"([a-z0-9_:]+)(?:\{([^}]*)\})? (\S+)")

# The metrics of vLLM 0.33 that its dashboards read and that have a true value here; names of histograms without an ending.
SINGLE_OF_VLLM = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total",
}  # fmt: skip
HISTOGRAMS_OF_VLLM = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
    "request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens",
}  # fmt: skip


def samples(text: bytes) -> dict[str, dict[str, float]]:
    """Values by name and then by labels; each name is below its own head."""
    found: dict[str, dict[str, float]] = {}
    family = ""
    for line in text.decode().splitlines():
        if line.startswith("# TYPE "):
            family = line.split()[2]
        elif not line.startswith("#"):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert re.sub("_(bucket|sum|count)$", "", name) == family or name == family, line
            found.setdefault(name, {})[labels or ""] = float(value)
    return found


def engine_words(**values: int) -> list[int]:
    words = [0] * 128
    for name, value in values.items():
        words[(W.GAUGE | W.COUNTER)[name]] = value
    return words


def test_a_value_may_come_several_times(rng) -> None:
    once, often = Metrics(), Metrics()
    for value, times in zip(rng.lognormal(-4, 2, 50), rng.integers(1, 9, 50), strict=True):
        once.inter_token_latency.observe(value, int(times))
        for _ in range(times):
            often.inter_token_latency.observe(value)
    assert list(once._own) == pytest.approx(list(often._own))


def test_names_of_vllm_have_the_values_of_ours(rng) -> None:
    memory = memoryview(bytearray(3 * len(Metrics()._own) * 8))
    workers = [Metrics(w, 3, memory) for w in range(3)]
    for metrics in workers:
        metrics.count("prompt_tokens", int(rng.integers(1, 100)))
        metrics.count("generated_tokens", int(rng.integers(1, 100)))
        for name in GAUGES:
            metrics.gauge(name, int(rng.integers(1, 100)))
        for shape in HISTOGRAMS:
            for value in rng.lognormal(-2, 3, 20):
                metrics.observe(shape.attribute, float(value))
        for reason in rng.choice(ENDINGS, 10):
            metrics.ending(str(reason))
    engine = engine_words(
        requests_running=5, requests_waiting=2, pages_held=30, pages_cached=50, pages_free=20, preemptions=3,
        prefix_lookup_tokens=900, prefix_hit_tokens=300,
    )  # fmt: skip
    assert not any(name.startswith("vllm:") for name in samples(Exposition(workers[0], "m").render(engine)))
    found = samples(Exposition(workers[0], 'a "model"\\', vllm=True).render(engine))
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in found if name.startswith("vllm:")}
    assert families == {f"vllm:{name}" for name in SINGLE_OF_VLLM | HISTOGRAMS_OF_VLLM}
    labels = r'model_name="a \"model\"\\",engine="0"'
    single = {name: values[labels] for name, values in found.items() if name.startswith("vllm:") and labels in values}

    def blinkpy_sum(name: str, suffix: str = "") -> float:
        return sum(value for label, value in found[f"blinkpy_{name}"].items() if label.endswith(suffix))

    expected = {
        "num_requests_running": 5, "num_requests_waiting": 2 + blinkpy_sum("waiting_requests"),
        "kv_cache_usage_perc": 0.3, "num_preemptions_total": 3,
        "prefix_cache_queries_total": 900, "prefix_cache_hits_total": 300,
    }  # fmt: skip
    assert expected.items() <= {name.removeprefix("vllm:"): value for name, value in single.items()}.items()
    assert single["vllm:generation_tokens_total"] == blinkpy_sum("generated_tokens_total")
    for ending in ("_sum", "_count"):
        assert single[f"vllm:e2e_request_latency_seconds{ending}"] == pytest.approx(
            blinkpy_sum(f"request_duration_seconds{ending}")
        )
    for label, value in found["vllm:request_queue_time_seconds_bucket"].items():
        assert value == blinkpy_sum("queue_time_seconds_bucket", re.search(r'le="[^"]+"', label)[0])
    for reason in ENDINGS:
        assert found["vllm:request_success_total"][f'{labels},finished_reason="{reason}"'] == blinkpy_sum(
            "requests_ended_total", f'"{reason}"'
        )


def test_times_are_not_rounded_to_seconds() -> None:
    metrics = Metrics()
    metrics.gauge("lag_seconds", 0.25)
    found = samples(Exposition(metrics).render(None))
    assert found["blinkpy_lag_seconds"] == {'worker="0"': 0.25}


def test_without_an_engine_only_its_values_are_missing() -> None:
    found = samples(Exposition(Metrics(), "m", vllm=True).render(None))
    assert found["blinkpy_engine_up"] == {"": 0}
    assert {name for name in found if name.startswith("blinkpy_engine_")} == {"blinkpy_engine_up", "blinkpy_engine_losses_total"}
    assert "vllm:kv_cache_usage_perc" not in found
    assert "vllm:prompt_tokens_total" in found


def test_the_dashboard_reads_metrics_that_exist() -> None:
    board = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    metrics = Metrics()
    for name in ("gpu_energy_joules_total", "gpu_power_watts"):
        metrics.gauge(name, 1)
    known = set(samples(Exposition(metrics).render(engine_words()))) | {"blinkpy_http_responses_total"}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {entry["name"]: entry for entry in board["templating"]["list"]}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel["targets"]:
            text = target["expr"]
            names = set(re.findall(r"\b(?:blinkpy|vllm)[_:]\w+", text))
            assert names, text
            assert names <= known, text
            assert text.count("(") == text.count(")") and text.count("{") == text.count("}"), text
            used = set(re.findall(r"\$(\w+)", text)) - {"__rate_interval"}
            assert used == {"job", "instance"} <= set(variables)
            for counter in (name for name in names if re.search("_(total|bucket|sum|count)$", name)):
                assert re.search(rf"(rate|increase)\({counter}\{{", text), f"{counter} counts since the start: {text}"
    assert all(set(re.findall(r"blinkpy_\w+", str(entry["query"]))) <= known for entry in variables.values())


def test_alerts_read_metrics_that_exist_and_the_page_has_each() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy" / "prometheus-alerts.yaml").read_text())["groups"]
    known = set(samples(Exposition(Metrics()).render(engine_words(), restarts=0))) | {"blinkpy_http_responses_total"}
    page = (ROOT / "docs" / "operate.md").read_text()
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
    for rule in group["rules"]:
        text, names = rule["expr"], set(re.findall(r"\bblinkpy_\w+", rule["expr"]))
        assert names <= known and (names or text.startswith("up{")), text
        assert text.count("(") == text.count(")") and text.count("{") == text.count("}"), text
        for counter in (name for name in names if re.search("_(total|bucket)$", name)):
            assert re.search(rf"(rate|increase)\({counter}[\[{{]", text), f"{counter} counts since the start: {text}"
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"]
    tool = runpy.run_path(str(ROOT / "tools" / "write_alerts.py"))
    assert tool["written"](page) == page, "run `make docs`"


def test_pods_are_scaled_by_metrics_that_exist() -> None:
    known = samples(Exposition(Metrics()).render(engine_words()))
    manifests = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "serve.yaml").read_text()))
    (scaler,) = [each for each in manifests if each["kind"] == "HorizontalPodAutoscaler"]
    asked = [metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]]
    assert len(asked) == 2 and set(asked) <= set(known)


class Nvml:
    """Instead of pynvml: one GPU that draws 300 W."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.millijoules = broken, 5_000_000

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return f"uuid {uuid}"

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        if self.broken:
            raise RuntimeError("not supported")
        self.millijoules += 300
        return self.millijoules

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        return 300_000


def test_energy_is_read_where_there_is_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr("blinkpy.dpu.watch.energy_meter.PERIOD_S", 0.01)
    nvml, metrics = Nvml(), Metrics(worker=0, workers=2)
    monkeypatch.setattr("blinkpy.dpu.watch.energy_meter.import_module", lambda name: nvml)
    meter = start_energy_meter(metrics)
    assert isinstance(meter, EnergyMeter)
    first = samples(Exposition(metrics).render(None))
    assert first["blinkpy_gpu_energy_joules_total"][""] >= 5000.3
    assert first["blinkpy_gpu_power_watts"][""] == 300
    while samples(Exposition(metrics).render(None))["blinkpy_gpu_energy_joules_total"][""] < 5001:
        assert meter.is_alive()
    assert "blinkpy_gpu_joules_per_token" not in samples(Exposition(metrics).render(None)), "no token, and no price"
    metrics.count("generated_tokens", 1 << 20)
    while "blinkpy_gpu_joules_per_token" not in samples(Exposition(metrics).render(None)):
        assert meter.is_alive()
    nvml.broken = True
    meter.join(10)
    assert not meter.is_alive()
    assert "blinkpy_gpu_energy_joules_total" not in samples(Exposition(metrics).render(None)), (
        "a counter that stands still would lie"
    )
    assert start_energy_meter(Metrics()) is None, "this GPU has no counter"


def test_without_nvml_there_is_no_energy(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(name: str) -> SimpleNamespace:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("blinkpy.dpu.watch.energy_meter.import_module", missing)
    metrics = Metrics()
    with caplog.at_level("INFO"):
        assert start_energy_meter(metrics) is None
    assert caplog.messages == ["energy metrics are disabled: pynvml"]
    assert not [name for name in samples(Exposition(metrics).render(None)) if "gpu" in name]


def test_an_engine_elsewhere_has_no_gpu_here() -> None:
    choices = {item.name: item.metadata["choices"] for kind in (TransportOptions, EngineOptions) for item in fields(kind)}
    for transport, device in product(choices["transport"], choices["device"]):
        config = Config().with_options({"transport": transport, "device": device})
        assert may_meter(config) == (transport == "shm" and device not in ("cpu", "null")), (transport, device)


def test_the_gpu_of_the_engine() -> None:
    visible = {"": "index 0", "3": "index 3", "2,1": "index 2", "GPU-1a2b": "uuid GPU-1a2b"}
    assert {given: chosen_gpu(Nvml(), given) for given in visible} == visible


def test_the_energy_of_a_token_is_that_of_the_last_readings(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all workers' tokens, and absent without tokens; a worker that restarts removes none."""
    monkeypatch.setattr("blinkpy.dpu.watch.energy_meter.READINGS", 5)
    memory, nvml = memoryview(bytearray(2 * BLOCK_BYTES)), Nvml()
    first, second = Metrics(0, 2, memory), Metrics(1, 2, memory)
    meter, tokens = EnergyMeter(nvml, "index 0", first), list[int]()
    for reading, generated in enumerate([*rng.integers(1, 30, 20).tolist(), *[0] * 6, *rng.integers(1, 30, 9).tolist()]):
        if reading == 29:
            second, tokens = Metrics(1, 2, memory), []
        second.count("generated_tokens", generated)
        tokens = [*tokens, (tokens or [0])[-1] + generated][-6:]
        meter.read()
        came = tokens[-1] - tokens[0]
        assert first.values("gpu_joules_per_token")[0] == pytest.approx(0.3 * (len(tokens) - 1) / came if came else 0)
