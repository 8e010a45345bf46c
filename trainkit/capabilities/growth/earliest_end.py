"""Implements ``--nodes auto``: chooses the resource request that is expected to finish a run first.

A request consists of a number of nodes, a partition and a time limit. The module asks Slurm when each
possible request would start, estimates how long the run would take, and chooses a request. Start times and
durations are estimates, because other jobs may be submitted or exit at any time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path

from trainkit.backends.slurm.queue_estimate import ask_fitting, misfit, priority, request_of, when
from trainkit.capability import NodesChoice
from trainkit.cluster.limits import ResourceRequest, listed, longest_time_s
from trainkit.cluster.model import Cluster, Partition
from trainkit.config import LoadedConfig, RunConfig, read_effective
from trainkit.config.load import with_values
from trainkit.config.training import DECODER
from trainkit.errors import ConfigError, TrainkitError, UsageError
from trainkit.formats import duration, plural, table, time_limit_s, time_text
from trainkit.launch.gpu_hours import most_nodes
from trainkit.launch.plan_run import gather, plan_run
from trainkit.plan.facts import Facts
from trainkit.plan.gpus import RESTART_S, find_gpu
from trainkit.plan.launch import LaunchPlan, Options, option_argv
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.plan.node_range import KEY
from trainkit.plan.step_cost import cost_of
from trainkit.plan.step_work import work_of
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.events import read_events
from trainkit.run.files import LEFT_OUT, UNLIMITED, numbers, to_json
from trainkit.run.group import RunGroup
from trainkit.run.history import RunHistory, read_plan
from trainkit.run.registry import iter_known_runs
from trainkit.run.rundir import RunDir

ENOUGH_S = 5.0
"""Total time limit in seconds for all Slurm queries; answers that arrive later are ignored."""
MOST_ASKED = 24
"""Maximum number of requests for which Slurm is asked to estimate the start time."""
SLICES_S = (3600.0, 4 * 3600.0)
"""Time limits, in seconds, of slices to try if the run can be split. A restart takes little time compared
with either limit.
"""
LEAST_SIZES = 4
"""Minimum number of node counts to try in each partition; slices are tried only if further queries are
allowed."""
MOST_RUNS = 100
"""Maximum number of earlier runs whose speeds are read, newest first."""
SPEED_SECTIONS = {"task", "model", "precision", "parallel", "data"}
"""Config sections that must be equal in two runs for their steps to take the same time."""
DEGREES = {"parallel": {"dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "pp_microbatches"}}
"""Config keys that are ignored when comparing runs, because the launch plans contain the values derived from
these keys."""

SizeAndGpu = tuple[int, str]
"""Key of an estimate: the number of nodes and their GPU type, which is empty if unknown."""


@dataclass(frozen=True)
class Work:
    """The time that a run's steps take on a given number and type of nodes."""

    seconds: float
    source: str
    """The source of the estimate, as text for the table."""


@dataclass(frozen=True)
class Offer:
    """A possible resource request, with the expected start and end of the run."""

    num_nodes: int
    partition: str
    limit_s: float = field(metadata=UNLIMITED)
    """Time limit of one job, in seconds."""
    work: Work
    start_time: datetime | None = None
    """Expected start, or None if Slurm does not predict one."""
    is_slice: bool = False
    """True if the time limit is shorter than the config's time limit, so that the run is split into several
    jobs."""
    end_time: datetime | None = None
    """Expected end, or None if the run would not finish."""
    num_jobs: int = 1
    """Number of jobs that the run needs to finish."""
    remark: str = ""
    """Reason why the run would not finish; empty if the run would finish."""


