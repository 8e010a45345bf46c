"""Start several process groups repeatedly on the same hosts at the same time, and count port clashes.

    make cluster                            # or your own cluster
    python benchmarks/port_clashes.py --starts 50 --seed 0

Each start consists of two jobs and two steps of a third job, all at the same time on the same two hosts. Rank
0 of each process group listens on its assigned port, and the other rank connects. All ranks wait until the
last of the four groups has connected. The seed selects half of the ports that ranks may use, and the
benchmark occupies these ports, so that a port used without a probe clashes in half of the cases. The exit
code is 1 if a port clashed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainkit.cli import main
from trainkit.job.node.rendezvous import HIGHEST_PORT, LOWEST_PORT, ephemeral_range
from trainkit.launch import plan_run
from trainkit.plan.workload import Workload
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

CONFIG = """\
name: meet
device: cpu
train: {device_batch_size: 1, global_batch_size: 2}
"""
MEET = """\
import os, socket, sys, time
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    server = socket.create_server(("", place[1]), reuse_port=False)
    peer = server.accept()[0]
else:
    for _ in range(600):
        try:
            peer = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
me = os.environ["TRAINKIT_JOB_RUN_DIR"].encode()
peer.sendall(me)
other = peer.recv(len(me), socket.MSG_WAITALL)
if other != me:
    sys.exit(f"{other} answered at {place}, not {me}")
print("met at", *place, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
SHAPE = ["--nodes", "2", "--gpus-per-node", "1"]
LIMIT_S = 120.0
SHARE_TAKEN = 0.5


def trainkit(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("trainkit")), *arguments]


def call(argv: list[str], cwd: Path) -> str:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{argv}: {done.stdout}{done.stderr}")
    return done.stdout


def take_ports(seed: int) -> None:
    """Bind some of the ports that ranks may use, and keep them bound, as a task on each host."""
    low, high = ephemeral_range()
    ports = [port for port in range(LOWEST_PORT, HIGHEST_PORT) if not low <= port <= high]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count = min(int(SHARE_TAKEN * len(ports)), most - 100)
    taken = []
    for port in random.Random(seed).sample(ports, count):
        try:
            taken.append(socket.create_server(("", port)))
        except OSError:
            continue  # another process uses the port
    print(f"{socket.gethostname()}: {len(taken)} of {len(ports)} ports are taken", flush=True)
    time.sleep(86_400)


def run_as_rank(meet: str, go: str, arguments: list[str]) -> int:
    """Run `trainkit` with the rendezvous test as the trainer, because `trainkit run` accepts no COMMAND."""
    real = plan_run.plan_run

    def plan_with_meeting(*args: object, **options: object) -> object:
        plan = real(*args, **options)  # type: ignore[arg-type]
        return dataclasses.replace(plan, workload=Workload((sys.executable, meet, go)))

    plan_run.plan_run = plan_with_meeting  # type: ignore[assignment]
    return main.main(arguments)


def start(folder: Path, number: int, hosts: list[str]) -> list[RunDir]:
    """Start two jobs, and two steps of a third job, on the same hosts; return the four run folders."""
    go = str(folder / f"go-{number}")
    names = [f"{kind}-{number}-{index}" for kind in ("job", "step") for index in (1, 2)]
    runs = [RunDir(folder / "runs" / name) for name in names]
    mine = [
        sys.executable,
        __file__,
        "--as-rank",
        str(folder / "meet.py"),
        go,
        "run",
        str(folder / "meet.yaml"),
    ]
    step = f"srun --overlap --ntasks=2 --nodes=2 {' '.join(mine)} --run-dir"
    # Slurm itself occasionally fails to start one of two steps ("aborted before step completely launched").
    steps = [
        f"until {step} {run.path} > {run.path}.out 2>&1 || [[ -e {run.path} ]]; do sleep 1; done &"
        for run in runs[2:]
    ]
    script = folder / f"steps-{number}.sh"
    script.write_text("#!/bin/bash\n" + "\n".join([*steps, "wait"]) + "\n")
    where = f"--nodelist={','.join(hosts)}"
    options = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--time=10", where, "--output=/dev/null"]
    call(["sbatch", "--parsable", *options, str(script)], folder)
    for run in runs[:2]:
        setting = ["--set", f'resources.extra.nodelist="{",".join(hosts)}"', "--time", "10"]
        command = ["--run-dir", str(run.path), "--", sys.executable, str(folder / "meet.py"), go]
        call(trainkit("submit", str(folder / "meet.yaml"), *SHAPE, *setting, *command), folder)
    return runs


