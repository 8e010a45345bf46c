"""Measures the bandwidth of an all-reduce and a ring between ranks, and compares it with the link speeds."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

from trainkit.capabilities.doctor import from_json, to_json
from trainkit.job.preflight import Finding, warn_if
from trainkit.launch.packages import NoAnswer, ask

RANKS = "from trainkit.capabilities.doctor.bandwidth import main; main()"
TIMEOUT_S = 180.0
NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Layout:
    """The hosts and ranks of a bandwidth measurement. Ranks on the same host are numbered consecutively."""

    hosts: tuple[str, ...]
    num_ranks: tuple[int, ...]
    """Number of ranks on each host."""
    addr: str
    port: int
    """The port on which rank 0 listens."""

    @property
    def world_size(self) -> int:
        return sum(self.num_ranks)

    def points(self) -> list[tuple[str, int]]:
        """Return the name of each endpoint of the ring's links, and one rank on each endpoint.

        The endpoints are the hosts, or the GPUs if there is only one host.
        """
        if len(self.hosts) == 1:
            return [(f"GPU {rank}", rank) for rank in range(self.world_size)]
        return [(host, sum(self.num_ranks[:index])) for index, host in enumerate(self.hosts)]


@dataclass(frozen=True)
class Bandwidth:
    """The result of a bandwidth measurement on one host.

    The result contains the measurements if rank 0 runs on this host, or the error of a rank.
    """

    error: str = ""
    backend: str = ""
    size_mib: int = 0
    all_reduce_gbit_s: float = 0.0
    links: list[tuple[str, str, float]] = field(default_factory=list)
    """The measured links as (from, to, Gbit/s)."""


def ring_rounds(num_points: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the links (from, to) of a ring, divided into rounds.

    Within a round, no endpoint is part of more than one link.
    """
    links = [(index, (index + 1) % num_points) for index in range(num_points)]
    last = [links.pop()] if num_points % 2 else []
    yield from (items for items in (links[0::2], links[1::2], last) if items)


