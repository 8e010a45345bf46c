"""How fast ranks can exchange tensors: all-reduce over all of them, and point to point along a ring.

``python -m trainkit.contrib.doctor.bandwidth_rank`` is one rank; its environment has RANK, LOCAL_RANK, and in
``TRAINKIT_DOCTOR_LAYOUT`` the ranks of all hosts.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from trainkit.contrib.doctor import from_json, to_json
from trainkit.contrib.doctor.bandwidth import LAYOUT_VARIABLE, MARK, Bandwidth, Layout, ring_rounds

START_TIMEOUT_S = 60.0
SIZE_MIB = {"gloo": 32, "nccl": 256}
NUM_WARMUPS, NUM_REPEATS = 1, 5


def main() -> int:
    """Measure as one rank; rank 0 prints the result as one line of JSON."""
    layout = from_json(Layout, os.environ[LAYOUT_VARIABLE])
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    backend, device = ("nccl", torch.device("cuda", local_rank)) if on_gpu else ("gloo", torch.device("cpu"))
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"tcp://{layout.addr}:{layout.port}",
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=START_TIMEOUT_S),
    )
    tensor = torch.zeros(SIZE_MIB[backend] * 2**18, device=device)
    num_bits = 8 * tensor.numel() * tensor.element_size()

    def median_s(action: Callable[[], object]) -> float:
        times_s = []
        for repeat in range(NUM_WARMUPS + NUM_REPEATS):
            started_s = time.perf_counter()
            action()
            if on_gpu:
                torch.cuda.synchronize()
            if repeat >= NUM_WARMUPS:
                times_s.append(time.perf_counter() - started_s)
        return statistics.median(times_s)

    def ask(peer: int) -> None:
        dist.send(tensor[:1], peer)
        dist.recv(tensor, peer)

    def answer(peer: int) -> None:
        dist.recv(tensor[:1], peer)
        dist.send(tensor, peer)

    # Of every byte, a rank sends and receives this share in the best algorithm: nccl-tests' "bus bandwidth".
    share = 2 * (layout.world_size - 1) / layout.world_size
    reduced = share * num_bits / median_s(lambda: dist.all_reduce(tensor)) / 1e9
    points = layout.points()
    speeds = torch.zeros(len(points), dtype=torch.float64, device=device)
    for links in ring_rounds(len(points)):
        dist.barrier()
        for source, target in links:
            (_, sender), (_, receiver) = points[source], points[target]
            if rank == sender:
                # The receiver asks for each transfer, so that it measures no waiting.
                median_s(partial(answer, receiver))
            elif rank == receiver:
                speeds[source] = num_bits / median_s(partial(ask, sender)) / 1e9
    dist.all_reduce(speeds)
    if rank == 0:
        names = [name for name, _ in points]
        found = list(zip(names, [*names[1:], names[0]], speeds.tolist(), strict=True))
        result = Bandwidth("", backend, SIZE_MIB[backend], reduced, found)
        print(f"\n{MARK} {to_json(result)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