@dataclass(frozen=True)
class Choice(NodesChoice):
    """All offers, and the offer that was chosen."""

    offers: Sequence[Offer]
    taken: Offer | None
    """The chosen offer, or None if the original request is kept."""
    reason: str = ""
    """Reason why no offer was chosen, as one sentence."""
    priority: str = field(default="", metadata=LEFT_OUT)
    """Slurm's report about the priority of this user's jobs."""

    def to_dict(self) -> dict[str, object]:
        """Return this choice as a JSON-serializable dictionary, excluding the priority report."""
        return {**to_json(self), "reason": self.reason or None}

    def lines(self, plan: LaunchPlan, fit: int | None = None) -> Iterator[str]:
        """Yield a table of the offers, with a star next to the chosen offer, and notes about the choice."""
        now, workers = datetime.now(timezone.utc), plan.workers_per_node
        if self.offers:
            unit = "GPU-hours" if plan.device == "cuda" else "worker-hours"
            rows = [("nodes", "partition", "limit", "would start", "would end", unit, "work from")]
            for offer in self.offers:
                start, end = (
                    "no" if time is None else when(time, now) for time in (offer.start_time, offer.end_time)
                )
                hours = offer.num_nodes * workers * offer.work.seconds / 3600
                limit = "none" if math.isinf(offer.limit_s) else time_text(int(offer.limit_s))
                star = "*" if offer is self.taken else ""
                source = offer.remark or offer.work.source
                rows.append(
                    (f"{offer.num_nodes}{star}", offer.partition, limit, start, end, f"{hours:.2f}", source)
                )
            yield from table(rows, right={5}, fit=fit, num_keys=2).splitlines()
            yield (
                "start times are estimates from `sbatch --test-only`; they can change when other "
                "jobs are submitted or finish."
            )
        if self.priority:
            yield f"your priority (sprio --weights, sshare):\n{self.priority}"
        if self.taken is None:
            yield f"--nodes auto: {self.reason}; the request is unchanged: {plan.shown_nodes}"


def choose_nodes(
    loaded: LoadedConfig,
    workload: Workload = TRAINER,
    *,
    code_dir: Path | None = None,
    facts: Facts | None = None,
    before: LaunchPlan | None = None,
    left: float = 1.0,
) -> tuple[LoadedConfig, LaunchPlan, Choice]:
    """Return the config with all possible node counts, the plan expected to finish first, and the `Choice`.

    For a resumed run, `before` has the same meaning as in `plan_nodes`, and `left` is the fraction of steps
    that remains. Raises the same exceptions as `plan_run`. If Slurm does not respond, the returned plan uses
    the original request of the config.
    """
    if len(clusters := loaded.config.resources.clusters) > 1:
        message = f"cannot compare start times, because Slurm chooses among the clusters {listed(clusters)}"
        raise UsageError(
            f"--nodes auto {message}", hint="specify a number of nodes or a range, such as --nodes 2-8"
        )
    facts = facts or gather(loaded, workload, code_dir=code_dir)
    cluster = facts.target.cluster
    is_cut, base = _may_be_cut(loaded.config, workload), loaded
    if is_cut and cluster is not None:
        asked = ResourceRequest.of(loaded.config.resources, cluster)
        short = replace(asked, time_s=0)
        fitting = (item for item in asked.partitions if not misfit(short, cluster, item.name))
        longest_s = max((longest_time_s(asked, cluster, item)[0] for item in fitting), default=math.inf)
        if longest_s < (asked.time_s or 0):
            base = _sliced(loaded, longest_s)
    own = plan_run(base, facts, workload, code_dir=code_dir, before=before)

    def unchanged(choice: Choice) -> tuple[LoadedConfig, LaunchPlan, Choice]:
        # Reject a run that fits into a partition only when split into slices, as is done without --nodes
        # auto.
        plan = own if base is loaded else plan_run(loaded, facts, workload, code_dir=code_dir, before=before)
        return loaded, plan, choice

    if cluster is None or own.slurm is None:
        return unchanged(
            Choice((), None, "trainkit can estimate when nodes become free only if the run uses Slurm")
        )
    given = loaded.config.resources
    request = request_of(own, loaded.config, cluster)
    if not request.partitions:
        why = cluster.error or "the partitions of this cluster are unknown"
        return unchanged(Choice((), None, why))
    wider, plan = base, own
    if isinstance(given.nodes, int):
        most = max(min(one.num_nodes, one.max_nodes or one.num_nodes) for one in request.partitions)
        sizes = [size for size in sizes_around(given.nodes, most) if size <= most_nodes(base, own)]
        if len(sizes) > 1:
            nodes = ",".join(map(str, sizes))
            wider = with_values(base, {KEY: nodes}, f"--nodes auto: {nodes}")
            plan = plan_run(wider, facts, workload, code_dir=code_dir, before=own)
    try:
        offers, priority = _gather(plan, wider.config, facts, request, left, is_cut)
    except TrainkitError as error:
        return unchanged(Choice((), None, error.message.splitlines()[0]))
    best = earliest(offers)
    if best is None:
        return unchanged(
            Choice(offers, None, "the run is not expected to finish with any possible request", priority)
        )
    why_longer = ""
    if best.is_slice:
        more: dict[str, object] = {}
        # The plan may now include partitions that accept only slices and whose nodes have fewer GPUs.
        if len(request.partitions) > 1:
            more["resources.gpus_per_node"] = plan.workers_per_node
        # At its time limit, a job without slices is requeued, but a run with slices must finish within
        # resources.time.
        total_s = 60 * math.ceil((best.work.seconds + best.num_jobs * RESTART_S) / 60)
        if total_s > (time_limit_s(str(given.time)) or 0):
            more["resources.time"] = time_text(total_s)
            why_longer = f"; resources.time is raised from {given.time} to the expected time of all jobs"
        wider = _sliced(wider, best.limit_s, **more)
        plan = plan_run(wider, facts, workload, code_dir=code_dir, before=plan)
    return wider, taken(plan, best, why_longer), Choice(offers, best, priority=priority)