def link_gbit_s(interface: str | None) -> dict[str, float]:
    """Return the nominal speeds of this host's network links in Gbit/s.

    ``ethernet`` is the speed of the network interface, and ``infiniband`` is the total speed of all active
    ports. Links that do not report a speed are omitted.
    """
    found = {}
    # the kernel does not report a link's speed while the link is down
    with contextlib.suppress(OSError, ValueError):
        speed = int((NET / str(interface) / "speed").read_text())
        if interface is not None and speed > 0:
            found["ethernet"] = speed / 1000
    rates = []
    for port in INFINIBAND.glob("*/ports/*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if "ACTIVE" in (port / "state").read_text():
                rates.append(float((port / "rate").read_text().split()[0]))
    if rates:
        found["infiniband"] = sum(rates)
    return found


def run_ranks(layout: Layout, host: str, environ: Mapping[str, str], python: Sequence[str]) -> Bandwidth:
    """Run one host's ranks with the given Python interpreter, and wait for them to exit."""
    variables = {**environ, "OMP_NUM_THREADS": "1"}
    try:
        return Bandwidth(**ask(python, RANKS, (host, to_json(layout)), variables, timeout_s=TIMEOUT_S))
    except NoAnswer as error:
        return Bandwidth(f"{host}: {error}")


SLOW_SHARE = 0.25
"""A measured bandwidth below this fraction of the link's nominal speed causes a warning."""
ODD_SHARE = 0.5
"""A link whose bandwidth is below this fraction of the median of all links causes a warning."""
GLOO_GBIT_S = 10.0
"""Maximum speed in Gbit/s to expect from gloo, which copies and sums data on CPUs."""


def bandwidth_checks(
    layout: Layout, found: Bandwidth, links: Sequence[Mapping[str, float]]
) -> Iterator[Finding]:
    """Yield findings about the results of `run_ranks`.

    `links` contains the result of `link_gbit_s` for each host. The measured bandwidth is compared with the
    link speeds of the slowest host.
    """
    if found.error:
        hint = "run the command again with NCCL_DEBUG=INFO to see what NCCL does"
        yield Finding("bandwidth", "failure", f"not measured: {found.error}", hint)
        return
    expected, name = _expected(found.backend, links) if len(layout.hosts) > 1 else (None, "")
    where = f"{layout.world_size} ranks ({found.backend}, {found.size_mib} MiB)"
    value = f"{found.all_reduce_gbit_s:,.1f} Gbit/s bus bandwidth over {where}"
    hint = (
        f"the bandwidth is less than {SLOW_SHARE:.0%} of the nominal speed of {name}: check "
        f"launch.network, the cables and "
        f"the other jobs"
    )
    is_slow = expected is not None and found.all_reduce_gbit_s < SLOW_SHARE * expected
    yield warn_if(is_slow, "all-reduce", value, hint)
    speeds = sorted((speed, source, target) for source, target, speed in found.links)
    slowest, source, target = speeds[0]
    median = statistics.median(speed for speed, _, _ in speeds)
    value = (
        f"{slowest:,.1f} Gbit/s from {source} to {target}, the slowest of {len(speeds)}; median {median:,.1f}"
    )
    if expected is not None:
        value += f"; the nominal speed of {name} is {expected:,.0f}"
    if slowest < ODD_SHARE * median:
        suspects = [item for item in speeds if item[0] < ODD_SHARE * median]
        pairs = "; ".join(f"{source} to {target}" for _, source, target in suspects[:4])
        yield Finding("point to point", "warning", value, f"check the links from {pairs}")
    else:
        is_slow = expected is not None and median < SLOW_SHARE * expected
        yield warn_if(is_slow, "point to point", value, hint)


def _expected(backend: str, links: Sequence[Mapping[str, float]]) -> tuple[float | None, str]:
    """Return the slowest host's nominal link speed in Gbit/s, or None if unknown, and the link's name."""
    kind = "infiniband" if backend == "nccl" and all("infiniband" in link for link in links) else "ethernet"
    speeds = [link[kind] for link in links if kind in link]
    if len(speeds) < len(links) or not speeds:
        return None, ""
    names = {"infiniband": "InfiniBand", "ethernet": "the network interface"}
    return min(speeds) if backend == "nccl" else min(*speeds, GLOO_GBIT_S), names[kind]


START_TIMEOUT_S = 60.0
SIZE_MIB = {"gloo": 32, "nccl": 256}
NUM_WARMUPS, NUM_REPEATS = 1, 5


def main() -> None:
    """Start the ranks on one host. The command-line arguments are the parameters of `run_ranks`."""
    from torch.multiprocessing.spawn import ProcessException, spawn

    mark, host, text = sys.argv[1:]
    layout = from_json(Layout, text)
    node = layout.hosts.index(host)
    first = sum(layout.num_ranks[:node])
    try:
        spawn(measure, (first, layout, mark), layout.num_ranks[node])  # type: ignore[no-untyped-call]
    except ProcessException as error:
        sys.exit(f"rank {first + error.error_index}: {str(error).strip().splitlines()[-1]}")
    if first:
        print(mark, "{}")


def measure(local_rank: int, first: int, layout: Layout, mark: str) -> None:
    """Run one rank of a bandwidth measurement; `first` is the lowest rank on the host.

    Rank 0 prints the result as JSON.
    """
    import torch
    import torch.distributed as dist

    rank = first + local_rank
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

    # In an optimal all-reduce, each rank sends and receives this multiple of the data size. In nccl-tests, a
    # bandwidth computed with this factor is called "bus bandwidth".
    share = 2 * (layout.world_size - 1) / layout.world_size
    reduced = share * num_bits / median_s(lambda: dist.all_reduce(tensor)) / 1e9
    points = layout.points()
    speeds = torch.zeros(len(points), dtype=torch.float64, device=device)
    for links in ring_rounds(len(points)):
        dist.barrier()
        for source, target in links:
            (_, sender), (_, receiver) = points[source], points[target]
            if rank == sender:
                # The receiver requests each transfer, so that the measured time excludes waiting for the
                # sender.
                median_s(partial(answer, receiver))
            elif rank == receiver:
                speeds[source] = num_bits / median_s(partial(ask, sender)) / 1e9
    dist.all_reduce(speeds)
    if rank == 0:
        names = [name for name, _ in points]
        found = list(zip(names, [*names[1:], names[0]], speeds.tolist(), strict=True))
        result = Bandwidth("", backend, SIZE_MIB[backend], reduced, found)
        print(f"\n{mark} {to_json(result)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
