"""The checks of one node.

``python -m trainkit.doctor.node REQUEST`` prints them and the facts by which nodes are compared, as JSON.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from trainkit.doctor.bandwidth import Layout, link_gbit_s, run_ranks
from trainkit.errors import TrainkitError
from trainkit.job.node.health import host_memory_gib
from trainkit.job.node.network import PRESETS, addresses, interface_to, network_environ, usable_interfaces
from trainkit.job.node.preflight import MAX_CLOCK_OFFSET_S, clock_offset_s, gpu_problem
from trainkit.job.node.rendezvous import candidate_ports, choose_port, ephemeral_range, is_free
from trainkit.job.rank_env import own_host, visible_gpus
from trainkit.plan.gpus import cuda_torch_hint
from trainkit.plan.torch_release import release_problem
from trainkit.slurm.hosts import expand_hosts, node_addr

State = Literal["ok", "warning", "failure"]
PYTHONS = ((3, 10), (3, 13))
"""The oldest and newest Python that are tested."""
TORCH_TIMEOUT_S = 120.0
TORCH_FACTS = """
import json, torch
nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count(),
    "nccl": None if nccl is None else ".".join(map(str, nccl)),
    "libuv": torch.distributed.is_available(),
}))
"""
"""In a process of its own: torch takes seconds to import, and a broken one may crash."""
COMPARED = ("trainkit", "torch", "numpy", "transformers", "peft", "accelerate", "submitit", "pydantic")
"""Packages whose versions must be the same on all nodes."""
HOT_C = 85
BUSY_SHARE = 0.05
"""Share of a GPU's memory that others may use."""
MIN_FREE_GIB, FEW_GIB = 0.25, 10.0
"""Free space that is too little for any checkpoint, and that is little."""
PROBE_MIB = 32
SLOW_MIB_S, SLOW_FSYNC_S = 50.0, 0.5
NUM_FSYNCS = 3
PREFIX, CHUNK_CHARS = "trainkit-doctor", 700


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    value: str
    hint: str = ""
    host: str | None = None
    """None for what concerns no single host."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """What to check."""

    folder: Path
    """The run folder, or where run folders will be."""
    network: str = "auto"
    """As `launch.network`."""
    peers: tuple[str, ...] = ()
    """The other hosts of the job."""
    port: int | None = None
    """A port that must be free on this host; None to find one."""
    quick: bool = False


def check_node(request: Request) -> Iterator[Check]:
    """Yield the checks of this host, the cheap ones first."""
    yield check_python()
    yield check_cpus()
    yield from check_gpus()
    yield check_name(request)
    yield check_interface(request)
    yield check_ports(request)
    yield from check_folder(request)
    yield check_space("/tmp", Path(os.environ.get("TMPDIR") or "/tmp"))
    yield check_space("/dev/shm", Path("/dev/shm"))
    if not request.quick:
        yield from check_torch()


def check_python() -> Check:
    """The version of Python against those that are tested."""
    version, found = platform.python_version(), sys.version_info[:2]
    oldest, newest = (".".join(map(str, item)) for item in PYTHONS)
    if found < PYTHONS[0]:
        hint = f"use Python {oldest} to {newest}"
        return Check("Python", "failure", version, hint)
    if found > PYTHONS[1]:
        return Check("Python", "warning", version, f"not tested; tested are {oldest} to {newest}")
    return Check("Python", "ok", f"{version} ({sys.executable})")


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


def check_gpus() -> Iterator[Check]:
    """The driver, and every GPU that this process would use."""
    if not Path("/proc/driver/nvidia/version").exists():
        yield Check("GPU", "ok", "none: there is no NVIDIA driver, runs use CPUs")
        return
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # whatever a broken installation raises
        hint = "check `nvidia-smi` and the kernel log; a driver update needs a reboot"
        yield Check("GPU", "failure", f"the driver does not answer: {error}", hint)
        return
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        yield Check("driver", "ok", f"{driver}, CUDA {driver_cuda(pynvml)}")
        for index in range(pynvml.nvmlDeviceGetCount()):
            chosen = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
            if chosen is None or str(index) in chosen or not all(map(str.isdigit, chosen)):
                yield check_gpu(pynvml, index)
    finally:
        pynvml.nvmlShutdown()


def driver_cuda(nvml: Any) -> str:
    """The newest CUDA that the driver supports."""
    number = int(nvml.nvmlSystemGetCudaDriverVersion())
    return f"{number // 1000}.{number % 1000 // 10}"


def check_gpu(nvml: Any, index: int) -> Check:
    """Errors, temperature, free memory and other processes of one GPU."""
    name = f"GPU {index}"
    problem = gpu_problem(nvml, index)
    if problem:
        return Check(name, "failure", problem, "administrators can reset or replace it; exclude the node")
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    free, total = memory.free / 2**30, memory.total / 2**30
    value = f"{_text(nvml.nvmlDeviceGetName(handle))}, {free:.1f} of {total:.1f} GiB free, {temperature} C"
    pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    if pids or memory.used > BUSY_SHARE * memory.total:
        who = f"processes {', '.join(map(str, pids))}" if pids else "something"
        return Check(name, "warning", value, f"{who} use it: `nvidia-smi` and `ps -o user,args -p PID`")
    if temperature >= HOT_C:
        return Check(name, "warning", value, "it is hot and will lower its clocks: check its cooling")
    return Check(name, "ok", value)


def check_torch() -> Iterator[Check]:
    """The release of torch, and whether it can use the GPUs."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_FACTS], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        hint = "the filesystem of the environment is slow: copy it to a local disk, or use a container"
        yield Check("torch", "failure", f"took longer than {TORCH_TIMEOUT_S:.0f} s to import", hint)
        return
    if done.returncode:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or ["it crashed"])[-1]
        yield Check("torch", "failure", last, f"`{sys.executable} -c 'import torch'` shows all of it")
        return
    found = json.loads(done.stdout.splitlines()[-1])
    value = f"{found['version']}, CUDA {found['cuda'] or 'none'}, NCCL {found['nccl'] or 'none'}"
    problem = release_problem(found["version"])
    if problem is not None:
        yield Check("torch", "failure", value, problem[1])
        return
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if has_driver and found["cuda"] is None:
        yield Check("torch", "failure", f"{value}: built without CUDA", cuda_torch_hint(sys.executable))
    elif has_driver and not found["gpus"]:
        hint = "install a torch for the CUDA that the line `driver` has, or update the driver"
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            hint = "CUDA_VISIBLE_DEVICES is empty, which hides the GPUs: unset it"
        yield Check("torch", "failure", f"{value}: sees no GPU", hint)
    else:
        yield Check("torch", "ok", value)


