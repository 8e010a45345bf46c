"""A driver with as many GPUs as FAKE_GPUS says, for processes that have this folder on PYTHONPATH.

FAKE_GPU_USERS is a file with a line ``GPU PID`` for each process that uses one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

VISIBLE_UUIDS = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc", "GPU-dddd")


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


def nvmlInit() -> None:
    pass


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return 13000


def nvmlDeviceGetCount() -> int:
    return int(os.environ["FAKE_GPUS"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(gpu: int) -> str:
    return VISIBLE_UUIDS[gpu]


def nvmlDeviceGetName(gpu: int) -> str:
    return "NVIDIA A100-SXM4-40GB"


def nvmlDeviceGetComputeRunningProcesses(gpu: int) -> list[SimpleNamespace]:
    file = Path(os.environ.get("FAKE_GPU_USERS", "/nonexistent"))
    lines = file.read_text().splitlines() if file.exists() else []
    found = [line.split() for line in lines]
    return [SimpleNamespace(pid=int(pid)) for index, pid in found if int(index) == gpu]


def __getattr__(name: str) -> Callable[..., Any]:
    def unsupported(*arguments: object) -> NoReturn:
        raise NVMLError_NotSupported(name)

    return unsupported
