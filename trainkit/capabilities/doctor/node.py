"""Checks one node: its CPU cores, GPUs, host names, network interface, ports and folders.

``python -m trainkit.capabilities.doctor.node REQUEST`` prints a `NodeReport`, and then measures the bandwidth
for each request on standard input.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar

from trainkit.capabilities.doctor import NodeReport, Request, from_json, to_json
from trainkit.capabilities.doctor.bandwidth import Bandwidth, Layout, link_gbit_s, run_ranks
from trainkit.capabilities.doctor.environment import check_python, check_torch, num_gpus, versions
from trainkit.cluster.machine import (
    NVIDIA_DRIVER,
    NoDriver,
    driver_cuda,
    driver_version,
    gpu_handle,
    host_memory_gib,
    nvml,
)
from trainkit.errors import TrainkitError
from trainkit.formats import plural
from trainkit.job.node.rendezvous import candidate_ports, choose_port, is_free
from trainkit.job.node.worker_env import PRESETS, addresses, interface_to, network_environ, usable_interfaces
from trainkit.job.preflight import (
    Finding,
    check_clock,
    check_gpu,
    check_space,
    clock_offset_s,
    free_mib,
    temporary_folders,
    warn_if,
)
from trainkit.job.processes import NO_SPACE
from trainkit.job.rank_env import visible_gpus
from trainkit.run.files import refresh_listing
from trainkit.run.process import own_host
from trainkit.scheduler import expand_hosts
from trainkit.slurm.hosts import node_addr

PREFIX, CHUNK_CHARS = "trainkit-doctor", 700
T = TypeVar("T")


def node_findings(request: Request) -> Iterator[Finding]:
    """Yield the findings about this host, starting with the fastest checks."""
    yield check_python(request)
    yield check_cpus()
    yield from check_gpus()
    yield check_name(request)
    yield check_interface(request)
    yield check_ports()
    yield from check_folder(request)
    yield from starmap(check_space, temporary_folders(os.environ).items())
    if not request.quick:
        yield check_torch(request)


def node_report(request: Request, findings: Iterable[Finding] = ()) -> NodeReport:
    """Return a report about this host that contains the given findings."""
    interface = None if request.peer is None else interface_to(request.peer)
    step = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}"
    port = 0
    with contextlib.suppress(TrainkitError):  # `check_ports` reports the error if no port is free
        port = choose_port()
    return NodeReport(
        own_host(),
        num_gpus(request),
        port,
        request.peers,
        {**versions(request), **({"NVIDIA driver": driver} if (driver := driver_version()) else {})},
        link_gbit_s(interface if request.network in PRESETS else request.network),
        tuple(replace(item, host=own_host()) for item in findings),
        step if step.strip(".") else "",
    )


def measure(request: Request, layout: Layout) -> Bandwidth:
    """Measure the bandwidth using ranks on this host."""
    try:
        environ, _ = network_environ(request.network, request.peer)
    except TrainkitError as error:
        return Bandwidth(error.message)
    return run_ranks(layout, own_host(), {**dict(request.env), **environ}, request.python)


def main() -> int:
    """Run the checks in the command-line argument on this node, and print a report, which `received` parses.

    After the report, measure and print the bandwidth for each `Layout` read from standard input.
    """
    request = from_json(Request, sys.argv[1])
    hosts = os.environ.get("SLURM_STEP_NODELIST")
    if hosts is not None:
        peers = tuple(host for host in expand_hosts(hosts) if host != own_host())
        request = replace(request, peers=peers)
    report = node_report(request, list(node_findings(request)))
    send(to_json(report))
    for line in sys.stdin:
        layout = from_json(Layout, line)
        # Each node resolves the name of the first host itself, because name resolution may differ between
        # nodes.
        addr = (resolved(layout.hosts[0]) or [layout.addr])[0] if request.peers else layout.addr
        send(to_json(measure(request, replace(layout, addr=addr))))
    return 0


def send(text: str) -> None:
    """Print a message split into short lines.

    srun may interleave the output of different tasks after every 1,024 bytes, so longer lines could be mixed
    up.
    """
    chunks = [text[start : start + CHUNK_CHARS] for start in range(0, len(text), CHUNK_CHARS)]
    for index, chunk in enumerate(chunks, 1):
        print(f"{PREFIX} {own_host()} {index}/{len(chunks)} {chunk}", flush=True)


def received(lines: Iterable[str]) -> Iterator[str]:
    """Yield the messages of all hosts, reassembled from the lines that `send` printed.

    Lines that `send` did not print, and an incomplete last line, are skipped.
    """
    parts: dict[str, str] = {}
    for line in lines:
        if not line.startswith(f"{PREFIX} ") or not line.endswith("\n"):
            continue
        _, host, part, chunk = line.rstrip("\n").split(" ", 3)
        index, _, count = part.partition("/")
        parts[host] = parts.get(host, "") + chunk
        if index == count:
            yield parts.pop(host)


def check_cpus() -> Finding:
    """Check the CPU cores available to this process, and the load and memory of the host."""
    count = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    value = f"{count} CPU cores available to this process, load {load:.1f}"
    memory = host_memory_gib()
    if memory is not None:
        value += f"; {memory[1] - memory[0]:,.1f} of {memory[1]:,.1f} GiB of memory available"
    return warn_if(
        load > 2 * count, "CPU", value, "other programs are using this host: run `top` to list them"
    )


HOT_C = 85
BUSY_SHARE = 0.05
"""Fraction of a GPU's memory that other processes may use without a warning."""


