"""What is looked at on a node before ranks start on it: cheap, and only what would otherwise fail later.

The supervisor looks at the run folder before the step starts, every agent at its own node. A node that fails
is not used again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.errors import EXIT_FAILED, TrainkitError
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir


class PreflightFailed(TrainkitError):
    """A check failed before the ranks started."""

    def __init__(self, message: str, hint: str = "", *, is_node: bool = True) -> None:
        super().__init__(message, hint, EXIT_FAILED)
        self.is_node = is_node
        """Whether another node may do better."""


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


SEEN_VARIABLE = "TRAINKIT_JOB_SEEN"
"""What the supervisor saw of the run folder, for the agents to compare."""
PROBE_BYTES = 65_536
"""Where a quota is used up, only writing shows it."""
MIN_FREE_MIB = 16
MAX_CLOCK_OFFSET_S = 5.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def seen_by_supervisor(attempt: AttemptDir) -> str:
    """What the supervisor sees of the run folder: the value of `SEEN_VARIABLE`.

    Raises PreflightFailed when the folder cannot be written.
    """
    return f"{plan_digest(attempt)} {clock_offset_s(attempt):.3f}"


def check_node(
    attempt: AttemptDir, plan: LaunchPlan, local_ranks: Sequence[int], environ: Mapping[str, str] = os.environ
) -> None:
    """Raise PreflightFailed when these ranks cannot run on this node."""
    offset_s = clock_offset_s(attempt)
    if SEEN_VARIABLE in environ:
        _compare(attempt, offset_s, environ[SEEN_VARIABLE])
    _check_space(Path(environ.get("TMPDIR") or "/tmp"))
    _check_space(Path("/dev/shm"))
    if plan.device == "cuda":
        check_gpus(local_ranks, environ)


def plan_digest(attempt: AttemptDir) -> str:
    """Tells whether two hosts see the same plan.json."""
    return hashlib.sha256(attempt.plan_file.read_bytes()).hexdigest()[:16]


def clock_offset_s(attempt: AttemptDir) -> float:
    """How many seconds the clock here is ahead of that of the run folder's filesystem.

    Raises PreflightFailed when the folder cannot be written.
    """
    try:
        began_s = time.time()
        handle, name = tempfile.mkstemp(prefix=".probe.", dir=attempt.path)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(bytes(PROBE_BYTES))
            written_s, ended_s = Path(name).stat().st_mtime, time.time()
        finally:
            os.unlink(name)
        # A busy server may take its time, and stamps the file somewhere in it.
        return min(0.0, ended_s - written_s) + max(0.0, began_s - written_s)
    except OSError as error:
        raise PreflightFailed(
            f"{attempt.path} cannot be written on {socket.gethostname()}: {error.strerror or error}",
            hint="`df -h` and `quota` tell; the run folder must be writable on every node",
            is_node=error.errno not in _NO_SPACE,
        ) from None


def _compare(attempt: AttemptDir, offset_s: float, seen: str) -> None:
    digest, _, supervisors_s = seen.partition(" ")
    host = socket.gethostname()
    if plan_digest(attempt) != digest:
        raise PreflightFailed(
            f"{attempt.plan_file} on {host} is not the file that the first node of the job sees",
            hint="all nodes must share the filesystem of the run folder",
        )
    # Where the supervisor's clock is as far off, it is the file server's that is wrong.
    if abs(offset_s) > MAX_CLOCK_OFFSET_S >= abs(float(supervisors_s)):
        ahead = "ahead of" if offset_s > 0 else "behind"
        raise PreflightFailed(
            f"the clock of {host} is {abs(offset_s):.0f} s {ahead} that of the run folder's filesystem",
            hint="the administrators can set it (chronyc tracking shows more)",
        )


def _check_space(folder: Path) -> None:
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        return
    free_mib = found.f_bavail * found.f_frsize / 2**20
    if found.f_blocks and free_mib < MIN_FREE_MIB:
        raise PreflightFailed(
            f"{folder} on {socket.gethostname()} has {free_mib:.1f} MiB left",
            hint="what other jobs have left there has to be removed; TMPDIR can name another folder",
        )
