"""The text of /metrics for Prometheus: metrics of the front end, and of the engine, read from shared memory without the engine's
help.

Values with the same meaning in vLLM also appear under vLLM's names, which NAMES_OF_VLLM and `_of_vllm` list.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from blinkpy.dpu.admission.admission import Admission
from blinkpy.dpu.admission.tenant_table import COUNTERS as TENANT_COUNTERS
from blinkpy.dpu.admission.tenant_table import GAUGES as TENANT_GAUGES
from blinkpy.dpu.metrics import COUNTERS, ENDINGS, GAUGES, HISTOGRAMS, METERS, STATUSES, Metrics
from blinkpy.queues.words import COUNTER, ENGINE_HEARTBEAT, ENGINE_STATE, ENGINE_STEPS, GAUGE, STATE_NAMES

# Names of histograms, by attribute of Metrics.
NAMES_OF_VLLM = {
    "time_to_first_token": "time_to_first_token_seconds",
    "inter_token_latency": "inter_token_latency_seconds",
    "request_duration": "e2e_request_latency_seconds",
    "queue_time": "request_queue_time_seconds",
    "prefill_time": "request_prefill_time_seconds",
    "inference_time": "request_inference_time_seconds",
    "decode_time": "request_decode_time_seconds",
    "time_per_output_token": "request_time_per_output_token_seconds",
    "prompt_length": "request_prompt_tokens",
    "output_length": "request_generation_tokens",
}


class Exposition:
    """Renders the metrics of all workers.

    model: its served name.
    vllm: also write vLLM's names.
    admission: the tenants, for their metrics.
    """

    def __init__(self, metrics: Metrics, model: str = "", vllm: bool = False, admission: Admission | None = None):
        self._metrics, self._vllm, self._admission = metrics, vllm, admission
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._of_model = f'model_name="{escaped}",engine="0"'

    def render(
        self, engine: list[int] | None, restarts: int | None = None, engines: Sequence[tuple[str, list[int] | None]] = ()
    ) -> bytes:
        """Render the exposition.

        engine: the words of the engine's block, or the sums over several engines; None without an engine.
        restarts: number of engine restarts; None if another process starts the engine.
        engines: (label, words) of each of several engines.
        """
        lines = [*self._of_engine(engine), *_of_engines(engines), *self._of_workers(), *self._of_tenants(), *self._of_gpu()]
        if restarts is not None:
            lines += _family("blinkpy_engine_restarts_total", "counter", "Restarts of the engine")
            lines.append(f"blinkpy_engine_restarts_total {restarts}")
        if self._vllm:
            lines += self._of_vllm(engine)
        return ("\n".join(lines) + "\n").encode("utf-8", "replace")

    def _of_engine(self, engine: list[int] | None) -> Iterable[str]:
        yield from _family("blinkpy_engine_up", "gauge", "1 while this worker has a queue pair of a running engine")
        yield f"blinkpy_engine_up {int(engine is not None)}"
        if engine is None:
            return
        yield from _family("blinkpy_engine_state", "gauge", "1 for the state that the engine is in")
        for i, name in enumerate(STATE_NAMES):
            yield f'blinkpy_engine_state{{state="{name}"}} {int(engine[ENGINE_STATE] == i)}'
        for name, index in {"heartbeats": ENGINE_HEARTBEAT, "steps": ENGINE_STEPS, **COUNTER}.items():
            yield from _family(f"blinkpy_engine_{name}_total", "counter", f"The engine's count of {name.replace('_', ' ')}")
            yield f"blinkpy_engine_{name}_total {engine[index]}"
        for name, index in GAUGE.items():
            yield from _family(f"blinkpy_engine_{name}", "gauge", f"The engine's {name.replace('_', ' ')} as of its last step")
            yield f"blinkpy_engine_{name} {engine[index]}"

    def _of_workers(self) -> Iterable[str]:
        metrics = self._metrics
        yield from _family("blinkpy_http_responses_total", "counter", "HTTP responses by status")
        for status in (*STATUSES, "other"):
            for w, count in enumerate(metrics.values(status)):
                if count:
                    yield f'blinkpy_http_responses_total{{worker="{w}",status="{status}"}} {count:.0f}'
        yield from _family("blinkpy_requests_ended_total", "counter", "Choices by how they ended")
        for reason in ENDINGS:
            for w, count in enumerate(metrics.values(reason)):
                yield f'blinkpy_requests_ended_total{{worker="{w}",reason="{reason}"}} {count:.0f}'
        for kind, ending, table in (("counter", "_total", COUNTERS), ("gauge", "", GAUGES)):
            for name, help in table.items():
                yield from _family(f"blinkpy_{name}{ending}", kind, help)
                digits = 3 if name.endswith("_seconds") else 0
                for w, value in enumerate(metrics.values(name)):
                    yield f'blinkpy_{name}{ending}{{worker="{w}"}} {value:.{digits}f}'
        for which, shape in enumerate(HISTOGRAMS):
            yield from _family(f"blinkpy_{shape.name}", "histogram", shape.help)
            for w, (counts, total) in enumerate(metrics.histogram(which)):
                yield from _histogram(f"blinkpy_{shape.name}", f'worker="{w}"', shape.bounds, counts, total)

    def _of_tenants(self) -> Iterable[str]:
        named = () if self._admission is None else tuple(one for one in self._admission.tenants.values() if one.name)
        if self._admission is None or not named:
            return
        table = self._admission.table
        for kind, ending, columns in (("gauge", "", TENANT_GAUGES), ("counter", "_total", TENANT_COUNTERS)):
            for name, help in columns.items():
                yield from _family(f"blinkpy_tenant_{name}{ending}", kind, help)
                for tenant in named:
                    for w, value in enumerate(table.values(tenant.number, name)):
                        yield f'blinkpy_tenant_{name}{ending}{{worker="{w}",tenant="{tenant.name}"}} {value:.0f}'

    def _of_gpu(self) -> Iterable[str]:
        for name, help in METERS.items():
            (value, *_) = self._metrics.values(name)
            if value:
                yield from _family(f"blinkpy_{name}", "counter" if name.endswith("_total") else "gauge", help)
                yield f"blinkpy_{name} {value:.3f}"

    def _of_vllm(self, engine: list[int] | None) -> Iterable[str]:
        """Metrics under vLLM's names, except those for which this server has no true value."""
        metrics, labels = self._metrics, self._of_model
        values: dict[str, tuple[str, float]] = {}
        if engine is not None:
            pages = [engine[GAUGE[name]] for name in ("pages_held", "pages_cached", "pages_free")]
            values = {
                "num_requests_running": ("gauge", engine[GAUGE["requests_running"]]),
                "num_requests_waiting": (
                    "gauge",
                    engine[GAUGE["requests_waiting"]] + metrics.gauge_of_all("waiting_requests"),
                ),
                "kv_cache_usage_perc": ("gauge", pages[0] / max(1, sum(pages))),
                "prefix_cache_queries_total": ("counter", engine[COUNTER["prefix_lookup_tokens"]]),
                "prefix_cache_hits_total": ("counter", engine[COUNTER["prefix_hit_tokens"]]),
                "num_preemptions_total": ("counter", engine[COUNTER["preemptions"]]),
            }
        values["prompt_tokens_total"] = "counter", sum(metrics.values("prompt_tokens"))
        values["generation_tokens_total"] = "counter", sum(metrics.values("generated_tokens"))
        for name, (kind, value) in values.items():
            yield from _family(f"vllm:{name}", kind, "vLLM's name of this server's value")
            yield f"vllm:{name}{{{labels}}} {value:.9g}"
        yield from _family("vllm:request_success_total", "counter", "vLLM's name of this server's value")
        for reason in ENDINGS:
            yield f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {sum(metrics.values(reason)):.0f}'
        for which, shape in enumerate(HISTOGRAMS):
            if shape.attribute in NAMES_OF_VLLM:
                name = f"vllm:{NAMES_OF_VLLM[shape.attribute]}"
                yield from _family(name, "histogram", "vLLM's name of this server's value")
                blocks = metrics.histogram(which)
                counts = [sum(column) for column in zip(*(counts for counts, _ in blocks), strict=True)]
                yield from _histogram(name, labels, shape.bounds, counts, sum(total for _, total in blocks))


