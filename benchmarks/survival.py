"""Check which disturbances a run survives on a Slurm cluster, for every way of starting a run.

    python -m benchmarks.survival
    python -m benchmarks.survival --only preempted crash

Starts a cluster of four hosts on this machine (as root; see tools/slurm_cluster), and disturbs runs on two
hosts, with both backends, and with one task per GPU or per node. The disturbances are:

- five preemptions, with and without a grace time of 10 s, after which Slurm requeues or cancels the job;
- four time limits, and scancel;
- a killed rank, and a dead host;
- an exception at step 37, a non-finite loss, and a failing import;
- a different number of nodes at each start, from 1 to 4, in twenty seeded runs.

Prints one row per case. The exit code is 0 if all cases pass.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.on_slurm import survival
from tests.on_slurm.login import BACKENDS, Login, settings, wait_for
from tests.on_slurm.survival import RESTART_S, Curve, hosts_of, wait_for_steps, wait_until_over
from tools.slurm_cluster.cluster import up
from tools.slurm_cluster.processes import Pid
from trainkit.run.events import read_metrics
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

KINDS = [(backend, per) for backend in BACKENDS for per in ("gpu", "node")]
NUM_STEPS = 300
NUM_PREEMPTIONS = 5
NUM_LIMITS = 4
NUM_VARIANTS = 20
END_S = 300.0
MOST_COLD_STARTS = 1.2
COLUMNS = ("what", "backend", "per", "restarts", "steps twice", "curve", "seconds", "passes")


class Table:
    """The rows of the result table; each row is printed when it is added."""

    def __init__(self, login: Login, expected: Curve) -> None:
        self.login = login
        self.expected = expected
        self.all_pass = True
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)

    def submit(self, what: str, *options: str, kinds: Iterable[tuple[str, str]] = KINDS) -> list[RunDir]:
        """Submit one run of each kind."""
        config = survival.survivor_config(self.login.folder, NUM_STEPS)
        return [
            self.login.submit(
                *("--backend", backend, "--per", per, "--name", f"{what}-{backend}-{per}", *options),
                config=config,
            )
            for backend, per in kinds
        ]

    def row(self, what: str, run: RunDir, seconds: str, passes: bool, curve: str | None = None) -> None:
        """Print the result of a run."""
        backend, per = run.name.split("-")[-2:]
        if curve is None:
            curve = "equal" if survival.curve(run) == self.expected else "OTHER"
        passes &= curve != "OTHER"
        self.all_pass &= passes
        actions = [event["action"] for event in survival.events_of(run, "requeue_decision")]
        restarts = ", ".join(f"{actions.count(one)} {one}" for one in dict.fromkeys(actions)) or "-"
        twice = str(len(survival.computed_twice(run)))
        words = (what, backend, per, restarts, twice, curve, seconds, "yes" if passes else "NO")
        print(f"| {' | '.join(words)} |", flush=True)

    def finish(self, run: RunDir) -> bool:
        """Return whether a run finishes without intervention."""
        return bool(wait_until_over(self.login, run, END_S)["state"] == "finished")


def first_steps(run: RunDir) -> list[float]:
    """Return the time at which each attempt completed its first step."""
    return [survival.time_of(event) for event in survival.events_of(run, "first_step")]


def comeback_s(run: RunDir) -> str:
    """Return the median time from the end of an attempt to the first step of the next attempt, in seconds."""
    ends = [survival.time_of(event) for event in survival.events_of(run, "stopped")]
    waits = [first - end for end, first in zip(ends, first_steps(run)[1:], strict=False)]
    return f"back in {statistics.median(waits):.1f}" if waits else "-"


def cold_start_s(run: RunDir) -> float:
    """Return the seconds from the start of the Slurm step in the batch script to the first training step."""
    return first_steps(run)[0] - survival.time_of(survival.events_of(run, "started")[0])


def preempted(table: Table) -> None:
    for mode in ("REQUEUE", "CANCEL"):
        for grace_s in (10, 0):
            what = f"preempted {NUM_PREEMPTIONS} times, {mode}, grace {grace_s} s"
            runs = table.submit(f"{mode.lower()}{grace_s}", "--partition", "low")
            survival.set_preemption(table.login.cluster, mode, grace_s)
            for attempt in range(1, NUM_PREEMPTIONS + 1):
                for run in runs:
                    wait_for_steps(run, attempt, 5, END_S)
                survival.preempt(table.login.cluster)
            for run in runs:
                finished = table.finish(run)
                none_twice = grace_s == 0 or not survival.computed_twice(run)
                all_restarted = len(run.attempt_numbers()) == NUM_PREEMPTIONS + 1
                table.row(what, run, comeback_s(run), finished and none_twice and all_restarted)


def time_limit(table: Table) -> None:
    # Start two runs at a time, because if all runs start together, the one-minute limit is too short for some
    # of them.
    for backend in BACKENDS:
        runs = table.submit(
            "limit",
            *settings("resources.time='1'", "requeue.grace_s=15"),
            kinds=[kind for kind in KINDS if kind[0] == backend],
        )
        for number in range(1, NUM_LIMITS + 1):
            # A run that started too slowly reaches its time limit without computing steps, so do not wait for
            # it.
            paused = [run for run in runs if has_begun(run, number)]
            for run in paused:
                survival.pause(survival.ranks_of(run).values())
            for run in paused:
                await_signal(run, number)
                survival.go_on(survival.ranks_of(run).values())
        for run in runs:
            table.row(f"{NUM_LIMITS} time limits", run, comeback_s(run), survived_limits(table, run))


def survived_limits(table: Table, run: RunDir) -> bool:
    """Return whether a run finishes after several time limits without computing any step twice."""
    finished = table.finish(run)
    causes = [event["cause"] for event in survival.events_of(run, "requeue_decision")]
    return finished and not survival.computed_twice(run) and causes[:NUM_LIMITS] == ["timeout"] * NUM_LIMITS


def has_begun(run: RunDir, attempt: int) -> bool:
    """Wait until an attempt has computed some steps; return False if the attempt ends before that."""

    def steps_or_over() -> bool:
        return len(survival.steps_of(run, attempt)) >= 5 or is_over()

    def is_over() -> bool:
        return survival.newest_attempt(run) > attempt or run.attempt(attempt).end_file.exists()

    wait_for(steps_or_over, f"5 steps of attempt {attempt}", END_S)
    return not is_over()


def await_signal(run: RunDir, count: int) -> None:
    """Wait until a run has received its stop signal number `count`."""
    wait_for(lambda: len(survival.events_of(run, "signal")) >= count, "the signal", RESTART_S)


def scancel(table: Table) -> None:
    runs = table.submit("scancel")
    for run in runs:
        wait_for_steps(run, 1, 5)
        table.login.run(["scancel", table.login.job_id(run)], check=True)
    table.login.wait_until_idle()
    time.sleep(10)
    for run in runs:
        end = wait_until_over(table.login, run, RESTART_S)
        saved = survival.saved_step(run) == survival.steps_of(run)[-1]
        alone = run.attempt_numbers() == [1] and table.login.jobs() == []
        table.row("scancel", run, "-", end["state"] == "stopped" and saved and alone, curve="stopped")


def crash(table: Table) -> None:
    for kind in KINDS:
        (run,) = table.submit("crash", kinds=[kind])
        wait_for_steps(run, 1, 25)
        killed_s = survival.kill_rank(run, 1)
        finished = table.finish(run)
        took_s, cold_s = first_steps(run)[1] - killed_s, cold_start_s(run)
        seconds = f"{took_s:.1f}; cold start {cold_s:.1f}"
        table.row("a rank killed", run, seconds, finished and took_s <= MOST_COLD_STARTS * cold_s)


def host_death(table: Table) -> None:
    for kind in KINDS:
        (run,) = table.submit("host", *settings("resources.spare_nodes=1"), kinds=[kind])
        wait_for_steps(run, 1, 25)
        # Use the second host of this run, because the job excludes a host that died earlier.
        cluster = table.login.cluster
        victim = cluster.hosts.index(read_json(run.attempt(1).rendezvous_file)["hosts"][1]) + 1
        cluster.kill_host(victim)
        died_s = time.time()
        finished = table.finish(run)
        cluster.restore()
        noticed_s = survival.time_of(survival.events_of(run, "stopped")[0]) - died_s
        took_s, cold_s = first_steps(run)[1] - died_s, cold_start_s(run)
        seconds = f"{took_s:.1f}; noticed after {noticed_s:.1f}, cold start {cold_s:.1f}"
        restarted = [event["action"] for event in survival.events_of(run, "requeue_decision")] == ["restart"]
        in_time = took_s <= noticed_s + MOST_COLD_STARTS * cold_s
        table.row("a host dead, one spare", run, seconds, finished and restarted and in_time)
        table.login.cluster.restore()


BUGS = """
import os, sys
if "trainkit.trainer" in sys.orig_argv and "BUG" in os.environ:
    from trainkit.trainer.progress import Progress
    from trainkit.trainer.causal_lm import CausalLM
    begin_step, nll_sum = Progress.begin_step, CausalLM.nll_sum
    now = 0
    def begin(progress, step):
        global now
        now = step
        begin_step(progress, step)
        if step == 37 and os.environ["BUG"] == "raise":
            raise ValueError("a bug of step 37")
    def loss(*args):
        return nll_sum(*args) * (float("nan") if now >= 37 and os.environ["BUG"] == "nan" else 1)
    Progress.begin_step, CausalLM.nll_sum = begin, loss
