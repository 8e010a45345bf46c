"""Count the requests that the tasks of a starting job send to the file server and to the rendezvous store.

    python -m benchmarks.startup_scale --tasks 8 --tasks 8000
    python -m benchmarks.startup_scale --gloo 64

Each task runs trainkit's own waiting loops with a simulated clock. The tasks start within 10 s, and task 0
publishes the port 2 s after its start. Rank 0 listens 20 s later, after it has imported torch and found the
data. The other ranks need up to 10 s longer than rank 0. No other part of a job runs, so the counts are exact
under these assumptions, and no times are measured.

With `--gloo N`, N real processes create the process groups of the trainer and run one gather. The processes
connect either immediately or at their first communication. The benchmark counts the sockets of the processes
and measures their CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

START_SPREAD_S = 10.0
PUBLISH_S = 2.0
LISTEN_S = 20.0
PREPARE_SPREAD_S = 10.0
TASKS_PER_NODE = 8


class Clock:
    """A simulated clock, which is advanced by sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Store:
    """The connection of one rank to the store; `verdict_s` is the time at which all ranks have arrived."""

    def __init__(
        self, clock: Clock, counts: Counter[str], verdict_s: float, is_last: bool, size: int
    ) -> None:
        self.clock, self.counts, self.verdict_s = clock, counts, verdict_s
        self.is_last, self.size = is_last, size

    def check(self, keys: list[str]) -> bool:
        self.counts["store requests"] += 1
        return self.clock.now_s >= self.verdict_s

    def add(self, key: str, amount: int) -> int:
        self.counts["store requests"] += 1
        return self.size if self.is_last or self.clock.now_s >= self.verdict_s else 1

    def set(self, key: str, value: str) -> None:
        self.counts["store requests"] += 1

    def get(self, key: str) -> bytes:
        self.counts["store requests"] += 1
        return b"sealed go"

    def set_timeout(self, timeout: timedelta) -> None:
        pass  # changes a setting of the connection, and is not a request

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self.counts["store requests"] += 1
        self.verdict_s = min(self.verdict_s, self.clock.now_s)


@contextlib.contextmanager
def simulated(clock: Clock, counts: Counter[str], published_s: float, listens_s: float) -> Iterator[None]:
    """Replace the clock, directory listings, reads and connections with simulations that count calls."""

    def list_folder(folder: Path) -> Iterator[Path]:
        counts["listings"] += 1
        return iter(())

    def read(path: Path) -> object:
        counts["reads"] += 1
        if clock.now_s < published_s:
            raise FileNotFoundError(path)
        return {"step": "7.0.0.", "port": 1}

    def connect(address: object, timeout: float) -> contextlib.AbstractContextManager[None]:
        counts["connection attempts"] += 1
        if clock.now_s < listens_s:
            raise ConnectionRefusedError
        return contextlib.nullcontext()

    with (
        patch.object(time, "monotonic", clock.monotonic),
        patch.object(time, "sleep", clock.sleep),
        patch.object(Path, "iterdir", list_folder),
        patch("trainkit.run.files.read_json", read),
        patch("trainkit.run.files._read_or_create", read),
        patch.object(socket, "create_connection", connect),
    ):
        yield


def count(num_tasks: int, seed: int) -> Counter[str]:
    """Return the number of operations of all tasks, by type."""
    from trainkit.job.rank_env import RankEnv
    from trainkit.job.signals import StopRequest
    from trainkit.run.files import wait_for_json
    from trainkit.trainer import distributed as barrier

    rng, counts, clock = random.Random(seed), Counter[str](), Clock()
    starts_s = [rng.uniform(0, START_SPREAD_S) for _ in range(num_tasks)]
    published_s = starts_s[0] + PUBLISH_S
    listens_s = published_s + LISTEN_S
    ready_s = [
        max(start_s, published_s) + LISTEN_S + rng.uniform(0, PREPARE_SPREAD_S) for start_s in starts_s
    ]
    ready_s[0] = listens_s
    last_s = max(ready_s)
    probes = 0
    for task in range(num_tasks):
        if task % TASKS_PER_NODE == 0:  # one task per node checks the disk
            probes += 1
        env = RankEnv(task, task % 8, num_tasks, 8, task // 8, num_tasks // 8, "host0", 1, "agent")
        store = Store(clock, counts, last_s, ready_s[task] == last_s, num_tasks)
        with simulated(clock, counts, published_s, listens_s):
            clock.now_s = starts_s[task]
            if task:
                file = Path("/run/attempts/001/rendezvous.json")
                wait_for_json(file, 300.0, pause=clock.sleep, creates=True)
            clock.now_s = max(clock.now_s, ready_s[task] - PREPARE_SPREAD_S)
            with (
                patch.object(barrier, "_open_store", lambda *_, store=store: store),
                patch.object(barrier, "PrefixStore", lambda prefix, store: store),
                patch.object(
                    barrier, "_digest", lambda env, text: "sealed go" if text == "attempt" else "sealed"
                ),
            ):
                barrier.startup_barrier(env, StopRequest(), timedelta(seconds=600))
    counts["probe files of 64 KiB"] = probes
    return counts


def connect_ranks(num_ranks: int, *, lazy: bool) -> tuple[int, float, float]:
    """Return the sockets and CPU seconds of all ranks, and the seconds until all ranks have their groups."""
    from trainkit.job.node.rendezvous import choose_port
    from trainkit.trainer.distributed import dist

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": str(int(lazy))}
    port = choose_port()
    context = multiprocessing.get_context("fork")
    results, done = context.SimpleQueue(), context.Event()
    ranks = [
        context.Process(target=_connect, args=(rank, num_ranks, port, results, done))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    # Import the module after the forks, because it starts threads.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    found = [results.get() for _ in ranks]
    done.set()
    for rank in ranks:
        rank.join()
    del store
    sockets, cpu_s, ready_s = zip(*found, strict=True)
    return sum(sockets), sum(cpu_s), max(ready_s)


def _connect(rank: int, num_ranks: int, port: int, results: Any, done: Any) -> None:
    import torch

    from trainkit.plan.launch import Layout
    from trainkit.trainer.distributed import dist, gather_from_all, make_world

    begin_s = time.monotonic()
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(minutes=5))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    world = make_world(rank, torch.device("cpu"), Layout(dp_shard=num_ranks))
    ready_s = time.monotonic() - begin_s
    gather_from_all("host", world)
    sockets = sum(file.is_socket() for file in Path("/proc/self/fd").iterdir())
    results.put((sockets, sum(os.times()[:2]), ready_s))
    done.wait()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gloo", type=int, metavar="RANKS")
    args = parser.parse_args()
    if args.gloo:
        print("| connections | sockets | processor s | groups after s |\n|---|---|---|---|")
        for name, lazy in (("at once", False), ("when needed", True)):
            sockets, cpu_s, ready_s = connect_ranks(args.gloo, lazy=lazy)
            print(f"| {name} | {sockets:,} | {cpu_s:.1f} | {ready_s:.1f} |", flush=True)
        return
    sizes = args.tasks or [8, 8000]
    found = {size: count(size, args.seed) for size in sizes}
    print(f"| operation | {' | '.join(f'{size:,} tasks' for size in sizes)} |")
    print(f"|---|{'---|' * len(sizes)}")
    for name in sorted(set().union(*found.values())):
        print(f"| {name} | {' | '.join(f'{counts[name]:,}' for counts in found.values())} |")


if __name__ == "__main__":
    main()
