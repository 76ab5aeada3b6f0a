"""`blinkpy doctor`: its findings about machines of all kinds. The RDMA port itself is looked at in tests/rdma."""

import resource

import pytest

from blinkpy import cli, doctor
from blinkpy.config import Config, options
from blinkpy.doctor import BAD, NOTE, OK, gpu_findings, locked_memory
from blinkpy.transport import verbs
from blinkpy.transport.contract import TransportError
from blinkpy.transport.verbs import RdmaOptions

GPUS = {
    "H200, open modules": ((1, 1, 100, False, "6.8.0-31-generic"), {"GPU memory": OK, "GPU write order": OK}, "dma-buf"),
    "old kernel with peermem": ((1, 1, 100, True, "5.4.0"), {"GPU memory": OK, "GPU write order": OK}, "nvidia-peermem"),
    "closed modules": ((1, 0, 100, False, "6.8.0"), {"GPU memory": NOTE, "GPU write order": OK}, "modprobe nvidia-peermem"),
    "unordered": ((1, 1, 0, False, "6.1.0-18-amd64"), {"GPU memory": OK, "GPU write order": NOTE}, "host memory"),
    "not reachable": ((0, 0, 0, False, "6.8.0"), {"GPUDirect RDMA": NOTE}, "keep the queues in host memory"),
}


@pytest.mark.parametrize("case", GPUS)
def test_gpus(case) -> None:
    given, states, words = GPUS[case]
    found = list(gpu_findings(*given))
    assert {finding.what: finding.state for finding in found} == states
    assert any(words in finding.text for finding in found)


def test_locked_memory(monkeypatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert locked_memory(resource.RLIM_INFINITY).state == OK
    low = locked_memory(8 << 20)
    assert low.state == BAD
    assert "8 MiB" in low.text
    assert "LimitMEMLOCK" in low.text


@pytest.mark.parametrize("problem", ["pyverbs", "devices"])
def test_doctor_states_the_remedy_without_rdma(problem, monkeypatch, capsys) -> None:
    def missing() -> list[str]:
        if problem == "pyverbs":
            raise TransportError(f"--transport rdma needs pyverbs: {verbs.INSTALL}")
        return []

    monkeypatch.setattr(doctor, "device_names", missing)
    monkeypatch.setattr(verbs, "device_names", missing)
    assert cli.main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert ("apt install python3-pyverbs" if problem == "pyverbs" else "no RDMA device") in out
    assert "Not ready for --transport rdma." in out


def test_doctor_needs_no_model_and_has_its_own_options(capsys) -> None:
    assert cli.main(["doctor", "demo"]) == 2
    assert cli.main(["doctor", "--port", "1"]) == 2
    capsys.readouterr()
    assert {item.name for _, item in options("doctor")} == {"rdma_device", "rdma_gid_index"}
    assert Config().extension(RdmaOptions).rdma_gid_index == -1
