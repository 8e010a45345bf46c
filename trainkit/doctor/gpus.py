"""The GPUs of a node, as its driver describes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from trainkit.cluster.machine import NVIDIA_DRIVER, NoDriver, nvml
from trainkit.doctor.check import Check
from trainkit.job.preflight import gpu_problem
from trainkit.job.rank_env import visible_gpus

HOT_C = 85
BUSY_SHARE = 0.05
"""Share of a GPU's memory that others may use."""
T = TypeVar("T")


def check_gpus() -> Iterator[Check]:
    """The driver, and every GPU that a process here would use."""
    if not NVIDIA_DRIVER.exists():
        yield Check("GPU", "ok", "none: there is no NVIDIA driver, runs use CPUs")
        return
    try:
        with nvml() as driver:
            version = driver_version(driver) or "unknown version"
            yield Check("driver", "ok", f"{version}, CUDA {driver_cuda(driver) or 'unknown'}")
            chosen = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
            for index in range(_known(driver, driver.nvmlDeviceGetCount) or 0):
                if chosen is None or str(index) in chosen or not all(map(str.isdigit, chosen)):
                    yield check_gpu(driver, index)
    except NoDriver as error:
        hint = "check `nvidia-smi` and the kernel log; a driver update needs a reboot"
        yield Check("GPU", "failure", str(error), hint)


def driver_version(nvml: Any) -> str | None:
    """The version of the driver; None if it does not say."""
    found = _known(nvml, nvml.nvmlSystemGetDriverVersion)
    return None if found is None else _text(found)


def driver_cuda(nvml: Any) -> str | None:
    """The newest CUDA that the driver supports; None if it does not say."""
    number = _known(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def check_gpu(nvml: Any, index: int) -> Check:
    """Errors, temperature, free memory and other processes of one GPU."""
    name = f"GPU {index}"
    problem = gpu_problem(nvml, index)
    if problem:
        return Check(name, "failure", problem, "administrators can reset or replace it; exclude the node")
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    model = _known(nvml, lambda: _text(nvml.nvmlDeviceGetName(handle))) or "unknown model"
    memory = _known(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    temperature = _known(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    processes = _known(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    free = "unknown memory"
    if memory is not None:
        free = f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    heat = "unknown temperature" if temperature is None else f"{temperature} C"
    value = f"{model}, {free}, {heat}"
    pids = [str(process.pid) for process in processes or ()]
    if pids:
        using = f"process {pids[0]} uses" if len(pids) == 1 else f"processes {', '.join(pids)} use"
        hint = f"{using} it: `ps -o user,args -p {','.join(pids)}` shows more"
        return Check(name, "warning", value, hint)
    if memory is not None and memory.used > BUSY_SHARE * memory.total:
        return Check(name, "warning", value, "another process uses its memory: `nvidia-smi` lists them")
    if temperature is not None and temperature >= HOT_C:
        return Check(name, "warning", value, "it is hot and will lower its clocks: check its cooling")
    return Check(name, "ok", value)


def _known(nvml: Any, query: Callable[[], T]) -> T | None:
    """The answer of NVML; None if it has none, as for a MIG slice or without permission."""
    try:
        return query()
    except nvml.NVMLError:
        return None


def num_gpus() -> int:
    """The GPUs that a process would see here, as the driver and CUDA_VISIBLE_DEVICES say."""
    if not NVIDIA_DRIVER.exists():
        return 0
    chosen = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if chosen is not None:
        return len(chosen)
    with contextlib.suppress(NoDriver), nvml() as driver:  # `check_gpus` reports it
        return _known(driver, driver.nvmlDeviceGetCount) or 0
    return 0


def driver_versions() -> dict[str, str]:
    """The version of the driver, by which nodes are compared; empty without one."""
    if NVIDIA_DRIVER.exists():
        with contextlib.suppress(NoDriver), nvml() as driver:  # `check_gpus` reports it
            return {"NVIDIA driver": driver_version(driver) or "unknown"}
    return {}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
