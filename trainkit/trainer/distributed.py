"""Process groups and the device mesh of one rank."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainkit.job.rank_env import RankEnv
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import Layout
from trainkit.trainer.meeting import meet

START_TIMEOUT = timedelta(minutes=30)
"""Long, because the first step of some rank may compile while the others wait."""
COLLECTIVE_TIMEOUT = START_TIMEOUT + timedelta(minutes=1)
"""Longer than the watchdog's patience, which says who is late; a collective only says that it waited."""


@dataclass(frozen=True)
class World:
    """This rank among all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    """Dimensions ``dp_replicate`` and ``dp_shard``; None for a single process."""
    checkpoint_group: dist.ProcessGroup | None
    """A group of its own: an asynchronous save runs collectives in its own thread."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        return self.size > 1


def join_world(env: RankEnv, device: torch.device, layout: Layout, stop: StopRequest) -> World | None:
    """Meet the other ranks and build the mesh; None when the ranks have agreed to stop instead."""
    if env.world_size == 1:
        return None if stop else World(0, 1, device, None, None)
    store = meet(env, stop, START_TIMEOUT)
    if store is None:
        return None
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    mesh = init_device_mesh(
        device.type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    checkpoint_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return World(env.rank, env.world_size, device, mesh, checkpoint_group)


def leave(exit_code: int) -> None:
    """End this process now, after flushing what it said.

    An ordinary exit of a process with gloo threads ends in SIGABRT once in a while, and a finished job
    must not look like a crash.
    """
    if dist.is_initialized() and exit_code == 0:
        dist.destroy_process_group()
        gc.collect()
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)
