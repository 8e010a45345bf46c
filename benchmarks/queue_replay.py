"""Simulate the time to result on a busy cluster: a fixed number of nodes, a range, slices and growth.

    python -m benchmarks.queue_replay
    python -m benchmarks.queue_replay --submissions 2 --seeds 1      # in a few seconds

Simulates a month of a cluster under FIFO scheduling with EASY backfill, which starts a job early if this does
not delay the first job in the queue. Other jobs have Poisson arrivals, and sizes and durations drawn from
Microsoft's Philly trace, as in Gavel (OSDI '20, arXiv 2008.09213; `scheduler/utils.py`). One run at a time is
submitted in each month, at several moments and in each of several ways. The other jobs are the same for all
ways. trainkit's own code decides whether a run grows.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainkit.capabilities.growth.growth_watch import ASK_EVERY_S, decide_growth

SIZES = ((1, 0.70), (2, 0.10), (4, 0.15), (8, 0.05))
"""The number of nodes of a job and the share of such jobs, derived from the GPUs per job in the trace."""
MINUTES = (((1.5, 3.0), 0.8), ((3.0, 4.0), 0.2))
"""Ranges for the decimal logarithm of a job's duration in minutes, uniform in each range, and the share of
each range."""
MEAN_H = sum(share * (10**b - 10**a) / (b - a) / math.log(10) / 60 for (a, b), share in MINUTES)
MEAN_NODE_HOURS = MEAN_H * sum(size * share for size, share in SIZES)
OVERESTIMATE = (1.0, 3.0)
"""Range of the ratio between a job's time limit and its duration, uniform."""
LONGEST_H, MONTH_H, WARM_UP_H = 168.0, 720.0, 168.0
WORK_H = 48.0
"""Duration of the run on all of its nodes, in hours."""
MOST, FEWEST = 8, 2
SPEEDUP = 1.9
"""Speedup from doubling the number of nodes."""
RESTART_H, REQUEUE_H = 5 / 60, 2 / 60
"""Hours for the start and the save in each job, and hours from the end of a job until it is queued again."""


@dataclass(frozen=True)
class Request:
    """How the run requests nodes."""

    name: str
    fewest: int
    limit_h: float
    least_h: float | None = None
    """Minimum time limit in hours to which Slurm may reduce the limit to fit a gap."""
    grows: bool = False


REQUESTS = (
    Request("8", MOST, 72.0),
    Request("8, slices of 4 h", MOST, 4.0),
    Request("2-8", FEWEST, 72.0),
    Request("2-8, grows", FEWEST, 72.0, grows=True),
    Request("2-8, slices of 4 h", FEWEST, 4.0),
    Request("2-8, at least 4 h", FEWEST, 72.0, least_h=4.0),
    Request("2-8, at least 4 h, grows", FEWEST, 72.0, least_h=4.0, grows=True),
)


def speed(num_nodes: int) -> float:
    """Return the training speed relative to the speed on all nodes."""
    return float((num_nodes / MOST) ** (SPEEDUP - 1))


@dataclass(eq=False)
class Job:
    """A queued or running job."""

    submit_h: float
    fewest: int
    most: int
    limit_h: float
    duration_h: float = 0.0
    """Duration of a job that is not part of the run."""
    is_run: bool = False
    least_h: float | None = None
    start_h: float = 0.0
    num_nodes: int = 0


@dataclass
class Result:
    """The result of a simulated run."""

    wait_h: float = 0.0
    """Hours that the run waits for its first nodes."""
    result_h: float = 0.0
    """Hours from the submission to the end of the run."""
    node_hours: float = 0.0
    num_jobs: int = 0
    others_wait_h: list[float] = field(default_factory=list)
    """Mean wait in hours of the other jobs that were submitted during the run."""


def others(num_busy: float, rng: random.Random) -> list[Job]:
    """Return the other jobs of two months, which keep `num_busy` nodes busy on average."""
    found, now_h = list[Job](), 0.0
    while now_h < 2 * MONTH_H:
        [size] = rng.choices(*zip(*SIZES, strict=True))
        [(low, high)] = rng.choices(*zip(*MINUTES, strict=True))
        duration_h = 10 ** rng.uniform(low, high) / 60
        limit_h = min(LONGEST_H, duration_h * rng.uniform(*OVERESTIMATE))
        found.append(Job(now_h, size, size, limit_h, duration_h))
        now_h += rng.expovariate(num_busy / MEAN_NODE_HOURS)
    return found


