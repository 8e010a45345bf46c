"""Measure the speed of a run on 256 hosts, and the load that the run puts on slurmctld and the file system.

    python -m benchmarks.cluster_256               # 256 hosts, about 8 minutes and 8 GB of memory
    python -m benchmarks.cluster_256 --hosts 8

Starts a Slurm cluster of 256 hosts on this machine (as root; see tools/slurm_cluster) with one rank on each
host. Each rank waits for a signal or a file. The benchmark measures:

- the start of the run, an idle minute, and the end of the run;
- `status` and `watch`;
- the loss of a host, after which the run is requeued or continues on the remaining hosts;
- the cancellation of the run.

The RPC counts are from `sdiag`, without the RPCs of Slurm's own daemons. fanotify counts all opens of files
and folders in the run folder, by any process on any host. The exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import shutil
import stat
import struct
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

from benchmarks.watch_cost import cpu_s, watched
from tests.on_slurm.login import Login, wait_for
from tools.slurm_cluster.cluster import Cluster, up
from tools.slurm_cluster.processes import Pid
from trainkit.capabilities.health.samples import health_dir
from trainkit.run.rundir import RunDir

JOINS = """
import os, _signal as signal, sys, time  # the public module takes half of the start of Python
print(time.time(), flush=True)
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda *_: asked.append(number))
while not asked and not os.path.exists(sys.argv[1]):
    time.sleep(1)
