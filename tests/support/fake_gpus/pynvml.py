"""Provides a driver with made-up GPUs: `FakeNvml` in a test, and this module in other processes.

Those processes have this folder on PYTHONPATH. FAKE_GPUS is the number of their GPUs, and FAKE_GPU_USERS a
file with a line ``GPU PID`` for each process that uses a GPU.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VISIBLE_UUIDS = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc", "GPU-dddd")


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class FakeNvml:
    """A driver with some GPUs. Each GPU maps the ends of function names to results.

    For example, ``Name`` is the result of `nvmlDeviceGetName`: a value, a function of the other arguments, or
    an error to raise. A function without a result is not supported. A ``lost`` GPU cannot be found.
    """

    NVMLError, NVMLError_NotSupported = NVMLError, NVMLError_NotSupported
    NVMLError_FunctionNotFound = NVMLError_NoPermission = NVMLError_NotSupported
    NVML_SUCCESS = NVML_TEMPERATURE_GPU = NVML_VOLATILE_ECC = 0
    NVML_CLOCK_SM = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 273
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self._gpus = gpus

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        if index >= len(self._gpus) or "lost" in self._gpus[index]:
            raise NVMLError("GPU is lost")
        return {"Index": index, **self._gpus[index]}

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        """Return the slice of a GPU."""
        for index, gpu in enumerate(self._gpus):
            if uuid in gpu.get("slices", ()):
                return {"Index": index, **gpu}
        raise NVMLError("Not Found")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kind = name.removeprefix("nvmlDeviceGet")
        if kind == name:
            raise AttributeError(name)

        def get(gpu: dict[str, Any], *more: object) -> Any:
            value = gpu.get(kind, NVMLError_NotSupported(name))
            value = value(*more) if callable(value) else value
            if isinstance(value, Exception):
                raise value
            return value

        return get


def memory(used_gib: float, total_gib: float) -> SimpleNamespace:
    """Return a result of `nvmlDeviceGetMemoryInfo`."""
    used, total = (int(gib * 2**30) for gib in (used_gib, total_gib))
    return SimpleNamespace(used=used, total=total, free=total - used)


def _users(gpu: int) -> list[SimpleNamespace]:
    file = Path(os.environ.get("FAKE_GPU_USERS", "/nonexistent"))
    lines = file.read_text().splitlines() if file.exists() else []
    found = [line.split() for line in lines]
    return [SimpleNamespace(pid=int(pid)) for index, pid in found if int(index) == gpu]


def __getattr__(name: str) -> Any:
    """Return an attribute of the driver of this process."""
    if "FAKE_GPUS" not in os.environ:
        raise AttributeError(name)
    a100 = {"Name": "NVIDIA A100-SXM4-40GB"}
    gpus = [
        {**a100, "UUID": VISIBLE_UUIDS[index], "ComputeRunningProcesses": lambda index=index: _users(index)}
        for index in range(int(os.environ["FAKE_GPUS"]))
    ]
    return getattr(FakeNvml(*gpus), name)
