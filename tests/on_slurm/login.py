"""Provides a person's folder on the login node of a cluster, where tests type `trainkit`."""

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.support import programs
from tests.support.json_outputs import checked
from tools.slurm_cluster.cluster import Cluster
from trainkit.run.files import read_json, read_jsonl
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

T = TypeVar("T")

CONFIG = """
name: small
device: cpu
requeue: {grace_s: 20}
"""
LISTENS = """
import os, signal, sys, time
from concurrent.futures import ProcessPoolExecutor
workers = ProcessPoolExecutor(1)
workers.submit(abs, -1).result()
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
    signal.signal(number, lambda n, f: asked.append(signal.Signals(n).name))
attempt, rank, size = (os.environ[name] for name in ("TRAINKIT_JOB_ATTEMPT", "RANK", "WORLD_SIZE"))
print("attempt", attempt, "rank", rank, "of", size, flush=True)
while not asked:
    time.sleep(0.02)
print("asked by", asked[0], flush=True)
for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)
time.sleep(0.5)
assert workers.submit(abs, -2).result() == 2
sys.exit(75)
"""
"""A trainer that trains nothing. It prints when it gets a stop signal, and when it has saved.

A second signal, or the end of its worker, ends it while it saves.
"""

DIES_ONCE = (
    """
import os, signal
if (os.environ["TRAINKIT_JOB_ATTEMPT"], os.environ["RANK"]) == ("1", "1"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    + LISTENS
)
"""A trainer like `LISTENS`, but rank 1 of its first attempt is killed."""

DEAF = """
import signal, time
for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""
TRAINKIT = (sys.executable, "-m", "trainkit")
HOLD = ("--set", "resources.extra.hold=true")
ON_TWO_HOSTS = ("--nodes", "2", "--gpus-per-node", "1")
BACKENDS = ("sbatch", "submitit")
"""A test that does the same with both backends submits two jobs at the same time."""
TIMEOUT_S = 240.0
POLL_S = 0.05
ASK_SLURM_S = 0.3
"""Seconds between two queries of Slurm. A query takes a tenth of a core at this rate."""
ASK_TRAINKIT_S = 1.0
"""Seconds between two commands of trainkit. A command takes a whole core for 0.2 s."""


def wait_for(
    condition: Callable[[], T], what: str, timeout_s: float = TIMEOUT_S, poll_s: float = POLL_S
) -> T:
    """Wait until a condition is true, and return its value."""
    found: T = programs.wait_for(condition, timeout_s, what, poll_s)
    return found


def settings(*pairs: str) -> list[str]:
    """Return the ``--set`` options for these settings."""
    return [word for pair in pairs for word in ("--set", pair)]


def log_of(run: RunDir, rank: int = 0, attempt: int = 1) -> str:
    """Return the output of a rank so far."""
    log = run.attempt(attempt).rank_log(rank)
    return log.read_text() if log.exists() else ""


def node_logs(run: RunDir, attempt: int = 1) -> str:
    """Return the output of all agents so far."""
    return "\n".join(path.read_text() for path in sorted(run.attempt(attempt).logs_dir.glob("node-*.log")))


def agents_of(run: RunDir, attempt: int = 1) -> list[tuple[int, str]]:
    """Return the (node rank, host) of every agent by node rank, as the agents printed them."""
    found = re.findall(r"^node (\d+) is (\S+);", node_logs(run, attempt), re.MULTILINE)
    return [(int(node), host) for node, host in found]


def events(run: RunDir, attempt: int | None = None) -> list[str]:
    """Return the names of the events of a run, or of one attempt, in order."""
    return [
        record["event"] for record in read_jsonl(run.events_file) if attempt in (None, record.get("attempt"))
    ]


class Login:
    """A folder with a config and a separate list of runs."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.config = folder / "small.yaml"
        self.config.write_text(CONFIG)
        (folder / "listens.py").write_text(LISTENS)
        # The tests must not depend on the start files of the user's shell.
        home = folder / ".home"
        home.mkdir(exist_ok=True)
        self.env = {
            "HOME": str(home),
            "XDG_STATE_HOME": str(folder / ".state"),
            "XDG_CONFIG_HOME": str(folder / ".config"),
        }

    def script(self, code: str, name: str = "script.py") -> str:
        """Write a Python script to the folder, and return its name."""
        (self.folder / name).write_text(textwrap.dedent(code))
        return name

    def run(
        self, argv: Sequence[str], timeout_s: float = TIMEOUT_S, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, in the folder."""
        env = {**self.env, **more.pop("env", {})}
        return self.cluster.run(argv, timeout_s=timeout_s, cwd=self.folder, env=env, **more)

    def trainkit(self, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.run([*TRAINKIT, *args], **more)

    def start(self, argv: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """Start a command that runs in the background of the test."""
        given: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            **more,
        }
        environ = {**self.cluster.environ, **self.env}
        return subprocess.Popen(list(argv), cwd=self.folder, env=environ, **given)

    @contextmanager
    def port_held(self, host: int, port: int) -> Iterator[None]:
        """Let a process of another job listen on a port of a host until its stdin is closed."""
        listen = (
            f"import socket, sys; s = socket.create_server(('', {port})); "
            "print('up', flush=True); sys.stdin.read()"
        )
        argv = self.cluster.command_line([sys.executable, "-c", listen], host, "/")
        holder = self.start(argv, stdin=subprocess.PIPE)
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "up\n"
            yield
        finally:
            holder.communicate()

    @contextmanager
    def other_job(self, *options: str, waits: bool = False) -> Iterator[None]:
        """Submit a job of another user, for five hours by default. With `waits`, the job may stay pending."""
        sleeps = ["--exclusive", "--output=/dev/null", "--parsable", "--wrap=sleep 600"]
        job = self.run(["sbatch", "--time=300", *options, *sleeps], check=True).stdout.strip()
        self.cluster.wait_for_job(job, ("RUNNING", "PENDING") if waits else "RUNNING")
        try:
            yield
        finally:
            self.run(["scancel", job], check=True)

    def submit(self, *args: str, config: Path | None = None, **more: Any) -> RunDir:
        """Submit a run with `trainkit submit`, and return it."""
        done = self.trainkit("submit", str(config or self.config), "--json", *args, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return RunDir(checked("submit", done.stdout)["run_dir"])

    def submit_listeners(self, *args: str, num_ranks: int = 2) -> RunDir:
        """Submit a run whose ranks only wait for signals, and return when all ranks listen."""
        run = self.submit(*args, "--", "python", "listens.py")
        for rank in range(num_ranks):
            self.wait_for_log(run, f"attempt 1 rank {rank}", rank)
        return run

    def wait_for_log(self, run: RunDir, text: str, rank: int = 0, attempt: int = 1) -> str:
        """Wait until the log of a rank contains a text."""
        wait_for(lambda: text in log_of(run, rank, attempt), f"{text!r} of rank {rank}, attempt {attempt}")
        return log_of(run, rank, attempt)

    def wait_for_end(self, run: RunDir, attempt: int = 1, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Wait until an attempt has ended, and return its end."""
        file = run.attempt(attempt).end_file
        try:
            wait_for(file.exists, f"the end of attempt {attempt}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.logs_and_attempts(run)}") from None
        end: dict[str, Any] = read_json(file)
        return end

    def finish(self, run: RunDir, timeout_s: float = TIMEOUT_S) -> RunDir:
        """Wait until a run has finished successfully."""
        end = self.wait_for_end(run, timeout_s=timeout_s)
        assert end["state"] == "finished", self.logs_and_attempts(run)
        return run

    def job_id(self, run: RunDir) -> str:
        """Return the job of a run's newest attempt."""
        entry = read_job(run).newest
        assert entry is not None
        return entry.job_id

    def status(self, run: RunDir) -> dict[str, Any]:
        """Return the status of a run from `trainkit status`."""
        done = self.trainkit("status", str(run.path), "--json")
        assert done.returncode == 0, done.stderr
        value: dict[str, Any] = json.loads(done.stdout)
        return value

    def wait_for_job(self, run: RunDir, *states: str, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Wait until the job of a run has one of these states, and return Slurm's view of it."""
        job_id = self.job_id(run)
        wait_for(
            lambda: self.cluster.job(job_id)["JobState"] in states, f"job {job_id}", timeout_s, ASK_SLURM_S
        )
        return self.cluster.job(job_id)

    def wait_until_idle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the cluster has no job."""
        wait_for(lambda: self.jobs() == [], "an empty queue", timeout_s, ASK_SLURM_S)

    def jobs(self) -> list[str]:
        """Return the jobs in Slurm's queue."""
        return self.run(["squeue", "--noheader", "--format=%i"], check=True).stdout.split()

    @property
    def slurm_version(self) -> str:
        """Return the version of the cluster's Slurm, such as ``26.05``."""
        printed = self.run(["sbatch", "--version"], check=True).stdout
        return ".".join(printed.split()[1].split(".")[:2])

    def logs_and_attempts(self, run: RunDir) -> str:
        """Return all logs and attempts of a run, for the message of a failed test."""
        logs = sorted(run.attempts_dir.glob("*/logs/*.log"))
        texts = [f"--- {path}\n{path.read_text(errors='replace')}" for path in logs]
        return "\n".join([str(read_job(run).attempts), *texts])