def check_name(request: Request) -> Check:
    """Whether the names of the other hosts, and of this one, can be resolved."""
    for name in request.peers:
        found = resolved(name)
        hint = f"add {name} to DNS or /etc/hosts there: the ranks connect to each other by name"
        if not found:
            return Check("name", "failure", f"{name} cannot be resolved, and neither can its NodeAddr", hint)
        if not _addresses_of(name):
            hint = (
                f"trainkit uses its NodeAddr {found[0]}; scripts that use the name fail: add it to /etc/hosts"
            )
            return Check("name", "warning", f"{name} cannot be resolved", hint)
        if all(address.startswith("127.") for address in found):
            hint = (
                f"/etc/hosts there maps {name} to {found[0]}, which other hosts cannot reach: use its address"
            )
            return Check("name", "failure", f"{name} is {', '.join(found)}", hint)
    own = socket.gethostname()
    if not _addresses_of(own):
        hint = f"add {own} to DNS or /etc/hosts: programs that listen at their host's name fail"
        return Check("name", "warning", f"this host's own name {own} cannot be resolved", hint)
    others = f"; {len(request.peers)} other hosts can be resolved" if request.peers else ""
    return Check("name", "ok", f"this host is {own}{others}")


def resolved(name: str) -> list[str]:
    """The IPv4 addresses of a host of the step: those of its name, else of its NodeAddr in Slurm."""
    found = _addresses_of(name)
    if not found:
        with contextlib.suppress(TrainkitError):  # then there is none
            found = _addresses_of(node_addr(name, patience_s=0.0))
    return found


