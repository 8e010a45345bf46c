"""Measure the fraction of a core that `trainkit watch` uses while a large run writes metrics and samples.

    python -m benchmarks.watch_cost                                   # 1,024 ranks on 128 nodes, and on 256
    python -m benchmarks.watch_cost --nodes 16 --seconds 10 --records 1000

The benchmark starts the command in a terminal of 200 x 50 characters, and reads its CPU time from /proc after
the first screen. The exit code is 1 if the command uses more than 5 % of a core.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from trainkit.capabilities.health.samples import health_file
from trainkit.config import dump_effective
from trainkit.config.schema import RunConfig
from trainkit.run.events import log_event
from trainkit.run.files import append_jsonl, as_utc, write_json
from trainkit.run.process import ProcessId
from trainkit.run.rundir import RunDir

MAX_SHARE = 0.05
NUM_RANKS = 1024
SAMPLE_EVERY_S, STEP_S = 10.0, 0.5
WIDTH, HEIGHT = 200, 50
START_TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, action="append", help="repeatable; default: 128 and 256")
    parser.add_argument("--records", type=int, default=100_000, help="records in metrics.jsonl at the start")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    print(
        f"| ranks | nodes | metrics records | first screen s | CPU of {args.seconds:g} s | share of a core |"
    )
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for nodes in args.nodes or (128, 256):
        with tempfile.TemporaryDirectory() as folder:
            run = make_run(Path(folder) / "large", nodes, args.records)
            first_s, cpu_s = measure(run, nodes, args.records, args.seconds)
        share = cpu_s / args.seconds
        worst = max(worst, share)
        print(f"| {NUM_RANKS:,} | {nodes} | {args.records:,} | {first_s:.1f} | {cpu_s:.2f} s | {share:.1%} |")
    if worst > MAX_SHARE:
        sys.exit(f"error: {worst:.1%} of a core is more than {MAX_SHARE:.0%}")


def make_run(folder: Path, nodes: int, num_records: int) -> RunDir:
    """Create the folder of a run that appears to be running, because this process is its supervisor."""
    run = RunDir(folder)
    folder.mkdir()
    run.attempt(1).create()
    (folder / "health").mkdir()
    run.config_file.write_text(dump_effective(RunConfig.model_validate({"train": {"steps": 10_000_000}})))
    plan = {"num_nodes": nodes, "workers_per_node": NUM_RANKS // nodes, "world_size": NUM_RANKS}
    write_json(run.plan_file, {**plan, "device": "cuda", "health_every_s": SAMPLE_EVERY_S})
    now = datetime.now(timezone.utc)
    began = now - timedelta(seconds=num_records * STEP_S)
    entry = {
        "attempt": 1,
        "job_id": "local-1",
        "submitted_at": as_utc(began),
        **asdict(ProcessId.of(os.getpid())),
    }
    write_json(run.job_file, {"name": "large", "backend": "local", "attempts": [entry]})
    for event in ("started", "training", "first_step"):
        log_event(run, 1, event, step=0, total_steps=10_000_000)
    with run.metrics_file.open("w") as stream:
        for step in range(1, num_records + 1):
            stream.write(json.dumps(record(step, began + timedelta(seconds=step * STEP_S))) + "\n")
    for node in range(nodes):
        for index in range(200):
            time_of = now - timedelta(seconds=SAMPLE_EVERY_S * (200 - index))
            append_jsonl(health_file(run, host(node)), sample(node, nodes, time_of))
    return run


def host(node: int) -> str:
    return f"node{node:04d}"


def record(step: int, time_of: datetime) -> dict[str, Any]:
    """Return a record of metrics.jsonl."""
    noise = random.random()
    return {
        "step": step,
        "time": as_utc(time_of),
        "attempt": 1,
        "loss": 2 + 8 / (1 + step / 1000) + noise / 10,
        "grad_norm": 0.5 + noise,
        "lr": 3e-4,
        "tokens": step * 4_194_304,
        "tokens_per_s": 8e6 * (1 - noise / 20),
        "tokens_per_s_per_gpu": 8e6 / NUM_RANKS,
        "mfu": 0.4,
        "step_s": STEP_S * (1 + noise / 20),
        "data_wait_s": 0.001,
        "mem_gib_peak": 61.2,
        "samples_seen": step * 1024,
    }


def sample(node: int, nodes: int, time_of: datetime) -> dict[str, Any]:
    """Return a sample of the resource usage of a node with its GPUs."""
    gpus = [
        {
            "index": index,
            "name": "NVIDIA H100 80GB HBM3",
            "util_percent": random.randint(90, 100),
            "mem_used_gib": 61.2,
            "mem_total_gib": 79.6,
            "power_w": 640.0,
            "temperature_c": random.randint(55, 70),
            "sm_clock_mhz": 1980,
            "throttle": ["power"],
            "ecc_errors": 0,
        }
        for index in range(NUM_RANKS // nodes)
    ]
    numbers = {"cpu_percent": 12.5, "load_1m": 9.0, "mem_used_gib": 210.0, "mem_total_gib": 2015.0}
    rates = {"net_rx_mib_s": 120.0, "net_tx_mib_s": 118.0, "disk_read_mib_s": 3.0, "disk_write_mib_s": 1.0}
    return {"time": as_utc(time_of), "attempt": 1, "host": host(node), **numbers, **rates, "gpus": gpus}


def write(run: RunDir, nodes: int, step: int, ended: threading.Event) -> None:
    """Append a record for each step, and a sample of one node after another."""
    samples_per_step = nodes * STEP_S / SAMPLE_EVERY_S
    due, node = 0.0, 0
    while not ended.wait(STEP_S):
        step += 1
        now = datetime.now(timezone.utc)
        append_jsonl(run.metrics_file, record(step, now))
        due += samples_per_step
        while due >= 1:
            append_jsonl(health_file(run, host(node)), sample(node, nodes, now))
            due, node = due - 1, (node + 1) % nodes


def measure(run: RunDir, nodes: int, step: int, seconds: float) -> tuple[float, float]:
    """Return the result of `watched` for a run whose files grow during the measurement."""
    ended = threading.Event()
    writer = threading.Thread(target=write, args=(run, nodes, step, ended))
    writer.start()
    try:
        return watched(run, os.environ, seconds)
    finally:
        ended.set()
        writer.join()


def watched(run: RunDir, environ: Mapping[str, str], seconds: float) -> tuple[float, float]:
    """Return the seconds until the first screen, and the CPU seconds of `watch` in the next `seconds`."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    argv = [sys.executable, "-m", "trainkit", "watch", str(run.path)]
    began_s = time.monotonic()
    program = subprocess.Popen(
        argv, stdin=inner, stdout=inner, stderr=inner, env={**environ, "TERM": "xterm-256color"}
    )
    os.close(inner)
    try:
        screen = b""
        while b"nodes: " not in re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", screen):
            screen += read(outer, 1.0)
            if time.monotonic() - began_s > START_TIMEOUT_S or program.poll() is not None:
                sys.exit(f"error: no screen within {START_TIMEOUT_S:g} s: {screen[-2000:]!r}")
        first_s = time.monotonic() - began_s
        before_s, end_s = cpu_s(program.pid), time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            read(outer, left_s)
        used_s = cpu_s(program.pid) - before_s
    finally:
        program.terminate()
        while program.poll() is None:
            read(outer, 0.1)
        os.close(outer)
    return first_s, used_s


def read(terminal: int, timeout_s: float) -> bytes:
    """Return the output of the program in its terminal."""
    if not select.select([terminal], [], [], timeout_s)[0]:
        return b""
    try:
        return os.read(terminal, 65_536)
    except OSError:
        return b""  # the program has exited


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks: int = os.sysconf("SC_CLK_TCK")
    return (int(fields[11]) + int(fields[12])) / ticks


if __name__ == "__main__":
    main()
