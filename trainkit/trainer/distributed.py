"""The device, the process groups and the device mesh of one rank, and the barrier before they exist.

torch's rendezvous blocks in C++ until the last rank has arrived: missing ranks cannot be named, and a rank
that is asked to stop during it either hangs or leaves the others hanging. At the barrier each rank reports to
the store and then polls one key, which decides for all: the last rank to arrive sets "go", a rank that was
asked to stop sets "stop", rank 0 sets those that are missing after the timeout, and the first value wins.

Thousands of ranks ask one server, so they ask less often than a few. The store's own wait would ask once, but
it cannot be interrupted by a stop signal.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import hmac
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # all documented, but not in its `__all__`
    DistStoreError,
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainkit.cluster.machine import NoDriver, driver_cuda, nvml
from trainkit.errors import EXIT_NO_RESTART, FatalError, TrainkitError
from trainkit.job.rank_env import ATTENDED_VARIABLE, GPU_BINDING_HINT, RankEnv, gpu_index, visible_gpus
from trainkit.job.signals import StopRequest
from trainkit.plan.gpus import bf16_problem
from trainkit.plan.launch import Layout, Place
from trainkit.plan.torch_build import TorchBuild
from trainkit.run.events import log_event
from trainkit.run.rundir import AttemptDir
from trainkit.trainer.torch_private import authenticate_objects, fix_segments, set_timeout

START_TIMEOUT = timedelta(minutes=30)
"""Long, because one rank may compile in its first step while the others wait."""
COLLECTIVE_TIMEOUT = START_TIMEOUT + timedelta(minutes=1)
"""Longer than the watchdog's limit: the watchdog names the blocking rank, a timed-out collective does not."""
LOCAL_TIMEOUT = timedelta(days=7)
"""On one machine, where Ctrl-Z stops all ranks, some of them in a collective: it must not fail after `fg`."""
MAX_FILES = 65_536
"""Open file limit; a job of a thousand ranks needs a few thousand files."""
ONE_PROCESS = Layout()
DIGEST_BYTES = hashlib.sha256().digest_size
STRANGER_HINT = "every user who reaches the compute nodes can: see `docs/slurm-admins.md`"
PCI_DEVICES = Path("/sys/bus/pci/devices")
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This rank, its device and its process groups."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    """Dimensions ``dp_replicate`` and ``dp_shard``, and ``pp`` and ``tp`` if larger than 1. ``dp_shard``
    includes cp: parameters are sharded over both. None for a single process without ``parallel.mesh_of_one``
    and ``parallel.offload``.
    """
    checkpoint_group: dist.ProcessGroup | None
    """Separate from the other groups, since asynchronous saves run collectives in a thread of their own."""
    layout: Layout = ONE_PROCESS
    cp_group: dist.ProcessGroup | None = None
    """The ranks that share a sequence; None without context parallelism."""
    nonce: str = field(default="", repr=False)
    """What only ranks of this attempt know, by which they tell each other's values from a stranger's."""
    is_simulated: bool = False
    """Whether the other ranks do not exist and tensors have no values."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def place(self) -> Place:
        """The coordinates of this rank in the layout."""
        return self.layout.place(self.rank)

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank, which selects the samples that this rank reads."""
        return self.layout.dp_rank(self.rank)

    @property
    def counts_samples(self) -> bool:
        """Whether this rank counts its samples: one of the ranks that share the same samples does."""
        place = self.place
        return not (place.pp or place.cp or place.tp)

    @property
    def distributed(self) -> bool:
        """Whether there are process groups."""
        return self.mesh is not None


def select_device(kind: str, local_rank: int, *, is_task: bool = False, dtype: str = "") -> torch.device:
    """The device of this rank; `kind` is ``cpu`` or ``cuda``, `is_task` as for `gpu_index`.

    Raises TrainkitError when torch sees no GPU for this rank, or cannot use it, in `dtype`; with exit code 78
    if it never would.
    """
    if kind == "cpu":
        return torch.device("cpu")
    driver = None
    with contextlib.suppress(NoDriver), nvml() as library:
        driver = driver_cuda(library)
    build = TorchBuild(sys.executable, torch.__version__, torch.version.cuda, torch.version.hip)
    _refuse(build.problem(driver=driver))
    count = torch.cuda.device_count()
    index = gpu_index(local_rank, count, is_task=is_task)
    if index is None:
        listed = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        is_bound = listed is not None and len(listed) <= local_rank
        raise TrainkitError(
            f"local rank {local_rank} has no GPU: torch sees {count} on this node",
            hint=GPU_BINDING_HINT if is_bound else "check `nvidia-smi` and the log of this node",
            exit_code=EXIT_NO_RESTART if is_bound else None,
        )
    device = torch.device("cuda", index)
    # Also keeps DeviceMesh from selecting the GPU with the number in LOCAL_RANK.
    torch.cuda.set_device(device)
    try:
        torch.empty(1, device=device)
    except RuntimeError:
        # Expandable segments need virtual memory, which most virtual GPUs lack.
        fix_segments()
        torch.empty(1, device=device)
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if archs := [int(arch.strip("smcopute_af")) for arch in torch.cuda.get_arch_list() if build.cuda]:
        build = replace(build, oldest=divmod(min(archs), 10))
    _refuse(build.problem(name, capability, driver))
    if dtype == "bf16" and build.cuda and capability < (8, 0):
        _refuse(bf16_problem(name), "precision.dtype ")
    return device


def bind_to_gpu(device: torch.device) -> None:
    """Restrict this process to the CPUs next to its GPU, unless Slurm bound it or left too few of them."""
    gpu: Any = torch.cuda.get_device_properties(device)
    allowed = os.sched_getaffinity(0)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # as for some virtual GPUs
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        text = (PCI_DEVICES / address / "local_cpulist").read_text().strip()
        ranges = (part.partition("-") for part in text.split(","))
        near = {cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)} & allowed
        if near != allowed and len(near) >= torch.get_num_threads():
            os.sched_setaffinity(0, near)
            log.info(f"bound to {len(near)} of {len(allowed)} CPUs, those next to the GPU (launch.numa)")


def _refuse(problem: tuple[str, str] | None, subject: str = "") -> None:
    if problem is not None:
        raise FatalError(subject + problem[0], problem[1])


def join_world(
    env: RankEnv,
    device: torch.device,
    layout: Layout,
    stop: StopRequest,
    *,
    mesh_of_one: bool = False,
    on_arrival: Callable[[], None] = lambda: None,
    store_file: Path | None = None,
) -> World | None:
    """Wait for the other ranks and build the mesh; returns None if the ranks agreed to stop.

    `mesh_of_one`: whether a single rank has a mesh too; `on_arrival` is called when all ranks are there,
    before they connect. Ranks of one machine meet in `store_file`, if given: every user of the machine
    reaches a port. Raises TrainkitError for ranks that do not arrive, and for two that have the same GPU.
    """
    if env.world_size == 1 and not mesh_of_one:
        return None if stop else World(0, 1, device, None, None)
    _raise_open_file_limit(MAX_FILES)
    gpu = gpu_uuid(device)
    file = store_file if env.master_addr == LOOPBACK else None
    start_timeout = LOCAL_TIMEOUT if ATTENDED_VARIABLE in os.environ else START_TIMEOUT
    store = startup_barrier(env, stop, start_timeout, gpu, file)
    if store is None:
        return None
    on_arrival()
    if gpu and device.index != env.local_rank:
        # It is the only one that this rank sees, but may not be bound to this task alone.
        refuse_shared_gpu(env, gpu, store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = COLLECTIVE_TIMEOUT if file is None else LOCAL_TIMEOUT
    authenticate_objects(partial(seal, env.nonce), partial(unseal, env.nonce))
    dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    return make_world(env.rank, device, layout, timeout, env.nonce)


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU; empty for a CPU, and for a MIG slice, which may report the UUID of the whole GPU."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return "" if "MIG" in properties.name.split() else str(properties.uuid)


def _raise_open_file_limit(count: int) -> None:
    """Raise the open file limit of this process: every group opens sockets to all its ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_world(
    rank: int,
    device: torch.device,
    layout: Layout,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
    nonce: str = "",
) -> World:
    """The world of this rank, with the nonce of its attempt; call after `init_process_group`."""
    checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)
    mesh = build_mesh(device, layout)
    for group in mesh.get_all_groups():
        set_timeout(group, timeout)
    cp_group = context_group(layout, timeout)
    # The first collective of a group connects its ranks: what keeps them from it is found now, not in a step.
    dist.all_reduce(torch.ones(1, device="cpu"), group=checkpoint_group)
    groups = [dist.group.WORLD, *mesh.get_all_groups(), *([] if cp_group is None else [cp_group])]
    for each in dict.fromkeys(groups):  # a dimension over all ranks may be the group of all
        one = torch.ones(1, device=device)
        dist.all_reduce(one, group=each)
        one.item()
    if layout.pp > 1:
        # What a collective connects are not the pairs that exchange in a pipeline: neighbours, and both ends.
        group, own = mesh["pp"].get_group(), layout.place(rank).pp
        after, before = (own + 1) % layout.pp, (own - 1) % layout.pp
        ways = [(after, before), (before, after)]
        sends = [(dist.isend, torch.ones(1, device=device), to) for to, _ in ways]
        receives = [(dist.irecv, torch.empty(1, device=device), source) for _, source in ways]
        for work in exchange(group, *sends, *receives):
            work.wait()
    return World(rank, layout.world_size, device, mesh, checkpoint_group, layout, cp_group, nonce)