def _addresses_of(name: str) -> list[str]:
    try:
        return sorted({str(item[4][0]) for item in socket.getaddrinfo(name, None, socket.AF_INET)})
    except (OSError, UnicodeError):
        return []


def check_interface(request: Request) -> Check:
    """The network interface between the nodes."""
    peer = request.peers[0] if request.peers else None
    try:
        environ, reason = network_environ(request.network, peer)
    except TrainkitError as error:
        return Check("interface", "failure", error.message, error.hint)
    usable, chosen = usable_interfaces(), environ.get("GLOO_SOCKET_IFNAME")
    if chosen not in (None, "lo") and chosen not in usable:
        state = "has no address" if chosen not in addresses().values() else "is down"
        others = f"; usable are {', '.join(usable)}" if usable else ""
        hint = f"`ip link set {chosen} up` as root, or another launch.network{others}"
        return Check("interface", "failure", f"{chosen} {state}", hint)
    if peer is not None and chosen is None:
        hint = "check `ip route`, and set launch.network to the interface between the nodes"
        return Check("interface", "failure", reason, hint)
    return Check("interface", "ok", reason)


def check_ports(request: Request) -> Check:
    """A port at which rank 0 can listen."""
    if request.port is not None:
        if is_free(request.port):
            return Check("port", "ok", f"{request.port} is free")
        hint = f"`ss -ltnp 'sport = :{request.port}'` shows who listens; trainkit chooses a free port itself"
        return Check("port", "failure", f"{request.port} is in use", hint)
    candidates = candidate_ports(str(os.getpid()), 0, ephemeral_range())
    free = [port for port in candidates if is_free(port)]
    value = f"{len(free)} of {len(candidates)} tried ports are free"
    if candidates and not free:
        return Check("port", "failure", value, "`ss -ltn` shows what listens on this host")
    return Check("port", "ok", value)


def check_folder(request: Request) -> Iterator[Check]:
    """Whether checkpoints can be written here, how fast, and whether the clocks agree."""
    folder = request.folder
    existing = next(item for item in (folder, *folder.parents) if item.is_dir())
    try:
        found = os.statvfs(existing)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing) as name:
            yield _free_space("disk", existing, found)
            with contextlib.suppress(StopIteration):
                yield _write_speed(Path(name), request.quick)
            yield _renames(Path(name))
            yield _clock(Path(name))
    except OSError as error:
        hint = "choose another --run-dir, or check its mount options and `ls -ld`"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "delete old runs or checkpoints (`trainkit ckpt prune`), or check `quota`"
        yield Check("disk", "failure", f"{existing} cannot be written: {error.strerror or error}", hint)


def check_space(name: str, folder: Path) -> Check:
    """The free space of a folder for temporary files."""
    if not folder.is_dir():
        return Check(name, "ok", "there is none")
    return _free_space(name, folder, os.statvfs(folder), few_gib=0.5)


def _free_space(name: str, folder: Path, found: os.statvfs_result, few_gib: float = FEW_GIB) -> Check:
    free = found.f_bavail * found.f_frsize / 2**30
    value = f"{free:,.1f} GiB free in {folder}"
    hint = "delete old runs or checkpoints (`trainkit ckpt prune`), or choose another disk"
    if found.f_blocks and free < min(MIN_FREE_GIB, few_gib):
        return Check(name, "failure", value, hint)
    return Check(
        name, "warning" if found.f_blocks and free < few_gib else "ok", value, hint if free < few_gib else ""
    )