class Replay:
    """Simulates the cluster from its start until the run has ended."""

    def __init__(self, num_nodes: int, jobs: Sequence[Job], request: Request, submit_h: float) -> None:
        self.request, self.submit_h, self.left_h, self.result = request, submit_h, WORK_H, Result()
        self.free, self.running, self.queue = num_nodes, list[Job](), list[Job]()
        self._count = itertools.count()
        self._events = [(job.submit_h, next(self._count), "submit", Job(**vars(job))) for job in jobs]
        heapq.heapify(self._events)
        self._submit_run(submit_h)

    def _submit_run(self, now_h: float) -> None:
        request = self.request
        job = Job(now_h, request.fewest, MOST, request.limit_h, is_run=True, least_h=request.least_h)
        self._at(now_h, "submit", job)

    def _at(self, time_h: float, name: str, job: Job) -> None:
        heapq.heappush(self._events, (time_h, next(self._count), name, job))

    def play(self) -> Result:
        """Simulate until the run has ended."""
        while self.left_h > 1e-9:
            now_h, _, name, job = heapq.heappop(self._events)
            if name == "submit":
                self.queue.append(job)
            elif job not in self.running:
                continue  # the job of the run has ended so that the run can grow
            elif name == "end" or self._grows(now_h, job):
                self._end(now_h, job)
            elif name == "ask":
                self._at(now_h + ASK_EVERY_S / 3600, "ask", job)
            self._schedule(now_h)
        return self.result

    def _end(self, now_h: float, job: Job) -> None:
        self.running.remove(job)
        self.free += job.num_nodes
        if job.is_run:
            self.left_h -= max(0.0, now_h - job.start_h - RESTART_H) * speed(job.num_nodes)
            self.result.node_hours += job.num_nodes * (now_h - job.start_h)
            self.result.result_h = now_h - self.submit_h
            if self.left_h > 1e-9:
                self._submit_run(now_h + REQUEUE_H)

    def _start(self, now_h: float, job: Job, num_nodes: int) -> None:
        self.queue.remove(job)
        self.running.append(job)
        self.free -= num_nodes
        assert self.free >= 0
        job.start_h, job.num_nodes, duration_h = now_h, num_nodes, job.duration_h
        if job.is_run:
            duration_h = min(job.limit_h, RESTART_H + self.left_h / speed(num_nodes))
            self.result.num_jobs += 1
            if self.result.num_jobs == 1:
                self.result.wait_h = now_h - self.submit_h
            if self.request.grows and num_nodes < MOST:
                self._at(now_h + ASK_EVERY_S / 3600, "ask", job)
        elif job.submit_h >= self.submit_h:
            self.result.others_wait_h.append(now_h - job.submit_h)
        self._at(now_h + duration_h, "end", job)

    def _schedule(self, now_h: float) -> None:
        while self.queue and self.queue[0].fewest <= self.free:
            self._start(now_h, self.queue[0], min(self.queue[0].most, self.free))
        until_h, spare = self._reservation(now_h)
        for job in self.queue[1:]:
            is_short = now_h + (job.least_h or job.limit_h) <= until_h
            num_nodes = min(job.most, self.free if is_short else min(self.free, spare))
            if num_nodes >= job.fewest:
                job.limit_h = min(job.limit_h, until_h - now_h) if is_short else job.limit_h
                self._start(now_h, job, num_nodes)
                spare -= 0 if is_short else num_nodes

    def _reservation(self, now_h: float) -> tuple[float, int]:
        """Return the latest start of the first queued job, and how many nodes remain free at that time."""
        if not self.queue:
            return float("inf"), self.free
        free, until_h = self.free, now_h
        for job in sorted(self.running, key=lambda job: job.start_h + job.limit_h):
            if free >= self.queue[0].fewest:
                break
            free, until_h = free + job.num_nodes, job.start_h + job.limit_h
        return until_h, free - self.queue[0].fewest

    def _grows(self, now_h: float, job: Job) -> bool:
        """Return whether trainkit would requeue the run to grow, given larger jobs that could start now."""
        until_h, spare = self._reservation(now_h)
        least_h = self.request.least_h or self.request.limit_h
        fits = self.free if now_h + least_h <= until_h else min(self.free, spare)
        left_h = self.left_h - max(0.0, now_h - job.start_h - RESTART_H) * speed(job.num_nodes)
        waits = {
            size: 0.0 if size - job.num_nodes <= fits else None for size in range(job.num_nodes + 1, MOST + 1)
        }
        left_s, restart_s = left_h * 3600 / speed(job.num_nodes), (RESTART_H + REQUEUE_H) * 3600
        return decide_growth(left_s, restart_s, job.num_nodes, waits).num_nodes is not None


def table(num_nodes: int, load: float, seeds: int, submissions: int) -> Iterator[str]:
    """Yield the table rows for one cluster size and load."""
    for request in REQUESTS:
        found = list[Result]()
        for seed in range(seeds):
            rng = random.Random(seed)
            jobs = others(load * num_nodes, rng)
            moments = [rng.uniform(WARM_UP_H, MONTH_H) for _ in range(submissions)]
            found += [Replay(num_nodes, jobs, request, moment).play() for moment in moments]
        results = sorted(result.result_h for result in found)
        waits = itertools.chain.from_iterable(result.others_wait_h for result in found)
        shown = (
            f"{statistics.median(result.wait_h for result in found):.1f}",
            f"{statistics.median(results):.0f}",
            f"{results[int(0.9 * len(results))]:.0f}",
            f"{statistics.mean(result.num_jobs for result in found):.1f}",
            f"{statistics.mean(result.node_hours for result in found):.0f}",
            f"{statistics.mean(waits):.1f}",
        )
        yield f"| {num_nodes} | {load:.0%} | {request.name} | {' | '.join(shown)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="months")
    parser.add_argument("--submissions", type=int, default=20, help="moments of each month")
    options = parser.parse_args()
    columns = ("cluster", "load", "nodes", "first start h", "result h", "90 %", "jobs", "node-hours")
    print(f"| {' | '.join(columns)} | others wait h |\n{'|---' * (len(columns) + 1)}|")
    for num_nodes, load in itertools.product((16, 64), (0.8, 0.9)):
        print("\n".join(table(num_nodes, load, options.seeds, options.submissions)), flush=True)


if __name__ == "__main__":
    main()
