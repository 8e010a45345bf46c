"""Whether the GPUs that a node's ranks are to use can be used, as far as NVML tells without starting CUDA."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainkit.job.preflight_error import PreflightFailed

HINT = "`nvidia-smi -q -d ECC,ROW_REMAPPER` there shows more; the administrators can reset or replace it"


def check_gpus(local_ranks: Sequence[int], environ: Mapping[str, str]) -> None:
    """Raise PreflightFailed when a GPU of these ranks is missing, lost or needs a reset.

    Where NVML cannot be asked, nothing is known, and the ranks find out.
    """
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        _check(pynvml, local_ranks, environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        pynvml.nvmlShutdown()


def _check(nvml: Any, local_ranks: Sequence[int], visible: str | None) -> None:
    count = nvml.nvmlDeviceGetCount()
    names = [str(index) for index in range(count)] if visible is None else visible.split(",")
    for rank in local_ranks:
        name = names[rank].strip() if rank < len(names) else ""
        if not name or (name.isdigit() and int(name) >= count):
            chosen = "" if visible is None else f" and CUDA_VISIBLE_DEVICES={visible}"
            raise PreflightFailed(
                f"local rank {rank} has no GPU: {socket.gethostname()} shows {count}{chosen}",
                hint="a GPU may have fallen off the bus: `nvidia-smi` and the kernel's log there tell",
            )
        if not name.isdigit():
            continue  # a UUID may be cut short, and a part of a GPU has no health of its own
        trouble = _trouble(nvml, int(name))
        if trouble:
            raise PreflightFailed(f"GPU {name} of {socket.gethostname()} {trouble}", hint=HINT)


def _trouble(nvml: Any, index: int) -> str | None:
    try:
        return next(_troubles(nvml, nvml.nvmlDeviceGetHandleByIndex(index)), None)
    except nvml.NVMLError as error:
        return f"does not answer: {error}"


def _troubles(nvml: Any, handle: Any) -> Iterator[str]:
    """What is wrong with a GPU; what its kind does not count is passed over."""
    unknown = (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission)
    with contextlib.suppress(*unknown):
        action = _recovery_action(nvml, handle)
        if action:
            yield f"says that it needs a reset or a reboot (recovery action {action})"
    with contextlib.suppress(*unknown):
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if has_failed:
            yield "could not replace a broken row of its memory"
        if is_pending:
            yield "has broken rows in its memory that a reset would replace"
    with contextlib.suppress(*unknown):
        if nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle):
            yield "has broken pages in its memory that a reset would retire"
    with contextlib.suppress(*unknown):
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if errors:
            yield f"has had {errors} memory errors that could not be corrected since its last reset"


def _recovery_action(nvml: Any, handle: Any) -> int:
    """What the driver wants done before the GPU is used again, after an Xid for example; 0 for nothing."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return 0
    value = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    return int(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS else 0
