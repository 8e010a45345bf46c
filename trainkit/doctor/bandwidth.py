"""What the links of hosts should give, and the processes that measure it (`trainkit.trainer.bandwidth`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAYOUT_VARIABLE = "TRAINKIT_DOCTOR_LAYOUT"
TIMEOUT_S = 180.0
NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Layout:
    """The ranks of a measurement: those of a host follow each other."""

    hosts: tuple[str, ...]
    num_ranks: tuple[int, ...]
    """Ranks of each host."""
    addr: str
    port: int
    """Where rank 0 listens."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        values = json.loads(text)
        return cls(tuple(values["hosts"]), tuple(values["num_ranks"]), values["addr"], int(values["port"]))

    @property
    def world_size(self) -> int:
        return sum(self.num_ranks)

    def points(self) -> list[tuple[str, int]]:
        """(name, rank) of what is connected point to point: hosts, or the GPUs of the only host."""
        if len(self.hosts) == 1:
            return [(f"GPU {rank}", rank) for rank in range(self.world_size)]
        return [(host, sum(self.num_ranks[:index])) for index, host in enumerate(self.hosts)]


def ring_rounds(num_points: int) -> Iterator[list[tuple[int, int]]]:
    """The links (from, to) of a ring, in rounds in which no point has two of them."""
    links = [(index, (index + 1) % num_points) for index in range(num_points)]
    last = [links.pop()] if num_points % 2 else []
    yield from (items for items in (links[0::2], links[1::2], last) if items)


def link_gbit_s(interface: str | None) -> dict[str, float]:
    """What this host's links should give: ``ethernet`` an interface, ``infiniband`` all ports, in Gbit/s.

    A link that does not know its speed is left out.
    """
    found = {}
    with contextlib.suppress(OSError, ValueError):  # the kernel refuses to read it while a link is down
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


def run_ranks(layout: Layout, host: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run the ranks of one host.

    Returns what rank 0 measured, ``{}`` on the other hosts, and ``{"error": sentence}`` when a rank failed.
    """
    node = layout.hosts.index(host)
    first = sum(layout.num_ranks[:node])
    procs = []
    for local_rank in range(layout.num_ranks[node]):
        variables = {
            **environ,
            LAYOUT_VARIABLE: layout.to_json(),
            "RANK": str(first + local_rank),
            "LOCAL_RANK": str(local_rank),
            "OMP_NUM_THREADS": "1",
        }
        procs.append(
            subprocess.Popen(
                [sys.executable, "-m", "trainkit.trainer.bandwidth"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=variables,
            )
        )
    deadline_s, outputs = time.monotonic() + TIMEOUT_S, []
    try:
        for rank, proc in enumerate(procs, first):
            out, errors = proc.communicate(timeout=max(1.0, deadline_s - time.monotonic()))
            if proc.returncode:
                last = ([line for line in errors.splitlines() if line.strip()] or ["it crashed"])[-1]
                return {"error": f"rank {rank} on {host}: {last.strip()}"}
            outputs.append(out)
    except subprocess.TimeoutExpired:
        return {"error": f"the ranks on {host} took longer than {TIMEOUT_S:.0f} s"}
    finally:
        for proc in procs:
            if proc.poll() is None:
                proc.kill()
                proc.wait()
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1]) if first == 0 else {}
    return found