sys.exit(75 if asked else 0)
"""
"""The code of a rank that does no work: it prints its start time, and waits for a stop signal or a file."""
AT_FDCWD = -100
END = "end"
CONFIG = """\
name: joins
device: cpu
resources: {gpus_per_node: 1, cpus_per_gpu: 1, mem: 1G, time: "60"}
requeue: {grace_s: 20}
"""
DAEMONS = frozenset(
    {
        "MESSAGE_NODE_REGISTRATION_STATUS",
        "MESSAGE_EPILOG_COMPLETE",
        "REQUEST_COMPLETE_BATCH_SCRIPT",
        "REQUEST_COMPLETE_PROLOG",
        "REQUEST_CONTROL_STATUS",
        "REQUEST_STEP_COMPLETE",
        "REQUEST_PERSIST_INIT",
        "ACCOUNTING_UPDATE_MSG",
        "REQUEST_STATS_INFO",
    }
)
"""RPCs that slurmd, slurmstepd and slurmdbd send on their own, and the RPC with which this program queries
the counters."""
RANK = [sys.executable, "-I", "-S", "joins.py"]
JOINED_S, FOUND_S = 25.0, 30.0
RPCS_PER_MINUTE = LISTINGS_PER_S = SUPERVISOR_PERCENT = 2.0
PARTS = ("start", "shrink", "requeue")
PATIENCE_S = 300.0


@dataclass
class Table:
    """The rows of the result table; each row is printed when it is added."""

    num_hosts: int
    missed: list[str] = field(default_factory=list)
    """The goals that were missed."""

    def __post_init__(self) -> None:
        print("| what | value | goal | |\n|---|---|---|---|", flush=True)

    def row(self, what: str, value: float, unit: str, goal: float | None = None, more: str = "") -> None:
        shown = f"{value:.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}"
        print(f"| {what} | {shown} | {'' if goal is None else f'{goal:g}'} | {more} |", flush=True)
        if goal is not None and value > goal:
            self.missed.append(f"{what}: {shown}, goal {goal:g}")


class Opens:
    """Counts how often processes on all hosts, except this process, open files below a folder.

    The folder is on a separate file system, so that fanotify reports no other accesses on this machine.
    """

    CLOEXEC, UNLIMITED_QUEUE = 0x1, 0x10
    ADD, FILESYSTEM = 0x1, 0x100
    OPEN, ON_DIR = 0x20, 0x40000000
    EVENT = struct.Struct("=IBBHQii")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reset()

    def __enter__(self) -> Opens:
        self.folder.mkdir()
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.fanotify_init(self.CLOEXEC | self.UNLIMITED_QUEUE, os.O_RDONLY | os.O_LARGEFILE)
        mask, here = ctypes.c_uint64(self.OPEN | self.ON_DIR), bytes(self.folder)
        if self._fd < 0 or libc.fanotify_mark(self._fd, self.ADD | self.FILESYSTEM, mask, AT_FDCWD, here):
            raise OSError(ctypes.get_errno(), "cannot count what is opened")
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "runs" / END).touch()
        self._thread.join()
        os.close(self._fd)
        shutil.rmtree(self.folder)

    def _read(self) -> None:
        runs = f"{self.folder}/runs/"
        while True:
            data = os.read(self._fd, 1 << 16)
            while data:
                length, _, _, _, _, fd, pid = self.EVENT.unpack_from(data)
                data = data[length:]
                if fd >= 0:
                    path = str(Path(f"/proc/self/fd/{fd}").readlink())
                    is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
                    os.close(fd)
                    if path == f"{runs}{END}":
                        return
                    if pid == os.getpid() or not path.startswith(runs):
                        continue
                    # Paths that differ only in the numbers of hosts and ranks are grouped.
                    kind = re.sub(r"\d+", "N", path)
                    (self.listed if is_folder else self.opened)[kind] += 1

    def reset(self) -> None:
        self.listed, self.opened = Counter[str](), Counter[str]()

    @staticmethod
    def kinds(run: RunDir, counts: Counter[str]) -> str:
        """Return the most frequently opened paths, relative to the run folder."""
        prefix = re.sub(r"\d+", "N", f"{run.path}/")
        return words(Counter({f"`{path.removeprefix(prefix)}`": count for path, count in counts.items()}))


@dataclass
class Job:
    """A run of the benchmark, and its processes."""

    login: Login
    run: RunDir
    num_hosts: int

    def joined_s(self, attempt: int) -> list[float]:
        """Wait for all ranks of an attempt; return when each started, in seconds since the epoch."""
        found: dict[int, float] = {}

        def all_have() -> bool:
            for rank in set(range(self.num_hosts)) - set(found):
                log = self.run.attempt(attempt).rank_log(rank)
                if log.exists() and (text := log.read_text()):
                    found[rank] = float(text.split()[0])
            if (ended := self.run.attempt(attempt)).end_file.exists():
                lines = ended.supervisor_log.read_text().splitlines()
                # srun prints a line that ends with "Killed" for each rank that is killed when the attempt
                # ends.
                kept = "\n".join(line for line in lines if not line.endswith(": Killed"))
                raise AssertionError(
                    f"{len(found)} ranks, then\n{kept[-4000:]}\n{ended.end_file.read_text()}"
                )
            return len(found) == self.num_hosts

        wait_for(all_have, f"{self.num_hosts} ranks of attempt {attempt}", PATIENCE_S, poll_s=1.0)
        return sorted(found.values())

    def started_s(self) -> float:
        """Return when Slurm started the job of the run, in seconds since the epoch."""
        started = rf"^\[(\S+)\] .*(?:Started|Allocate) JobId={self.login.job_id(self.run)} "
        found = re.search(started, self.login.cluster.log("slurmctld"), re.MULTILINE)
        assert found is not None
        return datetime.fromisoformat(found[1]).timestamp()

    def processes(self, module: str) -> list[int]:
        """Return the pids, on this machine, of the run's processes that execute a module."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # the process has exited
                words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
                if (
                    "-m" in words[:6]
                    and words[words.index("-m") + 1] == module
                    and str(self.run.path) in words
                ):
                    found.append(int(entry.name))
        return found

    def end_s(self, attempt: int) -> float:
        """Wait until the end of an attempt is recorded; return its time in seconds since the epoch."""
        file = self.run.attempt(attempt).end_file
        wait_for(file.exists, f"the end of attempt {attempt}", PATIENCE_S)
        return file.stat().st_mtime


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB, including shared memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def new_login(cluster: Cluster, folder: Path) -> Login:
    """Return a folder on the login node with the rank's script."""
    login = Login(cluster, folder)
    login.config.write_text(CONFIG)
    login.script(JOINS, "joins.py")
    return login


