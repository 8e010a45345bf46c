"""``trainkit env``: the rank environment of a process started here."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option
from trainkit.errors import EXIT_OK


@dataclass(frozen=True)
class FoundRank:
    """The rank environment, None where there is no value; or why this is not a rank."""

    is_rank: bool
    reason: str
    source: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    hosts: tuple[str, ...] = ()
    master_addr: str | None = None
    master_port: int | None = None

    def to_dict(self) -> dict[str, Any]:
        keys = ("is_rank", "source", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
        more = ("num_nodes", "hosts", "master_addr", "master_port", "reason")
        return {key: getattr(self, key) for key in (*keys, *more)}


@click.command(
    cls=Command, epilog=examples("trainkit env", "srun --ntasks=4 trainkit env", "trainkit env --json")
)
@json_option
def command(as_json: bool) -> int:
    """Print the rank environment that a process started here would get, or why it is not a rank."""
    found = find_rank()
    if as_json:
        click.echo(json.dumps(found.to_dict(), ensure_ascii=False))
        return EXIT_OK
    if not found.is_rank:
        click.echo(f"not a rank: {found.reason}")
        return EXIT_OK
    port = "chosen when the ranks start" if found.master_port is None else str(found.master_port)
    click.echo(
        f"rank {found.rank} of {found.world_size}, local rank {found.local_rank} of {found.local_world_size} "
        f"on node {found.node_rank} of {found.num_nodes} ({','.join(found.hosts) or 'this host'}); "
        f"rank 0 at {found.master_addr}, port {port}; {found.reason}"
    )
    return EXIT_OK


def find_rank() -> FoundRank:
    """The rank of this process, by its variables or as a task of a Slurm step, or none.

    Raises UsageError when variables contradict each other.
    """
    from trainkit.job.node.rendezvous import master_address
    from trainkit.job.node.slurm_step import find_slurm_task, reason_not_a_task
    from trainkit.job.rank_env import find_rank_env

    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        env = find_rank_env()
        return FoundRank(
            is_rank=True,
            reason="RANK is set",
            source=env.source,
            rank=env.rank,
            local_rank=env.local_rank,
            world_size=env.world_size,
            local_world_size=env.local_world_size,
            node_rank=env.node_rank,
            num_nodes=env.num_nodes,
            master_addr=env.master_addr,
            master_port=env.master_port,
        )
    task = find_slurm_task()
    if task is None:
        return FoundRank(is_rank=False, reason=str(reason_not_a_task()))
    return FoundRank(
        is_rank=True,
        reason=f"task {task.task} of Slurm step {task.job_id}.{task.step_id}",
        source="slurm",
        # Counted node by node, as in training, whatever the order of srun's tasks.
        rank=sum(task.tasks[: task.node_rank]) + task.local_task,
        local_rank=task.local_task,
        world_size=task.num_tasks,
        local_world_size=task.tasks[task.node_rank],
        node_rank=task.node_rank,
        num_nodes=task.num_nodes,
        hosts=task.hosts,
        master_addr=master_address(task),
    )
