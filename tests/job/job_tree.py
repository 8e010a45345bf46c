"""Real process trees with small scripts as workers."""

from dataclasses import dataclass
from typing import Any

from tests.support.programs import wait_for
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_json, read_jsonl
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.rundir import RunDir

PREAMBLE = """
import json, os, signal, sys, time
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TRAINKIT_JOB_ATTEMPT"])
RUN_DIR = os.environ["TRAINKIT_JOB_RUN_DIR"]
asked = []
def listen():
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda n, f: asked.append(signal.Signals(n).name))
def ready():
    with open(f"{RUN_DIR}/ready.{ATTEMPT}.{RANK}.part", "w") as f:
        f.write(str(os.getpid()))
    os.rename(f.name, f.name[:-5])
def save_when_asked():
    listen(); ready()
    while not asked:
        time.sleep(0.02)
    print("asked by", asked[0], flush=True)
    sys.exit(75)
"""


@dataclass
class Job:
    """A run that a test has started."""

    run: RunDir
    entry: AttemptRecord
    plan: LaunchPlan

    def worker_pids(self, attempt: int = 1) -> list[int]:
        """The pids of an attempt's workers, when all have said that they are ready."""
        files = [self.run.path / f"ready.{attempt}.{rank}" for rank in range(self.plan.world_size)]
        wait_for(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def wait(self, timeout_s: float = 120.0) -> None:
        wait_for(lambda: read_job(self.run).newest.alive() is False, timeout_s)

    def end(self, attempt: int = 1) -> dict[str, Any]:
        self.wait()
        return read_json(self.run.attempt(attempt).end_file)

    def events(self) -> list[str]:
        return [event["event"] for event in read_jsonl(self.run.events_file)]

    def log(self, rank: int = 0, attempt: int = 1) -> str:
        return self.run.attempt(attempt).rank_log(rank).read_text()