def available_gb() -> float:
    """Return the available memory of this machine in GB."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) / 1e6


def rpcs(cluster: Cluster) -> Counter[str]:
    """Return the number of RPCs since the previous call, by type, without the RPCs of Slurm's own daemons."""
    shown = cluster.run(["sdiag"], check=True).stdout
    cluster.run(["sdiag", "--reset"], check=True)
    by_type = shown.partition("by message type")[2].partition("by user")[0]
    counts = {name: int(count) for name, count in re.findall(r"(\w+) +\( *\d+\) count:(\d+)", by_type)}
    return Counter({name: count for name, count in counts.items() if name not in DAEMONS})


def words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common(4))


def start(login: Login, table: Table, opens: Opens, what: str, nodes: str) -> Job:
    """Submit a run and wait until all ranks have started."""
    opens.reset()
    rpcs(login.cluster)
    began = time.time()
    run = login.submit("--nodes", nodes, "--", *RANK, str(login.folder / "go"))
    took_s = time.time() - began
    job = Job(login, run, table.num_hosts)
    joined = job.joined_s(1)
    table.row(f"{what}: submit", took_s, "s")
    table.row(f"{what}: job's start until all have joined", joined[-1] - job.started_s(), "s", JOINED_S)
    table.row(f"{what}: first to last rank", joined[-1] - joined[0], "s")
    return job


def count(job: Job, table: Table, opens: Opens) -> None:
    """Print the RPCs and the file opens that have been counted."""
    asked = rpcs(job.login.cluster)
    table.row("until then: RPCs", asked.total(), "", more=words(asked))
    table.row("until then: listings", opens.listed.total(), "", more=opens.kinds(job.run, opens.listed))
    table.row("until then: opens", opens.opened.total(), "", more=opens.kinds(job.run, opens.opened))


def idle(job: Job, table: Table, opens: Opens, seconds: float) -> None:
    """Measure the load that an idle run causes."""
    [supervisor], agents = job.processes("trainkit.job.supervisor"), job.processes("trainkit.job.node.agent")
    before = {pid: cpu_s(pid) for pid in (supervisor, *agents)}
    opens.reset()
    count_rpcs(job, table, "RPCs a minute", seconds)
    listed, opened = Counter(opens.listed), Counter(opens.opened)
    used = {pid: (cpu_s(pid) - before[pid]) / seconds for pid in before}
    table.row("listings a second", listed.total() / seconds, "", LISTINGS_PER_S, opens.kinds(job.run, listed))
    table.row("opens a second", opened.total() / seconds, "", more=opens.kinds(job.run, opened))
    table.row("supervisor, of a core", 100 * used.pop(supervisor), "%", SUPERVISOR_PERCENT)
    table.row("supervisor, memory", rss_mb(supervisor), "MB")
    table.row("an agent, of a core", 100 * sum(used.values()) / job.num_hosts, "%", more="with its listener")
    table.row("an agent, memory", max(map(rss_mb, agents)), "MB")
    samples = [file.stat().st_mtime for file in health_dir(job.run).glob("*.jsonl")]
    table.row("hosts with a sample", len(samples), "")
    table.row("oldest last sample", time.time() - min(samples, default=0), "s")


def count_rpcs(job: Job, table: Table, what: str, seconds: float) -> None:
    """Count the RPCs of an idle period."""
    rpcs(job.login.cluster)
    time.sleep(seconds)
    asked = rpcs(job.login.cluster)
    table.row(what, 60 * asked.total() / seconds, "", RPCS_PER_MINUTE, words(asked))


def look(job: Job, table: Table, seconds: float) -> None:
    """Measure the cost of `status` and `watch`."""
    rpcs(job.login.cluster)
    began = time.monotonic()
    job.login.trainkit("status", str(job.run.path), check=True)
    table.row("status", time.monotonic() - began, "s", more=words(rpcs(job.login.cluster)))
    environ = {**job.login.cluster.environ, **job.login.env}
    first_s, used_s = watched(job.run, environ, seconds)
    asked = rpcs(job.login.cluster)
    table.row("watch, first screen", first_s, "s")
    table.row("watch, of a core", 100 * used_s / seconds, "%")
    table.row("watch, RPCs a minute", 60 * asked.total() / seconds, "", more=words(asked))


