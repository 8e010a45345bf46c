"""The files of one attempt that a diagnosis reads, as texts, and the hosts of its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from trainkit.job.failed_starts import FailedStart, batch_log, failed_starts
from trainkit.observe.run_text import Text, clean, json_line, read_log
from trainkit.observe.signatures import Where
from trainkit.observe.slurm_messages import slurm_messages
from trainkit.plan.workload import PER_RANK
from trainkit.run.end import AttemptEnd, read_end
from trainkit.run.files import read_json, read_jsonl_reversed
from trainkit.run.record import read_job
from trainkit.run.rundir import AttemptDir
from trainkit.slurm.jobs import JobInfo
from trainkit.slurm.states import JobState

MAX_SAMPLES = 1000
"""How many of the last health samples may belong to later attempts."""
MAX_LOGS = 256
"""How many logs of ranks are searched when no record says which rank failed first."""
EXPLAINED = (JobState.NODE_FAIL, JobState.OUT_OF_MEMORY, JobState.CANCELLED, JobState.TIMEOUT)
RANK_FILE = re.compile(r"(?:rank|node)-(\d+)")


class AttemptFiles:
    """Reads the files of an attempt; a file that is missing or damaged reads as empty."""

    def __init__(self, attempt: AttemptDir, slurm_job: JobInfo | None) -> None:
        self.attempt, self.run, self.slurm_job = attempt, attempt.run, slurm_job
        end = read_end(attempt)
        self.has_ended, self.end = end is not None, end or AttemptEnd()

    def end_text(self) -> Text:
        values = {"cause": self.end.cause, "state": self.end.state, "reason": self.end.reason}
        keys = [key for key, value in values.items() if value is not None]
        lines = [clean(f"{key}: {values[key]}") for key in keys]
        number = json_line(self.attempt.end_file, keys[0]) if keys else None
        return Text(self.shown(self.attempt.end_file), "end", lines, first_line=number)

    def _job_state(self) -> Iterator[Text]:
        if self.slurm_job is not None:
            job = self.slurm_job
            # squeue calls a job that it has requeued PENDING.
            state = "REQUEUED" if job.state is JobState.REQUEUED else job.slurm_state
            line = f"{state or job.state.value.upper()} {job.reason}".strip()
            if job.exit_code or job.exit_signal:
                line += f" ExitCode={job.exit_code or 0}:{job.exit_signal or 0}"
            yield Text(f"Slurm's state of job {job.job_id}", "slurm", [line], first_line=None)

    def _failed_start(self) -> FailedStart | None:
        """The last start of the run's newest attempt if it failed, unless Slurm knows why."""
        job = self.slurm_job
        is_explained = job is not None and (job.log_not_opened or job.state in EXPLAINED)
        entry = None if is_explained else read_job(self.run).newest
        if entry is None or entry.attempt != self.attempt.number:
            return None
        starts = [one for one in failed_starts(self.run, job) if one.job_id == entry.job_id]
        return starts[-1] if starts else None

    def start_text(self) -> Iterator[Text]:
        start = self._failed_start()
        if start is not None:
            shown = f"Slurm's state of job {start.job_id}"
            if start.file is not None:
                shown = os.path.relpath(start.file, self.run.path)
            yield Text(shown, "start", [f"{start.host}: {start.how}"], host=start.host)

    def batch_log(self) -> Text | None:
        """The output of the batch script in the last start that failed."""
        start = self._failed_start()
        return None if start is None else read_log(batch_log(self.run, start.job_id), self.run.path, "srun")

    def logs(self, kind: Where, paths: Iterable[Path]) -> Iterator[Text]:
        for path in paths:
            number = RANK_FILE.fullmatch(path.stem)
            rank = int(number[1]) if number and kind == "log" else None
            node = int(number[1]) if number and kind == "agent" else None
            host = self.host_of(rank) if rank is not None else self.host_of_node(node)
            text = read_log(path, self.run.path, kind, rank, host)
            if text is not None:
                yield text

    def of_slurm(self) -> Iterator[Text]:
        """What Slurm says: srun and slurmstepd, which give the reason, then accounting, which may not."""
        yield from slurm_messages(self.attempt, is_recorded=self.has_ended and not self.end.guessed)
        yield from self._job_state()

    def outside(self) -> Iterator[Text]:
        """What Slurm, the supervisor and the agents wrote: no program of the user can."""
        yield from self.of_slurm()
        yield from self.logs("agent", sorted(self.attempt.logs_dir.glob("node-*.log"))[:MAX_LOGS])

    def memory_in_use(self, host: str | None) -> str | None:
        """The memory of a host in the last health sample of this attempt, as ``61.2 of 64.0 GiB``."""
        if host is None:
            return None
        try:
            samples = islice(read_jsonl_reversed(self.run.health_file(host)), MAX_SAMPLES)
            sample = next(one for one in samples if one.get("attempt") == self.attempt.number)
            return f"{float(sample['mem_used_gib']):.1f} of {float(sample['mem_total_gib']):.1f} GiB"
        except (OSError, StopIteration, KeyError, TypeError, ValueError):
            return None  # no sample, or one of another form

    def world_size(self) -> int:
        return sum(self._node_sizes())

    def ranks_next_to(self, rank: int | None) -> range:
        """The ranks on the node of a rank; empty when unknown."""
        return next((ranks for _, ranks in self._nodes() if rank in ranks), range(0))

    def log_of(self, rank: int) -> Path:
        """The log with the output of a rank: a launcher writes that of all ranks of its node into one."""
        has_launcher = self.plan().get("launcher") not in (None, *PER_RANK)
        return self.attempt.rank_log(min(self.ranks_next_to(rank), default=rank) if has_launcher else rank)

    def _nodes(self) -> Iterator[tuple[int, range]]:
        """The nodes with their ranks; empty when unknown."""
        start = 0
        for node, size in enumerate(self._node_sizes()):
            yield node, range(start, start + size)
            start += size

    def _node_sizes(self) -> list[int]:
        """The number of ranks of each node; empty when unknown."""
        plan = self.plan()
        sizes, num_nodes = plan.get("node_sizes"), plan.get("num_nodes")
        if not isinstance(sizes, list):
            sizes = [plan.get("workers_per_node")] * (num_nodes if isinstance(num_nodes, int) else 0)
        return sizes if all(isinstance(size, int) for size in sizes) else []

    def hosts(self) -> list[str]:
        """The hosts by node rank; empty when unknown."""
        try:
            return [str(host) for host in read_json(self.attempt.rendezvous_file)["hosts"]]
        except (OSError, ValueError, LookupError, TypeError):
            return []

    def host_of_node(self, node_rank: int | None) -> str | None:
        hosts = self.hosts()
        if node_rank is not None and node_rank < len(hosts):
            return hosts[node_rank]
        return None

    def host_of(self, rank: int | None) -> str | None:
        return self.host_of_node(next((node for node, ranks in self._nodes() if rank in ranks), None))

    def plan(self) -> dict[str, Any]:
        try:
            plan = read_json(self.attempt.plan_file)
        except (OSError, ValueError):
            return {}
        return plan if isinstance(plan, dict) else {}

    def shown(self, path: Path) -> str:
        return str(path.relative_to(self.run.path))