"""
"""A sitecustomize.py that breaks the training run at step 37 in the way that $BUG names."""


def bugs(table: Table) -> None:
    table.login.script(BUGS, "sitecustomize.py")
    table.login.script("import time\nimport no_such_module\n", "bad.py")
    verdicts = {"raise": "ValueError", "nan": "DivergedError", "import": "ModuleNotFoundError"}
    for bug, kind in verdicts.items():
        options = ["--", "python", "bad.py"] if bug == "import" else settings(f"launch.env.BUG={bug}")
        for run in table.submit(bug, *options):
            end = wait_until_over(table.login, run, END_S)
            count = len(run.attempt_numbers())
            passes = end["state"] == "failed" and end["verdict"]["type"] == kind and count <= 2
            table.row(f"{kind} every time", run, f"{count} attempts", passes, curve="failed")
    (table.login.folder / "sitecustomize.py").unlink()


@dataclass(frozen=True)
class Variant:
    """Describes how a run requests nodes, and how many of the four are free at each of its starts."""

    options: tuple[str, ...]
    free: tuple[int, ...]

    @classmethod
    def of(cls, seed: int) -> Variant:
        rng = random.Random(seed)
        options = [
            *("--nodes", rng.choice(("1-4", "1,2,4"))),
            *("--backend", rng.choice(BACKENDS)),
            *("--per", rng.choice(("gpu", "node"))),
            *("--partition", rng.choice(("high", "debug,high"))),  # debug has one host, so a job gets one
            *rng.choice(((), ("--time-min", "3"))),
        ]
        return cls((*options, "--time", "5"), tuple(rng.randint(1, 4) for _ in range(3)))

    def run(self, login: Login, config: Path, name: str) -> RunDir:
        """Return the finished run, which was requeued whenever the number of free nodes changed."""
        run: RunDir | None = None
        for attempt, free in enumerate(self.free, 1):
            with ExitStack() as others:
                if free < 4:
                    # Another job that waits for nodes of the run gets them before the requeued run does.
                    others.enter_context(
                        login.other_job("--partition=high", f"--nodes={4 - free}", waits=run is not None)
                    )
                if run is None:
                    run = login.submit(*self.options, "--name", name, config=config)
                else:
                    done = login.trainkit("requeue", str(run.path))
                    assert done.returncode == 0, done.stderr
                wait_for_steps(run, attempt, 5)
                assert len(hosts_of(run, attempt)) in {1, 2, 4} & {*range(free + 1)}, (self, attempt)
        assert run is not None
        assert wait_until_over(login, run, RESTART_S)["state"] == "finished", login.logs_and_attempts(run)
        return run


def sizes(table: Table) -> None:
    """Check runs that get a different number of nodes at each start, requested in several ways."""
    folder = table.login.folder
    config = survival.range_config(folder)
    expected = survival.losses_on_one(Path(tempfile.mkdtemp(dir=folder)), config)
    for seed in range(NUM_VARIANTS):
        variant, begin_s = Variant.of(seed), time.monotonic()
        backend, per = variant.options[3], variant.options[5]
        try:
            run = variant.run(table.login, config, f"sizes{seed}-{backend}-{per}")
        except AssertionError as error:
            print(f"variant {seed}, {variant}: {error}", file=sys.stderr)
            table.all_pass = False
            continue
        losses = [record["loss"] for record in read_metrics(run)]
        pairs = zip(losses, expected, strict=False)
        is_equal = len(losses) == len(expected) and all(math.isclose(*pair, rel_tol=1e-5) for pair in pairs)
        curve = "within 1e-5" if is_equal else "OTHER"
        got = "-".join(str(len(hosts_of(run, number))) for number in run.attempt_numbers())
        what = f"{got} of {'-'.join(map(str, variant.free))} hosts, {' '.join(variant.options[:2])}"
        passes = not survival.computed_twice(run)
        table.row(what, run, f"{time.monotonic() - begin_s:.0f}", passes, curve)
    (folder / "sitecustomize.py").unlink()


SCENARIOS: dict[str, Callable[[Table], None]] = {
    "preempted": preempted,
    "time-limit": time_limit,
    "scancel": scancel,
    "crash": crash,
    "host-death": host_death,
    "bugs": bugs,
    "sizes": sizes,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="survival-"))
    cluster = up(owner=Pid.of(os.getpid()))
    try:
        login = Login(cluster, folder)
        config = survival.survivor_config(folder, NUM_STEPS)
        whole = login.submit("--backend", "local", "--name", "whole", config=config)
        wait_until_over(login, whole, END_S)
        table = Table(login, survival.curve(whole))
        for name in args.only:
            SCENARIOS[name](table)
    finally:
        cluster.down()
    if table.all_pass:
        shutil.rmtree(folder)
    return 0 if table.all_pass else 1


if __name__ == "__main__":
    sys.exit(main())