def finish(job: Job, table: Table) -> None:
    """Let all ranks exit, and measure the time until the end of the run is recorded."""
    began = time.time()
    (job.login.folder / "go").touch()
    table.row("end recorded after the ranks may end", job.end_s(1) - began, "s")
    job.login.wait_until_idle()
    (job.login.folder / "go").unlink()


def lose_host(job: Job, table: Table, what: str, index: int) -> None:
    """Power off a host, and wait until the run is requeued or continues without the host."""
    began_s = time.time()
    job.login.cluster.kill_host(index)
    found_s = job.end_s(1)
    table.row(f"{what}: killed host found", found_s - began_s, "s", FOUND_S)
    if what == "requeue":
        # The fan-out tree of srun waits a minute for the powered-off host.
        job.login.wait_for_job(job.run, "PENDING", "CONFIGURING", "RUNNING", timeout_s=PATIENCE_S)
        table.row(f"{what}: found until the job is in the queue", time.time() - found_s, "s")
    else:
        joined = Job(job.login, job.run, job.num_hosts - 1).joined_s(2)
        table.row(f"{what}: found until all others have joined", joined[-1] - found_s, "s", JOINED_S)


def cancel(job: Job, table: Table, attempt: int) -> None:
    """Cancel a run, and wait until its end is recorded."""
    rpcs(job.login.cluster)
    began = time.time()
    job.login.trainkit("cancel", str(job.run.path), check=True)
    took_s = time.time() - began
    table.row("cancel: the command", took_s, "s", more=words(rpcs(job.login.cluster)))
    table.row("cancel: end recorded", job.end_s(attempt) - began, "s")


def measure(cluster: Cluster, args: argparse.Namespace, before_gb: float) -> list[str]:
    """Run all measurements and print the table; return the missed goals."""
    num_hosts = len(cluster.hosts)
    chance = partial(random.Random(args.seed).randint, 2, num_hosts)  # the supervisor runs on the first host
    with Opens(cluster.folder / "home") as opens:
        table, login = Table(num_hosts), new_login(cluster, opens.folder)
        if "start" in args.parts:
            job = start(login, table, opens, "start", f"{num_hosts}")
            count(job, table, opens)
            table.row("memory of all hosts", before_gb - available_gb(), "GB")
            idle(job, table, opens, args.seconds)
            look(job, table, args.seconds / 2)
            finish(job, table)
        if "shrink" in args.parts:
            job, killed = start(login, table, opens, "shrink", f"{num_hosts * 3 // 4}-{num_hosts}"), chance()
            # If a run has a range of nodes, one of its hosts queries slurmctld once a minute.
            count_rpcs(job, table, "shrink: RPCs a minute", seconds=60)
            lose_host(job, table, "shrink", killed)
            cancel(job, table, attempt=2)
            cluster.revive_host(killed)
        if "requeue" in args.parts:
            cluster.wait_for_nodes([*cluster.state.hosts()], "idle", PATIENCE_S)
            job = start(login, table, opens, "requeue", f"{num_hosts}")
            lose_host(job, table, "requeue", chance())
    return table.missed


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=256)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seed", type=int, default=0, help="seed that draws the hosts to power off")
    parser.add_argument("--seconds", type=float, default=60, help="duration of the idle run in seconds")
    args = parser.parse_args()
    before_gb = available_gb()
    # All 256 hosts share two cores. With the test cluster's MessageTimeout of 5 s (Slurm's default is 10 s),
    # Slurm aborts a job start if one host replies late.
    options = {"MessageTimeout": "30"}
    cluster = up(owner=Pid.of(os.getpid()), num_hosts=args.hosts, options=options)
    try:
        print(f"{args.hosts} hosts after {cluster.state.up_s:.1f} s", file=sys.stderr)
        missed = measure(cluster, args, before_gb)
    finally:
        cluster.down()
    for problem in missed:
        print(problem, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