def exchange(
    group: dist.ProcessGroup, *operations: tuple[Callable[..., Any], torch.Tensor, int]
) -> list[dist.Work]:
    """Start to send and receive: each is `dist.isend` or `dist.irecv`, a tensor, and a rank of the group.

    Alone, NCCL would first make a communicator for the pair; in a batch it uses that of the group.
    """
    batch = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer) for operation, tensor, peer in operations
    ]
    return dist.batch_isend_irecv(batch)


def build_mesh(device: torch.device, layout: Layout) -> DeviceMesh:
    """The device mesh over which parameters are split."""
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard * layout.cp,
        "tp": layout.tp,
    }
    # Every dimension is a process group; `fully_shard` needs that of the shards even for one.
    dims = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def context_group(layout: Layout, timeout: timedelta = COLLECTIVE_TIMEOUT) -> dist.ProcessGroup | None:
    """The ranks that share sequences with this one; None without context parallelism."""
    if layout.cp == 1:
        return None
    ranks = torch.arange(layout.world_size, device="cpu").view(-1, layout.cp, layout.tp)
    groups = ranks.transpose(1, 2).flatten(0, 1).tolist()
    found = cast(Any, dist).new_subgroups_by_enumeration(groups, timeout=timeout)
    own: dist.ProcessGroup = found[0]
    return own


