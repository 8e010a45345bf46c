"""Slurm's estimates of when a job would start, for the requested and all other suitable partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from trainkit.backend import StartEstimates
from trainkit.cluster.limits import ResourceRequest, partition_problems
from trainkit.cluster.model import Cluster
from trainkit.config import RunConfig
from trainkit.errors import TrainkitError
from trainkit.formats import duration, table
from trainkit.plan.launch import LaunchPlan, Options, option_argv
from trainkit.run.files import LEFT_OUT, to_json
from trainkit.slurm.client import query
from trainkit.slurm.submit import Answer, ask_starts

SOON_S = 60
MAX_SHOWN = 4


@dataclass(frozen=True)
class Wait:
    """The estimated start time in one partition."""

    partition: str
    is_asked: bool
    """True if the config requests this partition, or if this is the default partition and the config requests
    none."""
    answer: Answer = field(metadata=LEFT_OUT)

    def to_dict(self) -> dict[str, object]:
        """Return the estimate as a JSON-serializable dict, with the start time in ISO 8601 format."""
        return {**to_json(self), **to_json(self.answer)}


@dataclass(frozen=True)
class SlurmEstimates(StartEstimates):
    """The estimated start times in several partitions."""

    waits: Sequence[Wait]

    def to_list(self) -> list[dict[str, object]]:
        return [wait.to_dict() for wait in self.waits]

    def lines(self, fit: int | None = None) -> Iterable[str]:
        return wait_lines(self.waits, fit=fit) if self.waits else ()

    @property
    def refusal(self) -> str | None:
        asked = [wait.answer for wait in self.waits if wait.is_asked]
        return asked[0].remark if asked and all(answer.refused for answer in asked) else None


def request_of(plan: LaunchPlan, config: RunConfig, cluster: Cluster) -> ResourceRequest:
    """Return the resources that a plan's job requests."""
    return ResourceRequest.of(config.resources, cluster).with_workers(
        plan.workers_per_node, plan.device, plan.threads_per_worker, plan.per
    )


def estimate_waits(plan: LaunchPlan, config: RunConfig, cluster: Cluster) -> list[Wait]:
    """Estimate the wait in the requested partitions first, then in all other partitions.

    Raises SlurmUnreachable if Slurm does not answer any query.
    """
    assert plan.slurm is not None
    request = request_of(plan, config, cluster)
    names = [item.name for item in request.partitions]
    others = [item.name for item in cluster.partitions if not item.is_hidden and item.name not in names]
    options: Options = {**plan.slurm.sbatch, "comment": False}
    misfits = {name: "" if name in names else misfit(request, cluster, name) for name in [*names, *others]}
    asked = [(option_argv({**options, "partition": name}), why_not) for name, why_not in misfits.items()]
    answers = ask_fitting(asked, plan.slurm.clusters)
    return [Wait(name, name in names, answer) for name, answer in zip(misfits, answers, strict=True)]


def ask_fitting(
    requests: Iterable[tuple[Sequence[str], str]], clusters: Sequence[str], enough_s: float | None = None
) -> list[Answer]:
    """Return the answers of `ask_starts`; if a request does not fit a partition, the answer is the reason."""
    known = list(requests)
    found = iter(ask_starts([argv for argv, why_not in known if not why_not], enough_s, clusters))
    return [Answer(remark=why_not) if why_not else next(found) for _, why_not in known]


def misfit(request: ResourceRequest, cluster: Cluster, name: str) -> str:
    """Return why a job does not fit in a partition, as one sentence, or "" if it fits."""
    partition = cluster.partition(name)
    if partition is None:
        return ""
    found = next(partition_problems(request, cluster, partition), None)
    return "" if found is None else f"{found[0]}: {found[1]}"


def priority(cluster: str, enough_s: float) -> str:
    """Return the user's fair-share values and the priority weights as text, or "" if Slurm reports none."""
    parts = []
    for argv in (["sprio", "--weights"], ["sshare", "-U"]):
        try:
            parts.append(query(argv, timeout_s=enough_s / 2, patience_s=0.0, cluster=cluster).rstrip())
        except TrainkitError:
            return ""
    return "\n".join(parts)


def wait_lines(waits: Sequence[Wait], now: datetime | None = None, fit: int | None = None) -> Iterator[str]:
    """Yield the lines of a table with the columns partition, start time and remark."""
    now = datetime.now(timezone.utc) if now is None else now
    rows = [("partition", "would start", "")]
    for wait in waits:
        answer = wait.answer
        start = "no" if answer.start_time is None else when(answer.start_time, now)
        remark = answer.remark or f"on {_shortened(answer.nodes)}"
        rows.append((f"{wait.partition}{' (selected)' if wait.is_asked else ''}", start, remark))
    yield from table(rows, fit=fit).splitlines()


def when(start: datetime, now: datetime) -> str:
    """Format a start time as the time left until then, followed by the local time, or as "now"."""
    seconds = (start - now).total_seconds()
    if seconds < SOON_S:
        return "now"
    return f"in {duration(seconds)} ({start.astimezone():%Y-%m-%d %H:%M})"


def _shortened(nodes: Sequence[str]) -> str:
    return (
        ", ".join(nodes) if len(nodes) <= MAX_SHOWN else f"{nodes[0]}, … and {nodes[-1]} ({len(nodes)} nodes)"
    )
