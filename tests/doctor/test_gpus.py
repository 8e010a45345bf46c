"""The checks of GPUs, against a driver that is made up."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.doctor import gpus
from trainkit.doctor.check import Check


class FakeNvml:
    """A driver with one GPU."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = RuntimeError
    used_gib, temperature, pids = 1.0, 40, ()

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:
        used = int(self.used_gib * 2**30)
        return type("Memory", (), {"used": used, "total": 80 * 2**30, "free": 80 * 2**30 - used})

    def nvmlDeviceGetTemperature(self, *_: int) -> int:
        return self.temperature

    def nvmlDeviceGetName(self, _: int) -> bytes:
        return b"H100"

    def nvmlDeviceGetComputeRunningProcesses(self, _: int) -> list[Any]:
        return [type("Process", (), {"pid": pid}) for pid in self.pids]


@pytest.mark.parametrize(
    ("changes", "state", "hint"),
    [
        ({}, "ok", ""),
        ({"temperature": 91}, "warning", "it is hot"),
        ({"pids": (77,)}, "warning", "process 77 uses it: `ps -o user,args -p 77`"),
        ({"pids": (7, 8)}, "warning", "processes 7, 8 use it: `ps -o user,args -p 7,8`"),
        ({"used_gib": 30.0}, "warning", "another process uses its memory"),
    ],
)
def test_gpu(changes: dict[str, Any], state: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "gpu_problem", lambda *_: None)
    nvml = FakeNvml()
    vars(nvml).update(changes)
    check = gpus.check_gpu(nvml, 0)
    assert check.state == state
    assert check.hint.startswith(hint)
    assert check.value.startswith("H100, ")


def test_mig_slice_whose_temperature_and_processes_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise FakeNvml.NVMLError("Not Supported")

    monkeypatch.setattr(gpus, "gpu_problem", lambda *_: None)
    nvml: Any = FakeNvml()
    nvml.nvmlDeviceGetTemperature = nvml.nvmlDeviceGetComputeRunningProcesses = refuse
    assert gpus.check_gpu(nvml, 0) == Check("GPU 0", "ok", "H100, 79.0 of 80.0 GiB free, unknown temperature")


def test_gpu_with_a_problem_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "gpu_problem", lambda *_: "does not respond: Unknown Error")
    assert gpus.check_gpu(FakeNvml(), 3).to_dict() == {
        **{"name": "GPU 3", "state": "failure", "value": "does not respond: Unknown Error", "host": None},
        "hint": "administrators can reset or replace it; exclude the node",
    }