def has_met(run: RunDir) -> bool:
    logs = [run.attempt(1).rank_log(rank) for rank in range(2)]
    return all(log.exists() and "met at" in log.read_text() for log in logs)


def end_of(run: RunDir) -> str | None:
    file = run.attempt(1).end_file
    return str(read_json(file)["state"]) if file.exists() else None


def wait_for(runs: list[RunDir], folder: Path, number: int) -> list[RunDir]:
    """Wait until all groups have connected, let them exit, and return the groups that failed."""
    give_up_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_s and not all(has_met(run) or end_of(run) for run in runs):
        time.sleep(0.1)
    missed = [run for run in runs if not has_met(run)]
    if missed:
        print(call(["squeue"], folder), end="")
    (folder / f"go-{number}").touch()
    give_up_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_s and not all(end_of(run) for run in runs):
        time.sleep(0.1)
    return [run for run in runs if run in missed or end_of(run) != "finished"]


def campaign(num_starts: int, seed: int, folder: Path) -> int:
    (folder / "meet.yaml").write_text(CONFIG)
    (folder / "meet.py").write_text(MEET)
    (folder / "runs").mkdir(exist_ok=True)
    found = call(["sinfo", "--noheader", "--Node", "--format=%N", "--states=idle"], folder).split()
    hosts = list(dict.fromkeys(found))[:2]
    if len(hosts) < 2:
        raise SystemExit(f"two idle hosts are needed, and there are {len(hosts)}")
    squat = f"srun {sys.executable} {__file__} --take-ports {seed}"
    options = ["--nodes=2", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}", "--output=taken.log"]
    squatter = call(["sbatch", "--parsable", *options, f"--wrap={squat}"], folder).strip()
    log, began_s = folder / "taken.log", time.monotonic()
    try:
        while not log.exists() or log.read_text().count("are taken") < len(hosts):
            if time.monotonic() > began_s + LIMIT_S:
                raise SystemExit(f"the ports were not taken: {log.read_text() if log.exists() else ''}")
            time.sleep(0.1)
        print(log.read_text(), end="")
        clashed, ports, began_s = [], set(), time.monotonic()
        for number in range(1, num_starts + 1):
            runs = start(folder, number, hosts)
            bad = wait_for(runs, folder, number)
            ports |= {read_json(run.attempt(1).rendezvous_file)["port"] for run in runs if run not in bad}
            clashed += bad
            for run in bad:
                print(f"start {number}: {run.path} did not meet: {end_of(run)}")
    finally:
        call(["scancel", squatter], folder)
    print(
        json.dumps(
            {
                "starts": num_starts,
                "sets_of_ranks": 4 * num_starts,
                "ports": len(ports),
                "clashes": len(clashed),
                "seconds": round(time.monotonic() - began_s, 1),
            }
        )
    )
    return 1 if clashed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--take-ports"]:
        take_ports(int(sys.argv[2]))
    if sys.argv[1:2] == ["--as-rank"]:
        sys.exit(run_as_rank(sys.argv[2], sys.argv[3], sys.argv[4:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="on a disk that all hosts share; default: a temporary one"
    )
    arguments = parser.parse_args()
    place = arguments.folder or Path(tempfile.mkdtemp(prefix="port-clashes-", dir=os.environ.get("TMPDIR")))
    sys.exit(campaign(arguments.starts, arguments.seed, place.absolute()))
