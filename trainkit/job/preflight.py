"""Checks a node before a job's ranks start. `trainkit doctor` runs the same checks.

The supervisor checks the run folder before the step starts; each agent then checks its own node. If a node
fails a check that is specific to the node, the run stops using the node.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from trainkit.cluster.machine import NoDriver, driver_cuda, gpu_handle, nvml
from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART, TrainkitError
from trainkit.job.processes import NO_SPACE
from trainkit.job.rank_env import GPU_BINDING_HINT, SHARED_MEMORY, gpu_index, visible_gpus
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.torch_build import TorchBuild
from trainkit.run.rundir import AttemptDir


@dataclass(frozen=True)
class Finding:
    """The result of one preflight check."""

    name: str
    state: Literal["ok", "warning", "failure"]
    value: str
    hint: str = ""
    host: str | None = None
    """The checked host, or None if the check does not concern a single host."""


def warn_if(is_bad: bool, name: str, value: str, hint: str) -> Finding:
    """Return a warning with a hint if `is_bad` is true, else a finding that the check passed."""
    return Finding(name, "warning", value, hint) if is_bad else Finding(name, "ok", value)


class PreflightFailed(TrainkitError):
    """Raised if a check fails before the ranks start."""

    def __init__(
        self, message: str, hint: str = "", *, is_node: bool = True, exit_code: int = EXIT_FAILED
    ) -> None:
        super().__init__(message, hint, exit_code)
        self.is_node = is_node
        """True if the problem is specific to this node, so that another node might pass the check."""


def _require(subject: str, finding: Finding) -> None:
    """Raise PreflightFailed if a check of this node failed. `subject` names what was checked."""
    if finding.state == "failure":
        raise PreflightFailed(f"{subject} {finding.value}", finding.hint)


def require_gpus(
    nvml: Any,
    local_ranks: Sequence[int],
    environ: Mapping[str, str],
    *,
    is_task: bool = False,
    torch: TorchBuild | None = None,
) -> None:
    """Raise PreflightFailed if a rank's GPU is missing, broken, or not supported by the build `torch`.

    `is_task` has the same meaning as in `gpu_index`.
    """
    visible, granted = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("SLURM_GPUS_ON_NODE")
    count, listed = nvml.nvmlDeviceGetCount(), visible_gpus(visible)
    names = [str(index) for index in range(count)] if listed is None else listed
    for rank in local_ranks:
        index = gpu_index(rank, len(names), is_task=is_task)
        name = None if index is None else names[index]
        if name is None or (name.isdigit() and int(name) >= count):
            raise _missing_gpu(rank, name, count, visible, granted, is_task=is_task)
        if not name.isdigit():
            # NVML may not find an abbreviated UUID, and has no error counters for MIG devices.
            continue
        _require(f"GPU {name} of {socket.gethostname()}", check_gpu(nvml, name))
        if torch is not None:
            found = None
            with contextlib.suppress(
                nvml.NVMLError
            ):  # if the GPU fails now, the rank will report the failure
                gpu = gpu_handle(nvml, name)
                capability = nvml.nvmlDeviceGetCudaComputeCapability(gpu)
                found = torch.problem(str(nvml.nvmlDeviceGetName(gpu)), capability, driver_cuda(nvml))
            if found is not None:  # other nodes with this GPU model would fail too
                raise PreflightFailed(*found, is_node=False, exit_code=EXIT_NO_RESTART)


def _missing_gpu(
    rank: int, name: str | None, count: int, visible: str | None, granted: str | None, *, is_task: bool
) -> PreflightFailed:
    """Return the failure for a rank whose GPU `name` is missing, or that has no GPU (`name` is None).

    `count` is the number of GPUs on this host according to NVML.
    """
    host = socket.gethostname()
    limits = {"CUDA_VISIBLE_DEVICES": visible}
    if granted is not None and granted.isdigit() and int(granted) <= rank:
        limits["SLURM_GPUS_ON_NODE"] = granted  # in a container, CUDA_VISIBLE_DEVICES may have been unset
    limit = next((f"{key}={value}" for key, value in limits.items() if value is not None), None)
    if limit is not None and name is None:
        message = f"local rank {rank} has no GPU: the environment of its process on {host} has {limit}"
        return PreflightFailed(message, GPU_BINDING_HINT, is_node=False, exit_code=EXIT_NO_RESTART)
    chosen = "" if visible is None else f" and CUDA_VISIBLE_DEVICES={visible}"
    message = f"local rank {rank} has no GPU: {host} has {count}{chosen}"
    if is_task and count == 1 and visible is not None:
        # The node may be intact: if a cgroup restricts a task to one GPU, that GPU has index 0.
        hint = (
            "run `nvidia-smi` on the host, and find out what sets CUDA_VISIBLE_DEVICES: "
            "a single visible GPU has index 0"
        )
        return PreflightFailed(message, hint, is_node=False)
    hint = "a GPU may have fallen off the bus: check `nvidia-smi` and the kernel log on this host"
    return PreflightFailed(message, hint)


def check_gpu(nvml: Any, name: str) -> Finding:
    """Check that a GPU responds and that the GPU's driver reports no errors.

    `name` is an entry of CUDA_VISIBLE_DEVICES.
    """
    try:
        problem = next(_gpu_problems(nvml, gpu_handle(nvml, name)), None)
    except nvml.NVMLError as error:
        problem = f"does not respond: {error}"
    if problem is None:
        return Finding(f"GPU {name}", "ok", "no errors")
    hint = (
        "`nvidia-smi -q -d ECC,ROW_REMAPPER` on the host shows details; "
        "administrators can reset or replace the GPU"
    )
    return Finding(f"GPU {name}", "failure", problem, hint)


def unknown_values(nvml: Any) -> tuple[type[Exception], ...]:
    """Return the NVML exceptions for values that a GPU does not support or does not show to this user."""
    return nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission


def _gpu_problems(nvml: Any, handle: Any) -> Iterator[str]:
    """Yield the problems of a GPU, skipping counters that the GPU model does not support."""
    unknown = unknown_values(nvml)
    with contextlib.suppress(*unknown):
        action = _recovery_action(nvml, handle)
        if action:
            yield f"needs a reset or a reboot (recovery action {action})"
    with contextlib.suppress(*unknown):
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if has_failed:
            yield "failed to remap a broken memory row"
        if is_pending:
            yield "has broken memory rows that a reset would remap"
    with contextlib.suppress(*unknown):
        if nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle):
            yield "has broken memory pages that a reset would retire"
    with contextlib.suppress(*unknown):
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if errors:
            yield f"has had {errors} uncorrectable memory errors since its last reset"


def _recovery_action(nvml: Any, handle: Any) -> int:
    """Return the recovery action requested by the driver, for example after an Xid error; 0 means none."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return 0
    value = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    return int(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS else 0


SUPERVISOR_VIEW_VARIABLE = "TRAINKIT_JOB_SUPERVISOR_VIEW"
"""The environment variable with the supervisor's view of the run folder, which each agent compares with its
own view.
"""
PROBE_BYTES = 65_536
"""Number of bytes to write in a test, because an exceeded quota only becomes apparent on a write."""
MIN_FREE_MIB = 16
"""The minimum free space in MiB for a folder for temporary files to pass the check."""
FEW_FREE_MIB = 512
MAX_CLOCK_OFFSET_S = 5.0
CLOCK_HINT = "ask the administrators to synchronize the clock; `chronyc tracking` shows the offset"


def supervisor_view(attempt: AttemptDir) -> str:
    """Return the supervisor's view of the run folder as a value for `SUPERVISOR_VIEW_VARIABLE`.

    The supervisor's view consists of the digest of the plan and the supervisor's clock offset. Raises
    PreflightFailed if the run folder cannot be written.
    """
    return f"{plan_digest(attempt)} {_clock_offset_s(attempt):.3f}"


def require_node(
    attempt: AttemptDir,
    plan: LaunchPlan,
    local_ranks: Sequence[int],
    environ: Mapping[str, str] = os.environ,
    checks_disk: bool = True,
) -> None:
    """Raise PreflightFailed if an agent's ranks cannot run on this node.

    `checks_disk` should be set for only one task per node; otherwise, thousands of tasks would write to the
    same file server at once.
    """
    if checks_disk:
        offset_s = _clock_offset_s(attempt)
        if view := environ.get(SUPERVISOR_VIEW_VARIABLE):
            digest, _, supervisor_offset_s = view.partition(" ")
            if plan_digest(attempt) != digest:
                raise PreflightFailed(
                    f"{attempt.plan_file} on {socket.gethostname()} differs from the file that the first "
                    "node of the job sees",
                    hint="the run folder must be on a filesystem that all nodes share",
                )
            # If the supervisor's clock also differs from the file server's clock, the file server's clock is
            # wrong.
            if abs(float(supervisor_offset_s)) <= MAX_CLOCK_OFFSET_S:
                _require(f"the clock of {socket.gethostname()} is", check_clock(offset_s))
        for folder in temporary_folders(environ).values():
            _require(f"{folder} on {socket.gethostname()}", check_space("", folder))
    if plan.device == "cuda":
        torch, starts_ranks = None, not plan.workload.is_command and plan.environment.python is None
        if starts_ranks:  # a command or another interpreter may use a different torch
            spec = find_spec("torch")
            torch = TorchBuild.read(sys.executable, None if spec is None else spec.origin)
        # If the driver is missing, the ranks themselves will report the GPU problem.
        with contextlib.suppress(NoDriver), nvml() as driver:
            require_gpus(driver, local_ranks, environ, is_task=plan.per == "gpu", torch=torch)


def plan_digest(attempt: AttemptDir) -> str:
    """Return a digest of plan.json, used to check that two hosts see the same file."""
    return hashlib.sha256(attempt.plan_file.read_bytes()).hexdigest()[:16]


def clock_offset_s(folder: Path) -> float:
    """Return by how many seconds this host's clock is ahead of the clock of a folder's file server.

    Raises OSError if the folder cannot be written.
    """
    started_s = time.time()
    handle, name = tempfile.mkstemp(prefix=".probe.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(bytes(PROBE_BYTES))
        written_s, ended_s = Path(name).stat().st_mtime, time.time()
    finally:
        os.unlink(name)
    # A slow server may timestamp the file at any moment between `started_s` and `ended_s`.
    return min(0.0, ended_s - written_s) + max(0.0, started_s - written_s)


def _clock_offset_s(attempt: AttemptDir) -> float:
    """Return the run folder's `clock_offset_s`; raise PreflightFailed if the folder cannot be written."""
    try:
        return clock_offset_s(attempt.path)
    except OSError as error:
        raise PreflightFailed(
            f"{attempt.path} cannot be written on {socket.gethostname()}: {error.strerror or error}",
            hint="check `df -h` and `quota`; every node must be able to write to the run folder",
            is_node=error.errno not in NO_SPACE,
        ) from error


def check_clock(offset_s: float) -> Finding:
    """Compare this host's clock with the clock of the run folder's file server."""
    if abs(offset_s) <= MAX_CLOCK_OFFSET_S:
        return Finding("clock", "ok", f"{abs(offset_s):.1f} s off the clock of the run folder's file server")
    where = "ahead of" if offset_s > 0 else "behind"
    value = f"{abs(offset_s):.0f} s {where} the clock of the run folder's file server"
    return Finding("clock", "failure", value, CLOCK_HINT)


def free_mib(folder: Path) -> float | None:
    """Return a folder's free space in MiB (infinity if unlimited), or None if the folder does not exist."""
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        return None
    return found.f_bavail * found.f_frsize / 2**20 if found.f_blocks else math.inf


def temporary_folders(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the folders for the ranks' temporary files, keyed by the name of the check."""
    return {"/tmp": Path(environ.get("TMPDIR") or "/tmp"), "/dev/shm": SHARED_MEMORY}


def check_space(name: str, folder: Path) -> Finding:
    """Check that a folder for temporary files is writable and has enough free space."""
    free = free_mib(folder)
    if free is None:
        return Finding(name, "ok", "there is none")
    if not os.access(folder, os.W_OK | os.X_OK):
        hint = "set TMPDIR to a folder that you can write to"
        if folder == SHARED_MEMORY:
            hint = "data loader workers need this folder, which usually has the mode 1777"
        return Finding(name, "warning", f"{folder} is not writable", hint)
    value = f"{free / 1024:,.1f} GiB" if free >= 1024 else f"{free:,.0f} MiB"
    if free >= FEW_FREE_MIB:
        return Finding(name, "ok", f"{value} free in {folder}")
    hint = f"remove the files that other jobs left in {folder}, or set TMPDIR to another folder"
    if folder == SHARED_MEMORY:
        hint = "data loader workers need this space; in a container, `docker run --shm-size=8g` enlarges it"
    if free < MIN_FREE_MIB:
        return Finding(name, "failure", f"has only {free:.1f} MiB free", hint)
    return Finding(name, "warning", f"{value} free in {folder}", hint)