def _may_be_cut(config: RunConfig, workload: Workload) -> bool:
    """Return whether a run without a configured slice can be split into slices."""
    asked = config.resources
    is_limited = asked.time is not None and time_limit_s(asked.time) is not None
    is_free = asked.slice is None and asked.time_min is None
    return not workload.is_command and is_limited and is_free and "timeout" in config.requeue.on


def _sliced(loaded: LoadedConfig, slice_s: float, **others: object) -> LoadedConfig:
    return with_values(loaded, {"resources.slice": time_text(int(slice_s)), **others}, "--nodes auto")


# Functions that decide without querying Slurm


def sizes_around(own: int, most: int) -> list[int]:
    """Return `own`, its successive halves that are integers, and its successive doubles up to `most`."""
    sizes = [own]
    while sizes[0] % 2 == 0:
        sizes.insert(0, sizes[0] // 2)
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes


def expected_work(
    base: Mapping[SizeAndGpu, Work], measured: Mapping[SizeAndGpu, Work]
) -> dict[SizeAndGpu, Work]:
    """Return the expected `Work` for each key in `base`, measured or scaled from the nearest measurement."""
    found = dict(base)
    for place, work in base.items():
        if place in measured:
            found[place] = measured[place]
            continue
        near = min(
            (other for other in measured if other in base),
            key=lambda other: (other[1] != place[1], abs(math.log(other[0] / place[0]))),
            default=None,
        )
        if near is not None:
            seconds = work.seconds * measured[near].seconds / base[near].seconds
            found[place] = Work(seconds, f"{measured[near].source}, scaled")
    return found


def with_end(offer: Offer, config: RunConfig, now: datetime, whole: datetime | None = None) -> Offer:
    """Return the offer with its expected end, or with the reason why the run would not finish.

    The estimate assumes that after each job, the run waits in the queue as long as for the first job, and
    then needs RESTART_S to restart. Backfill helps only the first job, so the second job is assumed to start
    no earlier than `whole`, the expected start of an unsplit job.
    """
    start, resources = offer.start_time, config.resources
    if start is None:
        return replace(offer, remark=offer.remark or "Slurm predicts no start time")
    work_s, limit_s = offer.work.seconds, offer.limit_s
    needs = f"takes {duration(work_s)}"
    more = 0
    if work_s > limit_s:
        if "timeout" not in config.requeue.on:
            return replace(offer, remark=f"{needs}, but requeue.on does not include timeout")
        if limit_s <= RESTART_S:
            return replace(
                offer, remark=f"{needs}, but about {duration(RESTART_S)} of each job are spent on the restart"
            )
        more = math.ceil((work_s - limit_s) / (limit_s - RESTART_S))
    busy_s = work_s + more * RESTART_S
    is_typed = resources.slice is not None and not offer.is_slice
    total_s = time_limit_s(str(resources.time)) if is_typed else None
    if total_s is not None and work_s > total_s:
        return replace(offer, remark=f"{needs}, but resources.time is {resources.time}")
    wait_s = max(0.0, (start - now).total_seconds())
    later_s = (whole - now).total_seconds() - wait_s - limit_s if more and whole is not None else 0.0
    end_s = wait_s + busy_s + max(more * wait_s, later_s)
    return replace(offer, end_time=now + timedelta(seconds=end_s), num_jobs=1 + more)


def earliest(offers: Sequence[Offer]) -> Offer | None:
    """Return the offer with the earliest end, or None; in a tie, prefer fewer jobs, then fewer nodes."""
    ending = [
        (offer.end_time, offer.num_jobs, offer.num_nodes, index)
        for index, offer in enumerate(offers)
        if offer.end_time
    ]
    return offers[min(ending)[-1]] if ending else None


# Functions that query Slurm and read earlier runs


def _gather(
    plan: LaunchPlan, config: RunConfig, facts: Facts, request: ResourceRequest, left: float, cut: bool
) -> tuple[list[Offer], str]:
    """Return the offers for all node counts, partitions and time limits, and Slurm's priority report."""
    cluster, resources = facts.target.cluster, config.resources
    assert cluster is not None
    sizes = sorted([plan.num_nodes, *map(int, plan.sizes)], reverse=True)
    # If too many queries would be necessary, omit slices first, then node counts.
    least = min(len(sizes), LEAST_SIZES) * len(request.partitions)
    slices = SLICES_S[: max(0, MOST_ASKED // least - 1)] if cut else None
    limits = {item.name: _limits(request, cluster, item, slices) for item in request.partitions}
    most = max(2, MOST_ASKED // sum(map(len, limits.values())))
    plans = {size: plan.at(size) for size in sizes[:: -(-len(sizes) // most)]}
    gpus = {item.name: item.gpu_type(resources.constraint) or "" for item in cluster.partitions}
    if plan.device != "cuda":
        gpus = dict.fromkeys(gpus, "")
    asked = [
        (size, item, limit_s, is_slice)
        # Slices come last, so that their queries to Slurm are dropped first if time runs out.
        for is_slice in (False, True)
        for size in plans
        for item in request.partitions
        for limit_s in limits[item.name]
        if is_slice == (cut and limit_s != request.time_s)
    ]
    requests = (
        (_argv(plans[n], n, item, s), misfit(replace(request, nodes=n, time_s=s), cluster, item.name))
        for n, item, s, _ in asked
    )
    clusters = resources.clusters
    with ThreadPoolExecutor(2) as threads:
        weights = threads.submit(priority, ",".join(clusters), ENOUGH_S)
        measured = threads.submit(_measured, plans, config, gpus)
        answers = ask_fitting(requests, clusters, ENOUGH_S)
        base = _base(plans, config, facts, {gpus[item.name] for item in request.partitions}, request)
        work = {
            place: replace(all_steps, seconds=left * all_steps.seconds)
            for place, all_steps in expected_work(base, measured.result()).items()
        }
        now = datetime.now(timezone.utc)
        offers = [
            Offer(
                size,
                item.name,
                limit_s,
                work[size, gpus[item.name]],
                answer.start_time,
                is_slice,
                remark=answer.remark,
            )
            for (size, item, limit_s, is_slice), answer in zip(asked, answers, strict=True)
        ]
        longest = sorted(offers, key=lambda one: one.limit_s)
        whole = {(one.num_nodes, one.partition): one.start_time for one in longest}
        ends = [with_end(one, config, now, whole[one.num_nodes, one.partition]) for one in offers]
        return ends, weights.result()


def _limits(
    request: ResourceRequest, cluster: Cluster, partition: Partition, slices: Sequence[float] | None
) -> list[float]:
    """Return the time limits that a job in a partition may request.

    `slices` are shorter limits to add, or None if the run cannot be split.
    """
    longest = request.time_s or partition.job_time_s or math.inf
    if slices is not None:
        longest = min(longest, longest_time_s(request, cluster, partition)[0])
        return [longest, *sorted((one for one in slices if one < longest), reverse=True)]
    return [longest] if request.time_min_s in (None, longest) else [longest, request.time_min_s]


def _argv(plan: LaunchPlan, size: int, partition: Partition, limit_s: float) -> list[str]:
    assert plan.slurm is not None
    time: Options = {} if math.isinf(limit_s) else {"time": time_text(int(limit_s)), "time-min": False}
    nodes = size + plan.spare_nodes
    asked: Options = {**plan.slurm.sbatch, "nodes": nodes, "partition": partition.name, **time}
    return option_argv({**asked, "comment": False})


def _base(
    plans: Mapping[int, LaunchPlan],
    config: RunConfig,
    facts: Facts,
    gpus: set[str],
    request: ResourceRequest,
) -> dict[SizeAndGpu, Work]:
    """Return the `Work` per number and type of nodes, estimated from the model or from the time limit."""
    steps, data = config.train.steps, facts.data
    known = {name: gpu for name in gpus if (gpu := find_gpu(name)) is not None}
    if data is not None and steps is not None and config.model.architecture == DECODER and gpus == {*known}:
        shape = resolve_model_shape(config.model, data.vocab_size)
        works = {
            size: work_of(config, shape, plan.layout, plan.batch, plan.device) for size, plan in plans.items()
        }
        return {
            (size, name): Work(steps * cost_of(work, gpu, plans[size].workers_per_node).step_s, "planned")
            for size, work in works.items()
            for name, gpu in known.items()
        }
    resources = config.resources
    total_s = time_limit_s(resources.time) if resources.time is not None else None
    total_s = total_s or max((item.job_time_s or 0 for item in request.partitions), default=0)
    if not total_s:
        message = "the duration of the run is unknown because resources.time and train.steps are null"
        raise TrainkitError(message, hint="set resources.time or train.steps, or specify a number of nodes")
    source = f"assumed: resources.time is meant for {plural(request.nodes, 'node')}"
    return {(size, name): Work(total_s * request.nodes / size, source) for size in plans for name in gpus}


def _measured(
    plans: Mapping[int, LaunchPlan], config: RunConfig, gpus: Mapping[str, str]
) -> dict[SizeAndGpu, Work]:
    """Return the `Work` derived from the speed of earlier runs with equivalent steps, including bench runs.

    Newer runs take precedence over older ones.
    """
    found: dict[SizeAndGpu, Work] = {}
    steps = config.train.steps
    if steps is None or plans[max(plans)].workload.is_command:
        return found
    for run in islice(_earlier_runs(), MOST_RUNS):
        records = RunHistory(run).newest_steps()
        for number in {record.attempt for record in records if record.attempt is not None}:
            attempt = run.attempt(number)
            before = read_plan(attempt)
            plan = plans.get(before.count("num_nodes") or 0)
            if plan is None or before.step_shape != (to_json(plan.layout), to_json(plan.batch), plan.device):
                continue
            started = next(read_events(run, "started", attempt=number), None)
            gpu = gpus.get(started.text("partition") or "") if started is not None else None
            measured = numbers([record for record in records if record.attempt == number], "step_s")
            if gpu is None or (plan.num_nodes, gpu) in found or not measured or not _is_alike(run, config):
                continue  # Attempts outside this cluster's partitions used different types of nodes.
            source = f"measured in {run.shown}"
            found[plan.num_nodes, gpu] = Work(steps * statistics.median(measured), source)
    return found


def _is_alike(run: RunDir, config: RunConfig) -> bool:
    try:
        before = read_effective(run.config_file)
    except (OSError, ConfigError):
        return False  # A different trainkit version wrote the config.
    first, second = (one.model_dump(include=SPEED_SECTIONS, exclude=DEGREES) for one in (before, config))
    return first == second


def _earlier_runs() -> Iterator[RunDir]:
    for known in iter_known_runs():
        yield from map(known.run, known.trials) if isinstance(known, RunGroup) else (known,)


# Function that adapts the plan to the chosen offer


def taken(plan: LaunchPlan, offer: Offer, why_longer: str = "") -> LaunchPlan:
    """Return the plan of a job that requests the offer; smaller node counts remain allowed if nodes fail."""
    own = plan.at(offer.num_nodes)
    assert own.slurm is not None
    sizes = {size: change for size, change in own.sizes.items() if int(size) < offer.num_nodes}
    nodes = offer.num_nodes + own.spare_nodes
    sbatch: Options = {**own.slurm.sbatch, "nodes": nodes, "partition": offer.partition}
    if not (sizes or own.spare_nodes):
        sbatch.pop("no-kill", None)
    reasons = {**own.reasons, "nodes": f"{offer.num_nodes}: expected to finish first (--nodes auto)"}
    if offer.is_slice:
        limit = time_text(int(offer.limit_s))
        reasons["slice"] = f"{limit}: expected to finish first (--nodes auto){why_longer}"
    if "nodes" in own.reasons:
        reasons["nodes"] += f", instead of {own.reasons['nodes']}"
    if "partition" in reasons:
        reasons["partition"] = (
            f"{offer.partition}: expected to finish first among {own.slurm.sbatch['partition']}"
        )
    return replace(own, sizes=sizes, slurm=replace(own.slurm, sbatch=sbatch), reasons=reasons)
