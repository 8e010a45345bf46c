"""The device, the process groups and the device mesh of one rank."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from logging import getLogger
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.job.rank_env import GPU_BINDING_HINT, RankEnv, gpu_index, visible_gpus
from trainkit.job.signals import StopRequest
from trainkit.plan.gpus import cuda_torch_hint
from trainkit.plan.launch import Layout, Place
from trainkit.run.events import log_event
from trainkit.run.rundir import RunDir
from trainkit.trainer.startup_barrier import refuse_shared_gpu, startup_barrier
from trainkit.trainer.torch_private import set_timeout

START_TIMEOUT = timedelta(minutes=30)
"""Long, because one rank may compile in its first step while the others wait."""
COLLECTIVE_TIMEOUT = START_TIMEOUT + timedelta(minutes=1)
"""Longer than the watchdog's limit: the watchdog names the blocking rank, a timed-out collective does not."""
MAX_FILES = 65_536
"""Open file limit; a job of a thousand ranks needs a few thousand files."""
ONE_PROCESS = Layout()


@dataclass(frozen=True)
class World:
    """This rank, its device and its process groups."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    """Dimensions ``dp_replicate`` and ``dp_shard``, and ``pp`` and ``tp`` if larger than 1. ``dp_shard``
    includes cp: parameters are sharded over both. None for a single process without ``parallel.mesh_of_one``
    and ``parallel.offload``.
    """
    checkpoint_group: dist.ProcessGroup | None
    """Separate from the other groups, since asynchronous saves run collectives in a thread of their own."""
    layout: Layout = ONE_PROCESS
    cp_group: dist.ProcessGroup | None = None
    """The ranks that share a sequence; None without context parallelism."""
    is_simulated: bool = False
    """Whether the other ranks do not exist and tensors have no values."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def place(self) -> Place:
        """The coordinates of this rank in the layout."""
        return self.layout.place(self.rank)

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank, which selects the samples that this rank reads."""
        return self.layout.dp_rank(self.rank)

    @property
    def counts_samples(self) -> bool:
        """Whether this rank counts its samples: one of the ranks that share the same samples does."""
        place = self.place
        return not (place.pp or place.cp or place.tp)

    @property
    def distributed(self) -> bool:
        """Whether there are process groups."""
        return self.mesh is not None


def select_device(kind: str, local_rank: int, *, is_task: bool = False) -> torch.device:
    """The device of this rank; `kind` is ``cpu`` or ``cuda``, `is_task` as for `gpu_index`.

    Raises TrainkitError when torch sees no GPU for this rank, with exit code 78 if it never would.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None and torch.version.hip is None:
        raise TrainkitError(
            f"the run uses GPUs, but torch {torch.__version__} of {sys.executable} was built without CUDA",
            hint=cuda_torch_hint(sys.executable),
            exit_code=EXIT_NO_RESTART,
        )
    count = torch.cuda.device_count()
    index = gpu_index(local_rank, count, is_task=is_task)
    if index is None:
        listed = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        is_bound = listed is not None and len(listed) <= local_rank
        raise TrainkitError(
            f"local rank {local_rank} has no GPU: torch sees {count} on this node",
            hint=GPU_BINDING_HINT if is_bound else "check `nvidia-smi` and the log of this node",
            exit_code=EXIT_NO_RESTART if is_bound else None,
        )
    device = torch.device("cuda", index)
    # Also keeps DeviceMesh from selecting the GPU with the number in LOCAL_RANK.
    torch.cuda.set_device(device)
    return device


def join_world(
    env: RankEnv,
    device: torch.device,
    layout: Layout,
    stop: StopRequest,
    is_busy: Callable[[int], bool] = lambda rank: False,
    *,
    mesh_of_one: bool = False,
) -> World | None:
    """Wait for the other ranks and build the mesh; returns None if the ranks agreed to stop.

    `is_busy` returns whether a missing rank is still preparing data; `mesh_of_one`, whether a single rank has
    a mesh too. Raises TrainkitError for ranks that do not arrive, and for two that have the same GPU.
    """
    if env.world_size == 1 and not mesh_of_one:
        return None if stop else World(0, 1, device, None, None)
    _raise_open_file_limit(MAX_FILES)
    gpu = gpu_uuid(device)
    store = startup_barrier(env, stop, START_TIMEOUT, is_busy, gpu)
    if store is None:
        return None
    if gpu and device.index != env.local_rank:
        # It is the only one that this rank sees, but may not be bound to this task alone.
        refuse_shared_gpu(env, gpu, store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return make_world(env.rank, device, layout)


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU; empty for a CPU, and for a MIG slice, which may report the UUID of the whole GPU."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return "" if "MIG" in properties.name.split() else str(properties.uuid)


def _raise_open_file_limit(count: int) -> None:
    """Raise the open file limit of this process: every group opens sockets to all its ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_world(rank: int, device: torch.device, layout: Layout) -> World:
    """The world of this rank; call after the default process group is initialised."""
    checkpoint_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    mesh = build_mesh(device, layout)
    for group in mesh.get_all_groups():
        set_timeout(group, COLLECTIVE_TIMEOUT)
    return World(rank, layout.world_size, device, mesh, checkpoint_group, layout, context_group(layout))


def build_mesh(device: torch.device, layout: Layout) -> DeviceMesh:
    """The device mesh over which parameters are split."""
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard * layout.cp,
        "tp": layout.tp,
    }
    # Every dimension is a process group; `fully_shard` needs that of the shards even for one.
    dims = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def context_group(layout: Layout) -> dist.ProcessGroup | None:
    """The ranks that share sequences with this one; None without context parallelism."""
    if layout.cp == 1:
        return None
    ranks = torch.arange(layout.world_size, device="cpu").view(-1, layout.cp, layout.tp)
    groups = ranks.transpose(1, 2).flatten(0, 1).tolist()
    found = cast(Any, dist).new_subgroups_by_enumeration(groups, timeout=COLLECTIVE_TIMEOUT)
    own: dist.ProcessGroup = found[0]
    return own


def exit_process(exit_code: int) -> None:
    """Flush the output and exit immediately, without the interpreter's shutdown.

    A normal exit of a process with gloo threads occasionally ends in SIGABRT, and a finished job must not
    look like a crash.
    """
    if dist.is_initialized() and exit_code == 0:
        dist.destroy_process_group()
        gc.collect()
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


log = getLogger(__name__)


def record_event(run: RunDir, attempt: int, event: str, **fields: Any) -> None:
    """Append one event; on a full disk, log the error and continue."""
    try:
        log_event(run, attempt, event, **fields)
    except OSError as error:
        log.error(f"cannot write event {event} to {run.events_file} ({error})")