def broadcast_from_main(value: T, world: World) -> T:
    """The value of rank 0, on all ranks, as JSON. Raises TrainkitError if a stranger has sent it."""
    if not world.distributed:
        return value
    text = seal(world.nonce, json.dumps(value).encode()) if world.is_main else b""
    size = torch.tensor([len(text)], device="cpu")
    dist.broadcast(size, src=0, group=world.checkpoint_group)
    sent = _as_tensor(text, int(size))
    dist.broadcast(sent, src=0, group=world.checkpoint_group)
    found: T = json.loads(unseal(world.nonce, sent.numpy().tobytes()))
    return found


def gather_from_all(value: T, world: World, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, on all ranks, as JSON; tuples arrive as lists.

    `group` is one of gloo, by default that of checkpoints. Raises TrainkitError if a stranger has sent one.
    """
    if not world.distributed:
        return [value] * world.size
    group = group or world.checkpoint_group
    text = seal(world.nonce, json.dumps(value).encode())
    sizes = torch.zeros(world.size, dtype=torch.int64, device="cpu")
    sizes[world.rank] = len(text)
    dist.all_reduce(sizes, group=group)
    sent = _as_tensor(text, int(sizes.max()))
    parts = [torch.empty_like(sent) for _ in range(world.size)]
    dist.all_gather(parts, sent, group=group)
    found = zip(parts, sizes.tolist(), strict=True)
    return [json.loads(unseal(world.nonce, part[:size].numpy().tobytes())) for part, size in found]


def seal(nonce: str, value: bytes) -> bytes:
    """A value behind a digest that only ranks of this attempt can compute."""
    return _digest_of(nonce, value) + value


def unseal(nonce: str, sealed: bytes) -> bytes:
    """The value that a rank of this attempt has sealed. Raises TrainkitError if somebody else has made it."""
    digest, value = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest_of(nonce, value)):
        raise TrainkitError(
            "a process that is not a rank of this attempt has sent a value to this rank", hint=STRANGER_HINT
        )
    return value


def _digest_of(nonce: str, value: bytes) -> bytes:
    # Another key than that of the digests in the store, which everybody can read.
    return hmac.digest(f"values {nonce}".encode(), value, hashlib.sha256)


def _as_tensor(text: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.ljust(size, b"\0")), dtype=torch.uint8)


def group_ender() -> Callable[[], None]:
    """What ends the process groups, and waits a limited time for that.

    Make it before Python exits, when no thread can be started.
    """
    asked = threading.Event()

    def end() -> None:
        asked.wait()
        dist.destroy_process_group()

    ends = threading.Thread(target=end, daemon=True)
    ends.start()

    def ask() -> None:
        asked.set()
        # NCCL waits for the other ranks, and one of them may no longer respond.
        ends.join(GROUPS_END_S)

    return ask


def exit_process(exit_code: int) -> None:
    """Flush the output and exit immediately, without the interpreter's shutdown.

    A normal exit of a process with gloo threads occasionally ends in SIGABRT, and a finished job must not
    look like a crash.
    """
    if dist.is_initialized() and exit_code == 0:
        group_ender()()
        gc.collect()
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


GROUPS_END_S = 20.0
log = getLogger(__name__)


def record_event(attempt: AttemptDir, event: str, **fields: Any) -> None:
    """Append one event; on a full disk, log the error and continue."""
    try:
        log_event(attempt.run, attempt.number, event, **fields)
    except OSError as error:
        log.error(f"cannot write event {event} to {attempt.run.events_file} ({error})")


LOOPBACK = "127.0.0.1"
IDENTITY_TIMEOUT = timedelta(seconds=60)
"""How long rank 0 may take from listening to identifying itself, which it does first."""
STOP_GRACE_S = 20.0
"""Seconds that a rank asked to stop allows for notifying the others."""


def startup_barrier(
    env: RankEnv, stop: StopRequest, timeout: timedelta, gpu: str = "", file: Path | None = None
) -> Store | None:
    """Wait for all ranks; returns the store that they share, or None if they agreed to stop.

    `gpu` is the UUID of this rank's GPU, which `refuse_shared_gpu` compares; `file` is the store of ranks on
    one machine, and without it rank 0 serves one. Raises TrainkitError with the ranks that are missing after
    the timeout.
    """
    timeout_s = timeout.total_seconds()
    if file is None and env.rank != 0 and not _wait_for_main(env, stop, timeout_s):
        return None
    deadline = time.monotonic() + timeout_s
    store = _own_part(env, timeout) if file is None else _store_in(file, env, timeout)
    if stop:
        # Before it arrives: if it is the last rank, it would set "go" first.
        _decide(env, store, "stop")
    store.set(_arrival(env.rank), _sealed(env, _arrival(env.rank), f"{socket.gethostname()} {gpu}"))
    if store.add("num_arrived", 1) >= env.world_size and not _missing_ranks(env, store):
        _decide(env, store, "go")
    while not store.check(["verdict"]):
        if stop:
            _decide(env, store, "stop")
        elif (env.rank == 0 or file is not None) and time.monotonic() > deadline:
            # Named once: thousands of ranks would otherwise each ask for every other.
            missing = _missing_ranks(env, store)
            _decide(env, store, f"missing {json.dumps(missing)}" if missing else "go")
        else:
            time.sleep(_pause_s(env.world_size))
    verdict = _read(env, store, "verdict")
    if verdict == "go":
        return store
    if verdict is None:
        raise TrainkitError(
            f"a process that is not a rank of this attempt has written to the store of rank 0 at "
            f"{env.master_addr}:{env.master_port}",
            hint=STRANGER_HINT,
        )
    if verdict != "stop":
        missing = json.loads(verdict.removeprefix("missing "))
        _keep_store_alive(env, store, env.world_size - len(missing))
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise TrainkitError(
            f"{len(missing)} of {env.world_size} ranks did not start within {timeout}: "
            f"rank {', '.join(map(str, missing[:8]))}{more}",
            hint="check the logs of the missing ranks",
        )
    _keep_store_alive(env, store, env.world_size)
    return None


def refuse_shared_gpu(env: RankEnv, gpu: str, store: Store) -> None:
    """Raise FatalError if a lower rank of this node has arrived with the same GPU."""
    for other in range(env.rank - env.local_rank, env.rank):
        if (_read(env, store, _arrival(other)) or "").endswith(f" {gpu}"):
            raise FatalError(
                f"ranks {other} and {env.rank} on {socket.gethostname()} have the same GPU, {gpu}",
                hint=GPU_BINDING_HINT,
            )


def _pause_s(world_size: int) -> float:
    """Seconds between two questions of a rank: the more ranks ask the same server, the longer."""
    return min(2.0, max(0.05, world_size / 4000))


def _missing_ranks(env: RankEnv, store: Store) -> list[int]:
    return [rank for rank in range(env.world_size) if _read(env, store, _arrival(rank)) is None]


def _arrival(rank: int) -> str:
    return f"arrived/{rank}"


def _decide(env: RankEnv, store: Store, verdict: str) -> None:
    store.compare_set("verdict", "", _sealed(env, "verdict", verdict))


def _digest(env: RankEnv, text: str) -> str:
    """What only the ranks of this attempt can compute; the nonce itself is never a part of a key or value."""
    return hmac.new(env.nonce.encode(), text.encode(), hashlib.sha256).hexdigest()


def _sealed(env: RankEnv, key: str, text: str) -> str:
    return f"{_digest(env, f'{key} {text}')} {text}"


def _read(env: RankEnv, store: Store, key: str) -> str | None:
    """What a rank of this attempt has stored; None without it, or if somebody else has."""
    if not store.check([key]):
        return None
    digest, _, text = store.get(key).decode(errors="replace").partition(" ")
    # As bytes: what a stranger has stored may not be ASCII, which `compare_digest` refuses in a string.
    return text if hmac.compare_digest(digest.encode(), _digest(env, f"{key} {text}").encode()) else None


def _open_store(env: RankEnv, timeout: timedelta) -> TCPStore:
    """Rank 0 listens, the others connect; on one machine it listens on the loopback interface only."""
    store = partial(
        TCPStore,
        env.master_addr,
        env.master_port,
        env.world_size,
        is_master=env.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    if env.rank == 0 and env.master_addr == LOOPBACK:
        listener = socket.create_server((LOOPBACK, env.master_port), backlog=env.world_size + 16)
        # The libuv server cannot take over a listening socket.
        return store(master_listen_fd=listener.detach(), use_libuv=False)
    return store()


def _store_in(file: Path, env: RankEnv, timeout: timedelta) -> Store:
    """The store in a file that only its user can open."""
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    store = FileStore(str(file))
    store.set_timeout(timeout)
    return PrefixStore(_digest(env, "keys"), store)


def _own_part(env: RankEnv, timeout: timedelta) -> Store:
    """The part of rank 0's store that belongs to this attempt, in which no other job's keys are.

    Raises TrainkitError when the store at the address of rank 0 is that of another job.
    """
    store, identity = _open_store(env, timeout), _digest(env, "attempt")
    if env.rank == 0:
        store.set("attempt", identity)
    else:
        store.set_timeout(IDENTITY_TIMEOUT)
        try:
            found = store.get("attempt").decode(errors="replace")
        except DistStoreError:
            found = ""
        if found != identity:
            raise TrainkitError(
                f"rank {env.rank} has reached another job at {env.master_addr}:{env.master_port}, "
                "not rank 0 of its own attempt",
                hint="that job took the port before rank 0 could; the next attempt chooses another one",
            )
        store.set_timeout(timeout)
    return PrefixStore(_digest(env, "keys"), store)


def _wait_for_main(env: RankEnv, stop: StopRequest, timeout_s: float) -> bool:
    """Wait until rank 0 listens; returns False if asked to stop before that."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((env.master_addr, env.master_port), timeout=1.0):
                return True
        except OSError as error:
            stopped_s = stop.received_monotonic_s
            if stopped_s is not None and time.monotonic() > stopped_s + STOP_GRACE_S:
                return False
            if time.monotonic() > deadline:
                raise TrainkitError(
                    f"rank {env.rank} cannot reach rank 0 at {env.master_addr}:{env.master_port} ({error})",
                    hint="check the log of rank 0: it may have failed before it started to listen",
                ) from None
            time.sleep(_pause_s(env.world_size))


def _keep_store_alive(env: RankEnv, store: Store, num_ranks: int) -> None:
    """Rank 0 runs the store, so it leaves last, after `num_ranks` ranks have read the verdict."""
    store.add("num_left", 1)
    deadline = time.monotonic() + STOP_GRACE_S
    while env.rank == 0 and store.add("num_left", 0) < num_ranks and time.monotonic() < deadline:
        time.sleep(_pause_s(num_ranks))