def _write_speed(folder: Path, quick: bool) -> Check:
    size_mib = PROBE_MIB // 4 if quick else PROBE_MIB
    block = os.urandom(2**20)  # which no filesystem can compress
    started_s = time.monotonic()
    with (folder / "probe").open("wb") as file:
        for _ in range(size_mib):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written_s = time.monotonic() - started_s
        waits_s = []
        for _ in range(NUM_FSYNCS):
            file.write(block[:4096])
            file.flush()
            began_s = time.monotonic()
            os.fsync(file.fileno())
            waits_s.append(time.monotonic() - began_s)
    speed, wait_s = size_mib / max(written_s, 1e-6), sorted(waits_s)[NUM_FSYNCS // 2]
    value = f"{speed:,.0f} MiB/s for {size_mib} MiB with fsync; fsync of 4 KiB {1e3 * wait_s:.1f} ms"
    if speed < SLOW_MIB_S or wait_s > SLOW_FSYNC_S:
        hint = "checkpoints will take long: save less often, or use a faster filesystem with --run-dir"
        return Check("write speed", "warning", value, hint)
    return Check("write speed", "ok", value)


def _renames(folder: Path) -> Check:
    (folder / "partial").mkdir()
    (folder / "partial" / "file").write_text("x")
    (folder / "partial").rename(folder / "published")
    if not (folder / "published" / "file").is_file():
        hint = "checkpoints are published by renaming a folder: use another filesystem"
        return Check("rename", "failure", f"a renamed folder is not complete in {folder.parent}", hint)
    return Check("rename", "ok", "a folder can be published by renaming it")


def _clock(folder: Path) -> Check:
    """This host's clock against that of the file server, or against itself on a local disk."""
    offset_s = clock_offset_s(folder)
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        ahead = "ahead of" if offset_s > 0 else "behind"
        value = f"{abs(offset_s):.0f} s {ahead} the clock of the run folder's file server"
        hint = "ask the administrators to synchronize it; `chronyc tracking` shows the offset"
        return Check("clock", "failure", value, hint)
    return Check("clock", "ok", f"{abs(offset_s):.1f} s from the run folder's file server")


def node_facts(request: Request) -> dict[str, Any]:
    """What must be the same on all nodes, and what a measurement of the bandwidth needs to know."""
    versions = {"Python": platform.python_version()}
    for name in COMPARED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    package = Path(__file__).parents[1]
    content = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content.update(path.read_bytes())
    interface = interface_to(request.peers[0]) if request.peers else None
    return {
        "host": own_host(),
        "versions": {**versions, "trainkit's code": f"{content.hexdigest()[:12]} in {package}"},
        "links": link_gbit_s(interface if request.network in PRESETS else request.network),
        "num_gpus": num_gpus(),
        "port": choose_port(str(os.getpid()), 0),
    }


def num_gpus() -> int:
    """The GPUs that a process would see here, as the driver and CUDA_VISIBLE_DEVICES say."""
    if not Path("/proc/driver/nvidia/version").exists():
        return 0
    chosen = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if chosen is not None:
        return len(chosen)
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # whatever a broken installation raises; `check_gpus` says it
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def measure(request: Request, layout: Layout) -> dict[str, Any]:
    """Measure the bandwidth as the host of a layout; returns what `run_ranks` does."""
    peer = request.peers[0] if request.peers else None
    try:
        environ, _ = network_environ(request.network, peer)
    except TrainkitError as error:
        return {"error": error.message}
    return run_ranks(layout, own_host(), {**os.environ, **environ})


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def main(argv: Sequence[str] | None = None) -> int:
    """Check this node as the JSON on the command line asks; prints the result for `received`.

    Then measures the bandwidth if a `Layout` arrives on stdin, and prints that too.
    """
    values = json.loads((sys.argv[1:] if argv is None else argv)[0])
    request = Request(**{**values, "folder": Path(values["folder"])})
    hosts = os.environ.get("SLURM_STEP_NODELIST")
    if hosts is not None:
        peers = tuple(host for host in expand_hosts(hosts) if host != own_host())
        request = replace(request, peers=peers)
    facts = node_facts(request)
    checks = [{**check.to_dict(), "host": facts["host"]} for check in check_node(request)]
    # The reader compares the clocks when the message arrives.
    send({"kind": "facts", "facts": facts, "checks": checks, "time_s": time.time()})
    line = sys.stdin.readline()
    if line.strip():
        layout = Layout.from_json(line)
        # Each node finds the first one by its own name service.
        addr = (resolved(layout.hosts[0]) or [layout.addr])[0] if request.peers else layout.addr
        send({"kind": "bandwidth", "bandwidth": measure(request, replace(layout, addr=addr))})
    return 0


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
