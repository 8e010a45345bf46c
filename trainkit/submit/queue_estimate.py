"""Slurm's estimates of when a job would start, in the requested partitions and in all others that fit."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainkit.cluster.limits import partition_problems
from trainkit.cluster.model import Cluster, Partition, ResourceRequest, resource_request
from trainkit.config import RunConfig
from trainkit.errors import TrainkitError
from trainkit.formats import duration, table
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.slurm_request import option_argv
from trainkit.slurm.client import SlurmRefused
from trainkit.slurm.submit import query_start

ASK_TIMEOUT_S = 5.0
"""Timeout of one query; a busy controller answers these slowly."""
ENOUGH_S = 8.0
"""Seconds after which no further partitions are queried."""
AT_ONCE = 4
SOON_S = 60
# Slurm also says this if nodes are only out of service for now: the job would be accepted and wait.
MAY_CHANGE = re.compile(r"not available|busy")


@dataclass(frozen=True)
class Wait:
    """The estimate for one partition."""

    partition: str
    is_asked: bool
    """Whether the config requests it, or gets it by default."""
    start_time: datetime | None
    """None if the job would not start, or Slurm gives no time."""
    nodes: tuple[str, ...] = ()
    remark: str = ""
    refused: bool = False
    """Whether Slurm would reject the job."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the time in ISO 8601."""
        return {
            "partition": self.partition,
            "is_asked": self.is_asked,
            "start_time": None if self.start_time is None else self.start_time.isoformat(),
            "nodes": list(self.nodes),
            "remark": self.remark,
            "refused": self.refused,
        }


def estimate_waits(
    plan: LaunchPlan,
    config: RunConfig,
    cluster: Cluster,
    partitions: Sequence[Partition],
    environ: Mapping[str, str],
) -> list[Wait]:
    """The estimates for the requested partitions, then for all others.

    `cluster` may come from a profile; `partitions` is their current state in Slurm. Raises SlurmUnreachable
    when Slurm answers no query.
    """
    assert plan.slurm is not None
    request = resource_request(
        config.resources,
        workers_per_node=plan.workers_per_node,
        device=plan.device,
        threads=plan.threads_per_worker,
        per=plan.per,
    )
    names = [item.name for item in cluster.requested_partitions(request.partition)]
    others = [item.name for item in cluster.partitions if not item.is_hidden and item.name not in names]
    waits: list[Wait | None] = []
    questions: dict[int, str] = {}
    for index, name in enumerate([*names, *others]):
        why_not = None if name in names else _misfit(request, cluster, name)
        waits.append(None if why_not is None else Wait(name, False, None, remark=why_not))
        if why_not is None:
            questions[index] = name
    options = option_argv({**plan.slurm.sbatch, "comment": False, "partition": False})
    answers = _ask(questions, options, environ)
    now = {item.name: item for item in partitions}
    for index, name in questions.items():
        waits[index] = _wait(name, name in names, answers.get(index), now.get(name))
    return [wait for wait in waits if wait is not None]


def _misfit(request: ResourceRequest, cluster: Cluster, name: str) -> str | None:
    """Why a job does not fit a partition, in one sentence; None if it does."""
    partition = cluster.partition(name)
    if partition is None:
        return None
    found = next(partition_problems(replace(request, partition=name), cluster, partition), None)
    return None if found is None else f"{found[0]}: {found[1]}"


def _ask(
    questions: Mapping[int, str], options: Sequence[str], environ: Mapping[str, str]
) -> dict[int, Wait | SlurmRefused]:
    """The answers by index of the question; questions for which there was no time are missing."""
    answers: dict[int, Wait | SlurmRefused] = {}
    lost: list[TrainkitError] = []
    give_up = time.monotonic() + ENOUGH_S

    def ask(index: int) -> None:
        if lost or time.monotonic() > give_up:
            return
        argv = [*options, f"--partition={questions[index]}"]
        try:
            found = query_start(
                script, environ=environ, cwd=script.parent, timeout_s=ASK_TIMEOUT_S, extra_argv=argv
            )
        except SlurmRefused as error:
            answers[index] = error
        except TrainkitError as error:
            lost.append(error)
        else:
            answers[index] = Wait(questions[index], False, found.start_time, tuple(found.nodes))

    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder, ThreadPoolExecutor(AT_ONCE) as threads:
        script = Path(folder) / "nothing.sh"
        script.write_text("#!/bin/sh\n", encoding="utf-8")
        list(threads.map(ask, questions))
    if lost and not answers:
        raise lost[0]
    return answers


def _wait(
    name: str,
    is_asked: bool,
    answer: Wait | SlurmRefused | None,
    now: Partition | None,
) -> Wait:
    if answer is None:
        return Wait(name, is_asked, None, remark="Slurm was too busy to answer")
    if isinstance(answer, Wait):
        return replace(answer, is_asked=is_asked)
    remark = answer.sentence.splitlines()[-1] if answer.sentence else answer.message
    if not MAY_CHANGE.search(remark):
        return Wait(name, is_asked, None, remark=remark, refused=True)
    if now is not None and not now.is_up:
        remark = "the partition is not up"
    elif now is not None:
        total = sum(kind.count for kind in now.nodes)
        in_service = sum(kind.in_service or 0 for kind in now.nodes)
        if in_service < total:
            remark = f"not now: {total - in_service} of its {total} nodes are out of service"
    return Wait(name, is_asked, None, remark=remark)


def wait_lines(waits: Sequence[Wait], now: datetime | None = None) -> Iterator[str]:
    """The lines of a table: partition, when the job would start, remark."""
    now = datetime.now(timezone.utc) if now is None else now
    rows = [("partition", "would start", "")]
    for wait in waits:
        when = "no" if wait.start_time is None else _when(wait.start_time, now)
        remark = wait.remark or f"on {_shortened(wait.nodes)}"
        rows.append((f"{wait.partition}{' (requested)' if wait.is_asked else ''}", when, remark))
    yield from table(rows).splitlines()


def _when(start: datetime, now: datetime) -> str:
    seconds = (start - now).total_seconds()
    if seconds < SOON_S:
        return "now"
    return f"in {duration(seconds)} ({start.astimezone():%Y-%m-%d %H:%M})"


def _shortened(nodes: Sequence[str]) -> str:
    return (
        ", ".join(nodes) if len(nodes) <= AT_ONCE else f"{nodes[0]}, … and {nodes[-1]} ({len(nodes)} nodes)"
    )
