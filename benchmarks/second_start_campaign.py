"""Start, stop and copy runs at random times on a Slurm cluster; no run may train twice at the same time.

    python -m benchmarks.second_start_campaign --cases 60 --seed 0

Starts a cluster of four hosts on this machine (as root; see tools/slurm_cluster). Each case is a run whose
ranks count steps and save when they receive the stop signal. In each case, two or three events occur at
random moments: 0 to 3 s after the start, after the first step, or after the previous event. The events are:

- a second `sbatch` of the run's script;
- `scontrol requeue` of the run's first job, and `scancel` of its newest job;
- `trainkit requeue` and `trainkit cancel`;
- a process that holds the run's lock for up to 8 s;
- a copied run folder whose script is submitted.

Every case checks:

- Two attempts of the run never train at the same time.
- No rank is killed between the stop signal and its save, and each rank continues from its saved state.
- A cancelled run does not restart, and any other run finishes.

The benchmark prints one line per case; the same seed draws the same cases. The exit code is 0 if all cases
pass.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.on_slurm.login import BACKENDS, Login
from tools.slurm_cluster.cluster import up
from tools.slurm_cluster.processes import Pid
from trainkit.run.files import read_jsonl
from trainkit.run.record import read_job

NUM_STEPS = 60
STEP_S = 0.1
AT_ONCE = 2
OVER_S = 300.0
QUIET_S = 5.0
"""Seconds after the end of a run during which nothing may start."""
EVENTS = ("sbatch", "scontrol requeue", "requeue", "cancel", "scancel", "lock", "copy")
WEIGHTS = (4, 3, 4, 2, 1, 2, 1)
ENDS_RUN = ("cancel", "scancel")
OVER = ("finished", "cancelled", "stopped", "failed")

TRAINER = f"""
import fcntl, json, os, signal, sys, time
run, rank = os.environ["TRAINKIT_JOB_RUN_DIR"], os.environ["RANK"]
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda n, frame: asked.append(n))
os.makedirs(run + "/ranks", exist_ok=True)
attempt = int(os.environ["TRAINKIT_JOB_ATTEMPT"])
def log(event, step=None):
    line = {{"event": event, "step": step, "attempt": attempt, "time": time.time()}}
    with open(f"{{run}}/ranks/{{rank}}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
lock = open(f"{{run}}/ranks/{{rank}}.lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    log("overlap")
    sys.exit(78)
state = f"{{run}}/ranks/{{rank}}.state"
step = int(open(state).read()) if os.path.exists(state) else 0
log("start", step)
while step < {NUM_STEPS}:
    time.sleep({STEP_S})
    step += 1
    log("step", step)
    if asked:
        log("asked", step)
        time.sleep(0.5)
        with open(state + ".part", "w") as file:
            file.write(str(step))
        os.rename(state + ".part", state)
        log("saved", step)
        sys.exit(75)
with open(state + ".part", "w") as file:
    file.write(str(step))
os.rename(state + ".part", state)
log("done", step)
open(os.environ["TRAINKIT_JOB_DONE_FILE"], "w").close()
"""
HOLDS_LOCK = """
import fcntl, sys, time
lock = open(sys.argv[1], "a")
fcntl.flock(lock, fcntl.LOCK_EX)
time.sleep(float(sys.argv[2]))
"""


@dataclass(frozen=True)
class Case:
    """A run and its events."""

    number: int
    backend: str
    per: str
    nodes: int
    events: tuple[tuple[str, str, float], ...]
    """The events: name, the moment that the event follows, and the delay in seconds."""

    def __str__(self) -> str:
        shown = ", ".join(f"{event} {seconds:.1f} s after {anchor}" for event, anchor, seconds in self.events)
        return f"{self.backend}, a task a {self.per}, {self.nodes} hosts: {shown}"


def draw(num_cases: int, seed: int) -> list[Case]:
    """Draw the cases of a seed."""
    chance = random.Random(seed)
    cases = []
    for number in range(1, num_cases + 1):
        kinds = chance.choices(EVENTS, WEIGHTS, k=chance.choice((2, 2, 3)))
        anchors = [chance.choice(("submit", "step")), *["the event before"] * (len(kinds) - 1)]
        events = tuple(
            (kind, anchor, chance.uniform(0, 3)) for kind, anchor in zip(kinds, anchors, strict=True)
        )
        backend, per = chance.choice(BACKENDS), chance.choice(("gpu", "node"))
        cases.append(Case(number, backend, per, chance.choice((1, 2)), events))
    return cases


class Run:
    """A case that runs on the cluster."""

    def __init__(self, login: Login, case: Case) -> None:
        self.login, self.case = login, case
        self.wrong: list[str] = []
        self.notes: list[str] = []
        self.is_cancelled = False

    def fly(self) -> list[str]:
        """Run the case, and return all problems."""
        case, name = self.case, f"case-{self.case.number:03d}"
        self.run = self.login.submit(
            *("--name", name, "--backend", case.backend, "--per", case.per, "--nodes", str(case.nodes)),
            *("--gpus-per-node", "1", "--set", "resources.time='10'", "--", "python", "trainer.py"),
        )
        self.first_job = self.login.job_id(self.run)
        for kind, anchor, seconds in case.events:
            if anchor == "step":
                self._wait(lambda: any(self._lines("step")), "the first step")
            time.sleep(seconds)
            getattr(self, f"_{kind.replace(' ', '_')}")()
        self._wait(self._is_over, "the end of the run")
        self._judge()
        return self.wrong

    def _wait(self, condition: Any, what: str) -> None:
        deadline_s = time.monotonic() + OVER_S
        while not condition():
            if time.monotonic() > deadline_s:
                self.wrong.append(f"waited {OVER_S:g} s for {what}")
                self.login.run(["scancel", f"--name={self.run.name}"])
                return
            time.sleep(0.3)

    def _note(self, done: subprocess.CompletedProcess[str]) -> bool:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        self.notes.append(f"{done.returncode} {' '.join(last)[:80]}")
        return done.returncode == 0

    def _sbatch(self) -> None:
        self._note(self.login.run(["sbatch", str(self.run.attempt(1).script_file)]))

    def _copy(self) -> None:
        copy = self.login.folder / "copies" / self.run.name
        subprocess.run(["cp", "-r", str(self.run.path), str(copy)], check=False, capture_output=True)
        self._note(self.login.run(["sbatch", str(copy / "attempts" / "001" / "submit.sbatch")]))

    def _scontrol_requeue(self) -> None:
        self._note(self.login.run(["scontrol", "requeue", self.first_job]))

    def _requeue(self) -> None:
        self._note(self.login.trainkit("requeue", str(self.run.path)))

    def _cancel(self) -> None:
        if self._note(self.login.trainkit("cancel", str(self.run.path))):
            self.is_cancelled = True

    def _scancel(self) -> None:
        entry = read_job(self.run).newest
        assert entry is not None
        if self._note(self.login.run(["scancel", entry.job_id])):
            self.is_cancelled = True

    def _lock(self) -> None:
        seconds = random.Random(self.case.number).uniform(1, 8)
        subprocess.Popen([sys.executable, "-c", HOLDS_LOCK, str(self.run.lock_file), str(seconds)])
        self.notes.append(f"held for {seconds:.1f} s")

    def _jobs(self) -> list[str]:
        argv = ["squeue", "--noheader", f"--name={self.run.name}", "--format=%i"]
        return self.login.run(argv, check=True).stdout.split()

    def _is_over(self) -> bool:
        return self._jobs() == [] and self._state() in OVER and self._jobs() == []

    def _state(self) -> str:
        return str(self.login.status(self.run)["state"])

    def _lines(self, *events: str) -> Iterator[dict[str, Any]]:
        """Yield the log lines of all ranks that contain one of the given events, rank by rank."""
        for rank in range(self.case.nodes):
            for line in read_jsonl(self.run.path / "ranks" / f"{rank}.jsonl"):
                if not events or line["event"] in events:
                    yield {"rank": rank, **line}

    def _judge(self) -> None:
        over_s = time.time()
        time.sleep(QUIET_S)
        state, jobs = self._state(), self._jobs()
        if jobs or any(line["time"] > over_s for line in self._lines()):
            self.wrong.append(f"came back: jobs {jobs}")
        for rank in range(self.case.nodes):
            self._judge_rank(rank)
        done = {line["rank"] for line in self._lines("done")}
        is_done = len(done) == self.case.nodes
        if state == "finished" and not is_done:
            self.wrong.append(f"finished, but only ranks {sorted(done)} were done")
        if not self.is_cancelled and state != "finished":
            reason = self.login.status(self.run)["reason"]
            self.wrong.append(f"is {state} ({reason}), and nobody cancelled it")
        attempts = len(self.run.attempt_numbers())
        self.notes.append(f"{state} after {attempts} attempt{'s' if attempts > 1 else ''}")

    def _judge_rank(self, rank: int) -> None:
        saved, open_attempt, asked = 0, None, False
        for line in [line for line in self._lines() if line["rank"] == rank]:
            event, step, attempt = line["event"], line["step"], line["attempt"]
            if event == "overlap":
                self.wrong.append(
                    f"attempt {attempt} started rank {rank} while attempt {open_attempt} trained"
                )
            elif event == "start":
                if open_attempt is not None:
                    what = "asked to save and killed" if asked else "killed without a word"
                    self.wrong.append(f"rank {rank} of attempt {open_attempt} was {what}")
                if step != saved:
                    self.wrong.append(f"rank {rank} of attempt {attempt} began at {step}, {saved} was saved")
                open_attempt, asked = attempt, False
            elif event == "asked":
                asked = True
            elif event in ("saved", "done"):
                saved, open_attempt = step, None
        if open_attempt is not None:
            self.wrong.append(f"rank {rank} of attempt {open_attempt} never saved")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the cases to run")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="second-start-"))
    (folder / "copies").mkdir()
    counts: Counter[str] = Counter()
    num_wrong = 0
    cluster = up(owner=Pid.of(os.getpid()))
    try:
        login = Login(cluster, folder)
        login.script(TRAINER, "trainer.py")

        def fly(case: Case) -> tuple[Case, Run, list[str]]:
            run = Run(login, case)
            try:
                return case, run, run.fly()
            except Exception as error:
                return case, run, [*run.wrong, f"{type(error).__name__}: {error}"]

        cases = [case for case in draw(args.cases, args.seed) if not args.only or case.number in args.only]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for case, run, wrong in pool.map(fly, cases):
                counts.update(event for event, _, _ in case.events)
                num_wrong += bool(wrong)
                print(f"{case.number:3d} {'WRONG' if wrong else 'passes'}  {case}", flush=True)
                print(f"           {json.dumps(run.notes)}", flush=True)
                for text in wrong:
                    print(f"           WRONG: {text}", flush=True)
    finally:
        cluster.down()
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"{len(cases)} cases, {num_wrong} wrong ({shown}); {folder if num_wrong else 'nothing kept'}")
    if not num_wrong:
        shutil.rmtree(folder)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
