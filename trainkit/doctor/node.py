"""The checks of one node.

``python -m trainkit.doctor.node REQUEST`` prints them and the facts by which nodes are compared, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.doctor.bandwidth import Layout, link_gbit_s, run_ranks
from trainkit.doctor.check import Check, Request
from trainkit.doctor.disk import SHM_HINT, TMP_HINT, check_folder, check_space, file_server_offset_s
from trainkit.doctor.environment import check_python, check_torch, versions
from trainkit.doctor.gpus import check_gpus, driver_versions, num_gpus
from trainkit.doctor.network import check_interface, check_name, check_ports, free_ports, resolved
from trainkit.errors import TrainkitError
from trainkit.job.node.health import host_memory_gib
from trainkit.job.node.network import PRESETS, interface_to, network_environ
from trainkit.run.process import own_host
from trainkit.slurm.hosts import expand_hosts

PREFIX, CHUNK_CHARS = "trainkit-doctor", 700


def check_node(request: Request) -> Iterator[Check]:
    """The checks of this host, the cheap ones first."""
    yield check_python(request)
    yield check_cpus()
    yield from check_gpus()
    yield check_name(request)
    yield check_interface(request)
    yield check_ports(request)
    yield from check_folder(request)
    yield check_space("/tmp", Path(os.environ.get("TMPDIR") or "/tmp"), TMP_HINT)
    yield check_space("/dev/shm", Path("/dev/shm"), SHM_HINT)
    if not request.quick:
        yield from check_torch(request)


def check_cpus() -> Check:
    """The cores of this process, and the load and memory of the host."""
    count = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    value = f"{count} CPU cores for this process, load {load:.1f}"
    memory = host_memory_gib()
    if memory is not None:
        value += f"; {memory[1] - memory[0]:,.1f} of {memory[1]:,.1f} GiB of memory available"
    if load > 2 * count:
        return Check("CPU", "warning", value, "other programs use this host: `top` shows them")
    return Check("CPU", "ok", value)


def node_facts(request: Request) -> dict[str, Any]:
    """What must be the same on all nodes, and what a measurement of the bandwidth needs to know."""
    interface = interface_to(request.peers[0]) if request.peers else None
    return {
        "host": own_host(),
        "peers": request.peers,
        "versions": {**versions(request), **driver_versions()},
        "links": link_gbit_s(interface if request.network in PRESETS else request.network),
        "num_gpus": num_gpus(),
        "ports": free_ports(),
        "file_server_offset_s": file_server_offset_s(request),
    }


def measure(request: Request, layout: Layout) -> dict[str, Any]:
    """Measure the bandwidth as the host of a layout; returns what `run_ranks` does."""
    peer = request.peers[0] if request.peers else None
    try:
        environ, _ = network_environ(request.network, peer)
    except TrainkitError as error:
        return {"error": error.message}
    return run_ranks(layout, own_host(), {**os.environ, **dict(request.env), **environ}, request.python)


def main(argv: Sequence[str] | None = None) -> int:
    """Check this node as the JSON on the command line asks; prints the result for `received`.

    Then measures the bandwidth for each `Layout` that arrives on stdin, and prints that too.
    """
    request = Request.from_json((sys.argv[1:] if argv is None else argv)[0])
    hosts = os.environ.get("SLURM_STEP_NODELIST")
    if hosts is not None:
        peers = tuple(host for host in expand_hosts(hosts) if host != own_host())
        request = replace(request, peers=peers)
    checks = [{**check.to_dict(), "host": own_host()} for check in check_node(request)]
    facts = node_facts(request)
    message = {"kind": "facts", "facts": facts, "checks": checks, "step": _step_to_cancel()}
    send({**message, "time_s": time.time()})  # the reader compares it with its clock
    for line in sys.stdin:
        layout = Layout.from_json(line)
        # Each node finds the first one by its own name service.
        addr = (resolved(layout.hosts[0]) or [layout.addr])[0] if request.peers else layout.addr
        send({"kind": "bandwidth", "bandwidth": measure(request, replace(layout, addr=addr))})
    return 0


def _step_to_cancel() -> str:
    """What `scancel` takes to end this step."""
    step = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}"
    return step if step.strip(".") else ""


def send(message: Mapping[str, Any]) -> None:
    """Print a message in short lines: srun mixes what tasks print after each 1,024 bytes."""
    text = json.dumps(message)
    chunks = [text[start : start + CHUNK_CHARS] for start in range(0, len(text), CHUNK_CHARS)]
    for index, chunk in enumerate(chunks, 1):
        print(f"{PREFIX} {own_host()} {index}/{len(chunks)} {chunk}", flush=True)


def received(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The messages of all hosts, from the lines that `send` printed; other lines are skipped."""
    parts: dict[str, str] = {}
    for line in lines:
        if not line.startswith(f"{PREFIX} "):
            continue
        _, host, part, chunk = line.rstrip("\n").split(" ", 3)
        index, _, count = part.partition("/")
        parts[host] = parts.get(host, "") + chunk
        if index == count:
            yield json.loads(parts.pop(host))


if __name__ == "__main__":
    sys.exit(main())
