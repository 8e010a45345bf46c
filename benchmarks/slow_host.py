"""Slow down one of four hosts during a run, and check that the run reports this host.

    python -m benchmarks.slow_host --runs 10 --slowed 4

Starts a Slurm cluster of four hosts on this machine (as root; see tools/slurm_cluster), and trains on all
hosts with one rank per host. In `--slowed` runs, one host, selected by `--seed`, is limited to `--cpus` CPUs
after `--before` steps, by cgroup v1. At most 30 steps later, the event ``slow_rank`` must report the host and
its rank. Another `--runs` runs of `--steps` steps are undisturbed, and must log no such event. Other
processes on the machine also disturb the runs, so the benchmark prints the load during each run. The exit
code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.on_slurm.login import Login, wait_for
from tools.slurm_cluster.cluster import NUM_HOSTS, Cluster, up
from tools.slurm_cluster.processes import Pid
from trainkit.capabilities.slow_ranks.shown import SLOWDOWN_EVENTS
from trainkit.run.files import read_jsonl
from trainkit.run.rundir import RunDir

CONFIG = """\
name: slow-host
device: cpu
model: {{preset: nano, num_layers: {num_layers}, dim: 128}}
data: {{source: {text}, seq_len: 128, val_fraction: 0.1}}
train: {{steps: {num_steps}, device_batch_size: 4, global_batch_size: 16, log_every: 1, eval_every: null}}
parallel: {{dp_replicate: 4, dp_shard: 1}}
resources: {{nodes: 4, gpus_per_node: 1, cpus_per_gpu: 1, time: "60"}}
checkpoint: {{every_steps: null}}
precision: {{dtype: fp32}}
logging: {{tensorboard: false}}
"""
MAX_STEPS_LATER = 30
PATIENCE_S = 600.0


@dataclass
class Seen:
    """The observations of a run."""

    slowed_host: str | None = None
    slowed_at_step: int | None = None
    """The newest step at the time when the host was slowed down."""
    step_ms_before: float | None = None
    step_ms_after: float | None = None
    load: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""

    @property
    def steps_later(self) -> int | None:
        """Number of steps from the slowdown to the event that reports the host; None if there is none."""
        named = (event["step"] for event in self.events if event.get("host") == self.slowed_host)
        first = next(named, None) if self.slowed_host is not None else None
        return None if first is None or self.slowed_at_step is None else int(first) - self.slowed_at_step

    @property
    def line(self) -> str:
        """The observations as one line of output."""
        seen = "; ".join(
            f"{event['event']} at step {event['step']}"
            + ("" if event.get("rank") is None else f": rank {event['rank']} on {event['host']}")
            + f" ({event['phase']}, x{event['ratio']})"
            for event in self.events
        )
        slowed = "undisturbed"
        if self.slowed_host is not None:
            slowed = f"{self.slowed_host} slowed at step {self.slowed_at_step}"
        times = f"{self.step_ms_before or 0:.0f} ms a step"
        if self.step_ms_after is not None:
            times += f", then {self.step_ms_after:.0f}"
        verdict = self.problem or "right"
        return f"{slowed}, {times}, load {self.load:.1f}: {seen or 'no event'}: {verdict}"


def start(login: Login, num_steps: int, num_layers: int = 4) -> RunDir:
    """Start a run on all four hosts."""
    text = login.folder / "text.txt"
    text.write_text("".join(f"line {number} says {number * number}\n" for number in range(4000)))
    config = login.folder / "slow-host.yaml"
    config.write_text(CONFIG.format(text=text, num_steps=num_steps, num_layers=num_layers))
    return login.submit(config=config)


def steps(run: RunDir) -> list[dict[str, Any]]:
    """Return the records of the steps that the run has logged so far."""
    return list(read_jsonl(run.metrics_file))


def last_step(run: RunDir) -> int:
    """Return the newest step, or 0 before the first step."""
    records = steps(run)
    return int(records[-1]["step"]) if records else 0


def slowdowns(run: RunDir) -> list[dict[str, Any]]:
    """Return the events that report slow ranks."""
    return list(read_jsonl(run.events_file, SLOWDOWN_EVENTS))


def slow_one(login: Login, index: int, *, cpus: float, before: int, num_layers: int = 4) -> Seen:
    """Slow down a host after some steps of a run, wait for the event, and return the observations."""
    seen = Seen(slowed_host=login.cluster.hosts[index - 1], load=os.getloadavg()[0])
    run = start(login, 100_000, num_layers)
    try:
        wait_for(lambda: last_step(run) >= before, f"step {before}", PATIENCE_S)
        num_early = len(slowdowns(run))
        with login.cluster.limit_cpu(index, cpus):
            seen.slowed_at_step = begin = last_step(run)

            def is_over() -> bool:
                seen.events = slowdowns(run)[num_early:]
                return seen.steps_later is not None or last_step(run) > begin + 4 * MAX_STEPS_LATER

            wait_for(is_over, "the event", PATIENCE_S)
        times = [(record["step"], 1e3 * record["step_s"]) for record in steps(run)]
        seen.step_ms_before = median(ms for step, ms in times if begin - before / 2 < step <= begin)
        seen.step_ms_after = median(ms for step, ms in times if step > begin + 1)
        seen.problem = "an event before a host was slowed down" if num_early else _problem(seen, index - 1)
    finally:
        login.trainkit("cancel", "--now", str(run.path))
        login.wait_until_idle()
    return seen


def _problem(seen: Seen, rank: int) -> str:
    """Return why the events of a slowed run are wrong, or an empty string if they are correct."""
    if not seen.events:
        return "no event"
    if any((event.get("rank"), event.get("host")) != (rank, seen.slowed_host) for event in seen.events):
        return "an event does not name the slowed host"
    later = seen.steps_later
    assert later is not None
    return f"the event comes {later} steps later" if later > MAX_STEPS_LATER else ""


def leave_alone(login: Login, num_steps: int, num_layers: int = 4) -> Seen:
    """Complete a run without a disturbance, and return the observations."""
    seen = Seen(load=os.getloadavg()[0])
    run = login.finish(start(login, num_steps, num_layers), timeout_s=PATIENCE_S + num_steps)
    seen.step_ms_before = median(1e3 * record["step_s"] for record in steps(run))
    seen.events = slowdowns(run)
    seen.problem = "a false alarm" if seen.events else ""
    return seen


def campaign(cluster: Cluster, folder: Path, args: argparse.Namespace) -> list[Seen]:
    """Execute all runs, and print a line for each run."""
    chance, found = random.Random(args.seed), []
    for number in range(args.slowed + args.runs):
        home = folder / str(number)
        home.mkdir()
        login = Login(cluster, home)
        if number < args.slowed:
            host, before = chance.randint(1, NUM_HOSTS), args.before + chance.randrange(10)
            seen = slow_one(login, host, cpus=args.cpus, before=before, num_layers=args.layers)
        else:
            seen = leave_alone(login, args.steps, args.layers)
        print(seen.line, flush=True)
        found.append(seen)
    return found


def main() -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="runs that nothing disturbs")
    parser.add_argument("--slowed", type=int, default=4, help="runs with a slowed-down host")
    parser.add_argument("--steps", type=int, default=300, help="steps of an undisturbed run")
    parser.add_argument("--before", type=int, default=80, help="steps before a host is slowed down")
    parser.add_argument("--cpus", type=float, default=0.1, help="CPUs of the slowed host")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model, for the length of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for what was seen, as JSON")
    args = parser.parse_args()
    cluster = up(owner=Pid.of(os.getpid()))
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = campaign(cluster, Path(folder), args)
    finally:
        cluster.down()
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(seen) for seen in found], indent=2) + "\n")
    wrong = [seen for seen in found if seen.problem]
    print(f"{len(found) - len(wrong)} of {len(found)} runs are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