def _of_engines(engines: Sequence[tuple[str, list[int] | None]]) -> Iterable[str]:
    """Metrics of each engine, with a label. The families without a label are their sums."""
    if not engines:
        return
    yield from _family("blinkpy_each_engine_up", "gauge", "1 while this worker has a queue pair of this engine")
    for label, words in engines:
        yield f'blinkpy_each_engine_up{{engine="{label}"}} {int(words is not None)}'
    counters = {"steps": ENGINE_STEPS, **COUNTER}
    for kind, ending, table in (("counter", "_total", counters), ("gauge", "", GAUGE)):
        for name, index in table.items():
            yield from _family(f"blinkpy_each_engine_{name}{ending}", kind, f"The {name.replace('_', ' ')} of each engine")
            for label, words in engines:
                if words is not None:
                    yield f'blinkpy_each_engine_{name}{ending}{{engine="{label}"}} {words[index]}'


def _family(name: str, kind: str, help: str) -> Iterable[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _histogram(name: str, labels: str, bounds: Sequence[float], counts: Sequence[float], total: float) -> Iterable[str]:
    """Lines of a histogram. counts: values in each bucket and above all bounds, not cumulative."""
    added = list(accumulate(counts))
    for bound, count in zip([*(f"{bound:g}" for bound in bounds), "+Inf"], added, strict=True):
        yield f'{name}_bucket{{{labels},le="{bound}"}} {count:.0f}'
    yield f"{name}_sum{{{labels}}} {total:.9g}"
    yield f"{name}_count{{{labels}}} {added[-1]:.0f}"