def check_gpus() -> Iterator[Finding]:
    """Check the NVIDIA driver, and each GPU that a process on this host would use."""
    if not NVIDIA_DRIVER.exists():
        yield Finding("GPU", "ok", "none: there is no NVIDIA driver, so runs use CPUs")
        return
    try:
        with nvml() as driver:
            cuda = driver_cuda(driver)
            supported = "unknown" if cuda is None else f"{cuda[0]}.{cuda[1]}"
            yield Finding("driver", "ok", f"{driver_version()}, CUDA {supported}")
            listed = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
            # MIG slices do not report their health, so check the GPUs that contain the slices.
            if listed is None or any(not name.isdigit() for name in listed):
                listed = [str(index) for index in range(_known(driver, driver.nvmlDeviceGetCount) or 0)]
            for name in listed:
                yield gpu_finding(driver, name)
    except NoDriver as error:
        hint = "check the output of `nvidia-smi` and the kernel log; after a driver update, reboot the host"
        yield Finding("GPU", "failure", str(error), hint)


def gpu_finding(nvml: Any, gpu: str) -> Finding:
    """Check a GPU's errors, temperature and free memory, and whether other processes use it."""
    checked = check_gpu(nvml, gpu)
    if checked.state == "failure":
        return checked
    name, handle = checked.name, gpu_handle(nvml, gpu)
    model = _known(nvml, lambda: str(nvml.nvmlDeviceGetName(handle))) or "unknown model"
    memory = _known(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    temperature = _known(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    processes = _known(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    free = "unknown memory"
    if memory is not None:
        free = f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    heat = "unknown temperature" if temperature is None else f"{temperature} C"
    value = f"{model}, {free}, {heat}"
    pids = [str(process.pid) for process in processes or ()]
    if pids:
        using = f"process {pids[0]} uses" if len(pids) == 1 else f"processes {', '.join(pids)} use"
        hint = f"{using} this GPU: run `ps -o user,args -p {','.join(pids)}` for details"
        return Finding(name, "warning", value, hint)
    if memory is not None and memory.used > BUSY_SHARE * memory.total:
        return Finding(
            name, "warning", value, "other processes use memory on this GPU: run `nvidia-smi` to list them"
        )
    is_hot = temperature is not None and temperature >= HOT_C
    return warn_if(is_hot, name, value, "the GPU is hot and will reduce its clock speed: check its cooling")


def _known(nvml: Any, query: Callable[[], T]) -> T | None:
    """Return the result of an NVML query, or None if the query fails, for example for a MIG slice."""
    try:
        return query()
    except nvml.NVMLError:
        return None


def check_name(request: Request) -> Finding:
    """Check whether this host's name and the names of the other hosts can be resolved."""
    for name in request.peers:
        found = resolved(name)
        hint = f"add {name} to DNS, or to /etc/hosts on every node: the ranks connect to each other by name"
        if not found:
            return Finding(
                "name", "failure", f"{name} cannot be resolved, and neither can its NodeAddr", hint
            )
        if not _addresses_of(name):
            hint = (
                f"trainkit uses the NodeAddr {found[0]}, but scripts that use the name fail: add it "
                f"to /etc/hosts"
            )
            return Finding("name", "warning", f"{name} cannot be resolved", hint)
        if all(address.startswith("127.") for address in found):
            hint = (
                f"/etc/hosts on the checked node maps {name} to {found[0]}, which other hosts cannot reach: "
                "map the name to the node's address"
            )
            return Finding("name", "failure", f"{name} is {', '.join(found)}", hint)
    own = socket.gethostname()
    if not _addresses_of(own):
        hint = f"add {own} to DNS or /etc/hosts: programs that listen on the name of their host fail"
        return Finding("name", "warning", f"this host's own name {own} cannot be resolved", hint)
    if request.peers:
        return Finding("name", "ok", f"{plural(len(request.peers), 'other host')} can be resolved")
    return Finding("name", "ok", f"this host is {own}")


def resolved(name: str) -> list[str]:
    """Return the IPv4 addresses of a host in the Slurm step.

    If the host name cannot be resolved, returns the addresses in the host's NodeAddr in Slurm.
    """
    found = _addresses_of(name)
    if not found:
        with contextlib.suppress(TrainkitError):  # without a NodeAddr, the list of addresses is empty
            found = _addresses_of(node_addr(name, patience_s=0.0))
    return found


def _addresses_of(name: str) -> list[str]:
    try:
        return sorted({str(item[4][0]) for item in socket.getaddrinfo(name, None, socket.AF_INET)})
    except (OSError, UnicodeError):
        return []


def check_interface(request: Request) -> Finding:
    """Check the network interface that connects the nodes."""
    try:
        environ, reason = network_environ(request.network, request.peer)
    except TrainkitError as error:
        return Finding("interface", "failure", error.message, error.hint)
    usable, chosen = usable_interfaces(), environ.get("GLOO_SOCKET_IFNAME")
    if chosen not in (None, "lo") and chosen not in usable:
        state = "has no address" if chosen not in addresses().values() else "is down"
        others = f"; usable are {', '.join(usable)}" if usable else ""
        hint = f"run `ip link set {chosen} up` as root, or choose another launch.network{others}"
        return Finding("interface", "failure", f"{chosen} {state}", hint)
    if request.peers and chosen is None:
        hint = (
            "check the output of `ip route`, and set launch.network to the interface that connects the nodes"
        )
        return Finding("interface", "failure", reason, hint)
    return Finding("interface", "ok", reason)


def check_ports() -> Finding:
    """Check whether rank 0 can listen on a port."""
    candidates = candidate_ports()
    num_free = sum(map(is_free, candidates))
    value = f"{num_free} of {len(candidates)} tested ports are free"
    if candidates and not num_free:
        return Finding("port", "failure", value, "run `ss -ltn` to list the listening sockets on this host")
    return Finding("port", "ok", value)


MIN_FREE_GIB, FEW_GIB = 0.25, 10.0
"""Free disk space in GiB: the check fails below the first value, and warns below the second."""
PROBE_MIB = 32
SLOW_MIB_S = 50.0
VISIBLE_TIMEOUT_S, VISIBLE_POLL_S = 5.0, 0.2
"""Timeout in seconds for a file created on another host to become visible, and the polling interval in
seconds. The wait is necessary because an NFS client may have cached the folder's old content."""
FOLDER_PREFIX = ".doctor-"


def nearest_folder(folder: Path) -> Path:
    """Return the folder if it exists, or else its nearest existing parent path, which may be a file."""
    return next(item for item in (folder, *folder.parents) if os.path.lexists(item))


def check_folder(request: Request) -> Iterator[Finding]:
    """Check whether checkpoints can be written and how fast, and whether all hosts see the same files."""
    existing = nearest_folder(request.folder)
    try:
        # Use the same prefix as in the name of the shared file, so that the host that created the shared file
        # can also remove files left by killed tasks.
        prefix = FOLDER_PREFIX if request.shared is None else f"{Path(request.shared[0]).name}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=existing) as name:
            yield _free_space(existing)
            if request.shared is not None and request.shared[1] != own_host():
                yield _is_shared(*request.shared)
            yield _write_speed(Path(name), request.quick)
            yield _renames(Path(name))
            yield check_clock(clock_offset_s(Path(name)))
    except OSError as error:
        yield _unwritable(existing, error)


def _unwritable(folder: Path, error: OSError) -> Finding:
    if error.errno == errno.ENOENT:  # the folder is below /proc, or is a symlink to a missing folder
        return Finding("disk", "failure", f"no files can be created in {folder}", "choose another --run-dir")
    hint = "choose another --run-dir, or check the folder's mount options and permissions (`ls -ld`)"
    if error.errno in NO_SPACE:
        hint = "delete old runs or checkpoints (`trainkit ckpt prune`), or check `quota`"
    return Finding("disk", "failure", f"{folder} cannot be written: {error.strerror or error}", hint)


@contextlib.contextmanager
def shared_file(folder: Path) -> Iterator[tuple[str, str] | Finding]:
    """Create the file for `Request.shared` below the run folder, or yield a finding with the error.

    On exit, remove the created file and any files left behind by killed tasks.
    """
    existing = nearest_folder(folder)
    try:
        handle, name = tempfile.mkstemp(prefix=f"{FOLDER_PREFIX}shared-", dir=existing)
        os.close(handle)
    except OSError as error:
        yield replace(_unwritable(existing, error), host=own_host())
        return
    try:
        yield name, own_host()
    finally:
        Path(name).unlink(missing_ok=True)
        for left in existing.glob(f"{Path(name).name}-*"):
            shutil.rmtree(left, ignore_errors=True)


def _is_shared(name: str, host: str) -> Finding:
    """Check whether a file that was created on another host is visible on this host."""
    path = Path(name)
    deadline_s = time.monotonic() + VISIBLE_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            value = (
                f"{path.parent} is not on a shared filesystem: a file created on {host} is not "
                f"visible on {own_host()}"
            )
            hint = "choose a --run-dir on a filesystem that all nodes mount, and check its mount on this host"
            return Finding("shared", "failure", value, hint)
        refresh_listing(path.parent)
        time.sleep(VISIBLE_POLL_S)
    return Finding("shared", "ok", f"a file created on {host} is visible")


def _free_space(folder: Path) -> Finding:
    free = (free_mib(folder) or 0.0) / 1024
    value = f"{free:,.1f} GiB free in {folder}"
    if free >= FEW_GIB:
        return Finding("disk", "ok", value)
    hint = "delete old runs or checkpoints (`trainkit ckpt prune`), or choose another disk"
    return Finding("disk", "failure" if free < MIN_FREE_GIB else "warning", value, hint)


def _write_speed(folder: Path, quick: bool) -> Finding:
    size_mib = PROBE_MIB // 4 if quick else PROBE_MIB
    block = os.urandom(2**20)  # use random data, which the filesystem cannot compress
    started_s = time.monotonic()
    with (folder / "probe").open("wb") as file:
        for _ in range(size_mib):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written_s = time.monotonic() - started_s
    speed = size_mib / max(written_s, 1e-6)
    value = f"{speed:,.0f} MiB/s for {size_mib} MiB with fsync"
    hint = "checkpoints will be slow to save: save less often, or choose a faster filesystem with --run-dir"
    return warn_if(speed < SLOW_MIB_S, "write speed", value, hint)


def _renames(folder: Path) -> Finding:
    (folder / "partial").mkdir()
    (folder / "partial" / "file").write_text("x")
    (folder / "partial").rename(folder / "published")
    if not (folder / "published" / "file").is_file():
        hint = (
            "saving a checkpoint requires that its folder can be renamed atomically: use another filesystem"
        )
        return Finding(
            "rename", "failure", f"a folder was incomplete after it had been renamed in {folder.parent}", hint
        )
    return Finding("rename", "ok", "renaming a folder works, so checkpoints can be saved atomically")


if __name__ == "__main__":
    sys.exit(main())
