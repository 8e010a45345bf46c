"""Set up a rank's device, process groups and device mesh, after a startup barrier for all ranks.

torch's rendezvous blocks in C++ until the last rank has arrived. While torch's rendezvous blocks, missing
ranks cannot be reported, and a rank that receives a stop signal either hangs or makes other ranks hang.
Therefore, each rank first registers in the rendezvous store for trainkit's own barrier, and then polls the
key `verdict`, which tells all ranks how to proceed. The last rank to arrive sets `verdict` to "go", a rank
with a stop signal sets it to "stop", and after the timeout, rank 0 sets it to the list of missing ranks. If
several ranks set `verdict`, the first value is used.

All ranks poll the same server, so the polling interval grows with the number of ranks. The store's blocking
wait would need only one request, but a stop signal cannot interrupt that wait.
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
"""Timeout of the startup barrier; long, because one rank may compile while the others wait."""
COLLECTIVE_TIMEOUT = START_TIMEOUT + timedelta(minutes=1)
"""Timeout of collectives during training. The watchdog has a shorter timeout, so that it can name the
blocking rank before the collective times out."""
LOCAL_TIMEOUT = timedelta(days=7)
"""Timeout of collectives on a single machine; long, so that a collective paused with Ctrl-Z does not fail
after `fg`."""
MAX_FILES = 65_536
"""Maximum number of open file descriptors per process; a job with a thousand ranks needs a few thousand."""
ONE_PROCESS = Layout()
DIGEST_BYTES = hashlib.sha256().digest_size
STRANGER_HINT = "every user who can reach the compute nodes can do this: see `docs/slurm-admins.md`"
PCI_DEVICES = Path("/sys/bus/pci/devices")
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """A rank's device, process groups and position among the ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    """The device mesh; None for a single process, unless ``parallel.mesh_of_one`` or ``parallel.offload`` is
    set.

    The mesh always has the dimension ``dp_shard``, and has ``dp_replicate``, ``pp`` and ``tp`` only if their
    size is larger than 1. ``dp_shard`` includes the context-parallel ranks, because parameters are sharded
    across them as well.
    """
    checkpoint_group: dist.ProcessGroup | None
    """A separate gloo process group for checkpoints, because asynchronous saves run collectives in another
    thread."""
    layout: Layout = ONE_PROCESS
    cp_group: dist.ProcessGroup | None = None
    """The group of context-parallel ranks that share a sequence; None without context parallelism."""
    nonce: str = field(default="", repr=False)
    """A secret shared by the ranks of this attempt, used to reject values sent by other processes."""
    timeout: timedelta = COLLECTIVE_TIMEOUT
    """The timeout of collectives."""
    expert_mesh: DeviceMesh | None = None
    """The mesh of the experts' parameters; None unless experts are divided over several ranks.

    The dimensions ``dp_shard`` and ``tp`` of `mesh` together are divided into ``expert_shard`` and ``ep``.
    """
    is_simulated: bool = False
    """True if the other ranks are only simulated and tensors contain no data."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def place(self) -> Place:
        """Return the coordinates of this rank in the parallel layout."""
        return self.layout.place(self.rank)

    @property
    def dp_rank(self) -> int:
        """Return the data-parallel rank, which determines the samples that this rank reads."""
        return self.layout.dp_rank(self.rank)

    @property
    def counts_samples(self) -> bool:
        """Return whether this rank reports its sample count.

        If several ranks process the same samples, only one of them reports the count.
        """
        place = self.place
        return not (place.pp or place.cp or place.tp)

    @property
    def distributed(self) -> bool:
        """Return whether this rank has initialized process groups."""
        return self.mesh is not None


def select_device(kind: str, local_rank: int, *, is_task: bool = False, dtype: str = "") -> torch.device:
    """Select and return the device of this rank.

    `kind` is ``cpu`` or ``cuda``; for `is_task`, see `gpu_index`. Raises TrainkitError if torch sees no GPU
    for this rank, or if the GPU does not support `dtype`. The error's exit code is 78 if restarting the run
    cannot help.
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
            hint=GPU_BINDING_HINT if is_bound else "run `nvidia-smi` on this node, and check the node's log",
            exit_code=EXIT_NO_RESTART if is_bound else None,
        )
    device = torch.device("cuda", index)
    # `set_device` also prevents DeviceMesh from selecting a GPU by LOCAL_RANK, which may be the wrong GPU.
    torch.cuda.set_device(device)
    try:
        torch.empty(1, device=device)
    except RuntimeError:
        # Most virtual GPUs lack the virtual memory management that expandable segments need.
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
    """Pin this process to the CPUs nearest its GPU, unless too few of these CPUs are available."""
    gpu: Any = torch.cuda.get_device_properties(device)
    allowed = os.sched_getaffinity(0)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # some virtual GPUs have no PCI address
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        text = (PCI_DEVICES / address / "local_cpulist").read_text().strip()
        ranges = (part.partition("-") for part in text.split(","))
        near = {cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)} & allowed
        if near != allowed and len(near) >= torch.get_num_threads():
            os.sched_setaffinity(0, near)
            log.info(f"bound to the {len(near)} of {len(allowed)} CPUs nearest to the GPU (launch.numa)")


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
    """Wait for the other ranks and build the device mesh; return None if the ranks agreed to stop.

    With `mesh_of_one`, a mesh is built even if there is only one rank. `on_arrival` is called when all ranks
    have passed the startup barrier, before process groups are created. If `store_file` is given, ranks on a
    single machine use this file as their store instead of a TCP port, to which any user of the machine could
    connect. Raises TrainkitError if ranks are missing or if two ranks use the same GPU.
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
        # Even if this rank sees only one GPU, Slurm may have assigned that GPU to other tasks too.
        refuse_shared_gpu(env, gpu, store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = COLLECTIVE_TIMEOUT if file is None else LOCAL_TIMEOUT
    authenticate_objects(partial(seal, env.nonce), partial(unseal, env.nonce))
    dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    return make_world(env.rank, device, layout, timeout, env.nonce)


def gpu_uuid(device: torch.device) -> str:
    """Return a GPU's UUID; "" for a CPU or a MIG slice, which may report the UUID of the whole GPU."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return "" if "MIG" in properties.name.split() else str(properties.uuid)


def _raise_open_file_limit(count: int) -> None:
    """Raise the soft limit on open file descriptors, because each process group opens many sockets."""
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
    """Return this rank's `World`; call this function after `init_process_group`, with the attempt's nonce."""
    checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)
    mesh = build_mesh(device, layout)
    expert_mesh = build_expert_mesh(device, layout)
    meshes = [each for each in (mesh, expert_mesh) if each is not None]
    mesh_groups = [group for each in meshes for group in each.get_all_groups()]
    for group in mesh_groups:
        set_timeout(group, timeout)
    cp_group = context_group(layout, timeout)
    # A process group connects its ranks in its first collective. Run a collective now, so that broken
    # connections between ranks are detected at startup.
    dist.all_reduce(torch.ones(1, device="cpu"), group=checkpoint_group)
    groups = [dist.group.WORLD, *mesh_groups, *([] if cp_group is None else [cp_group])]
    for each in dict.fromkeys(groups):  # a mesh dimension that spans all ranks may reuse the default group
        one = torch.ones(1, device=device)
        dist.all_reduce(one, group=each)
        one.item()
    if expert_mesh is not None:  # the ranks that exchange rows of experts connect in pairs
        ones = torch.ones(layout.ep, device=device)
        dist.all_to_all_single(torch.empty_like(ones), ones, group=expert_mesh["ep"].get_group())
    if layout.pp > 1:
        # Collectives do not connect all pairs of ranks that exchange data in a pipeline. Send a tensor
        # between neighbouring stages, and between the first and the last stage, to open these connections
        # now.
        group, own = mesh["pp"].get_group(), layout.place(rank).pp
        after, before = (own + 1) % layout.pp, (own - 1) % layout.pp
        ways = [(after, before), (before, after)]
        sends = [(dist.isend, torch.ones(1, device=device), to) for to, _ in ways]
        receives = [(dist.irecv, torch.empty(1, device=device), source) for _, source in ways]
        for work in exchange(group, *sends, *receives):
            work.wait()
    return World(
        rank, layout.world_size, device, mesh, checkpoint_group, layout, cp_group, nonce, timeout, expert_mesh
    )


def exchange(
    group: dist.ProcessGroup, *operations: tuple[Callable[..., Any], torch.Tensor, int]
) -> list[dist.Work]:
    """Start sends and receives, each given as `dist.isend` or `dist.irecv`, a tensor and a peer's group rank.

    The operations are batched, because NCCL would otherwise create a communicator for each pair of ranks.
    """
    batch = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer) for operation, tensor, peer in operations
    ]
    return dist.batch_isend_irecv(batch)


def build_mesh(device: torch.device, layout: Layout) -> DeviceMesh:
    """Return the device mesh for data, pipeline and tensor parallelism."""
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.shards,
        "tp": layout.tp,
    }
    # Every mesh dimension needs a process group, so dimensions of size 1 are omitted. `fully_shard` needs the
    # dimension `dp_shard` even if its size is 1.
    dims = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def build_expert_mesh(device: torch.device, layout: Layout) -> DeviceMesh | None:
    """Return the device mesh for the experts' parameters, or None without expert parallelism.

    The mesh has the same ranks in the same order as the result of `build_mesh`. `fully_shard` needs the
    dimension `expert_shard` even if its size is 1.
    """
    if layout.ep == 1:
        return None
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "expert_shard": layout.expert_shards,
        "ep": layout.ep,
    }
    dims = {name: size for name, size in sizes.items() if size > 1 or name == "expert_shard"}
    return init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def context_group(layout: Layout, timeout: timedelta = COLLECTIVE_TIMEOUT) -> dist.ProcessGroup | None:
    """Return the group of ranks that share sequences with this rank, or None without context parallelism."""
    if layout.cp == 1:
        return None
    ranks = torch.arange(layout.world_size, device="cpu").view(-1, layout.cp, layout.tp)
    groups = ranks.transpose(1, 2).flatten(0, 1).tolist()
    found = cast(Any, dist).new_subgroups_by_enumeration(groups, timeout=timeout)
    own: dist.ProcessGroup = found[0]
    return own


def copy_group(world: World) -> dist.ProcessGroup | None:
    """Return the group of ranks that together hold one copy of the weights of a pipeline stage.

    Returns None if each rank holds a whole copy. This is a collective, so every rank must call it.
    """
    layout, mesh = world.layout, world.mesh
    num_shards = layout.dp_shard * layout.cp
    if mesh is None or num_shards * layout.tp == 1:
        return None
    if layout.tp == 1 or num_shards == 1:
        return mesh["tp" if num_shards == 1 else "dp_shard"].get_group()
    if num_shards * layout.tp == layout.world_size:
        return dist.group.WORLD
    groups = torch.arange(layout.world_size, device="cpu").view(-1, num_shards * layout.tp).tolist()
    found = cast(Any, dist).new_subgroups_by_enumeration(groups, timeout=world.timeout)
    own: dist.ProcessGroup = found[0]
    dist.all_reduce(torch.ones(1, device=world.device), group=own)  # connects the ranks
    return own


def broadcast_from_main(value: T, world: World) -> T:
    """Broadcast rank 0's value, encoded as JSON, and return it on all ranks.

    Raises TrainkitError if a process outside this attempt sent the value.
    """
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
    """Gather the values of all ranks on all ranks; tuples become lists, because values are sent as JSON.

    `group` must use the gloo backend; the default is the checkpoint group. Raises TrainkitError if a process
    outside this attempt sent one of the values.
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
    """Return a value prefixed with a keyed digest that only ranks of this attempt can compute."""
    return _digest_of(nonce, value) + value


def unseal(nonce: str, sealed: bytes) -> bytes:
    """Return a value without the digest added by `seal`; raise TrainkitError if the digest is wrong."""
    digest, value = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest_of(nonce, value)):
        raise TrainkitError(
            "a process that is not a rank of this attempt has sent a value to this rank", hint=STRANGER_HINT
        )
    return value


def _digest_of(nonce: str, value: bytes) -> bytes:
    # Digests in the rendezvous store use a different key, because anyone can read the store.
    return hmac.digest(f"values {nonce}".encode(), value, hashlib.sha256)


def _as_tensor(text: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.ljust(size, b"\0")), dtype=torch.uint8)


def group_ender() -> Callable[[], None]:
    """Return a function that destroys the process groups, waiting for at most `GROUPS_END_S` seconds.

    Call `group_ender` before Python shuts down, because threads can no longer be started during shutdown.
    """
    requested = threading.Event()

    def end() -> None:
        requested.wait()
        dist.destroy_process_group()

    thread = threading.Thread(target=end, daemon=True)
    thread.start()

    def request_end() -> None:
        requested.set()
        # NCCL waits for the other ranks, but some may no longer respond, so limit the wait.
        thread.join(GROUPS_END_S)

    return request_end


def exit_process(exit_code: int) -> None:
    """Flush stdout and stderr and exit immediately, skipping the interpreter's shutdown.

    While gloo threads are running, a normal exit occasionally ends in SIGABRT, which would make a completed
    job appear to have crashed.
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
    """Append an event to the run's events.jsonl; if writing fails, log the error and continue."""
    try:
        log_event(attempt.run, attempt.number, event, **fields)
    except OSError as error:
        log.error(f"cannot write event {event} to {attempt.run.events_file} ({error})")


LOOPBACK = "127.0.0.1"
IDENTITY_TIMEOUT = timedelta(seconds=60)
"""Timeout for reading the attempt's identity, which rank 0 writes to the store as soon as it starts
listening."""
STOP_GRACE_S = 20.0
"""Seconds for which a rank with a stop signal tries to notify the other ranks."""


def startup_barrier(
    env: RankEnv, stop: StopRequest, timeout: timedelta, gpu: str = "", file: Path | None = None
) -> Store | None:
    """Wait until all ranks have arrived; return their shared store, or None if the ranks agreed to stop.

    `gpu` is the UUID of this rank's GPU, recorded for `refuse_shared_gpu`. `file` is the store's file if all
    ranks are on one machine; without a file, rank 0 serves the store over TCP. After the timeout, raises
    TrainkitError with the missing ranks.
    """
    timeout_s = timeout.total_seconds()
    if file is None and env.rank != 0 and not _wait_for_main(env, stop, timeout_s):
        return None
    deadline = time.monotonic() + timeout_s
    store = _open_attempt_store(env, timeout) if file is None else _store_in(file, env, timeout)
    if stop:
        # Set "stop" before registering this rank's arrival, because the last rank to arrive sets "go".
        _decide(env, store, "stop")
    store.set(_arrival(env.rank), _sealed(env, _arrival(env.rank), f"{socket.gethostname()} {gpu}"))
    if store.add("num_arrived", 1) >= env.world_size and not _missing_ranks(env, store):
        _decide(env, store, "go")
    while not store.check(["verdict"]):
        if stop:
            _decide(env, store, "stop")
        elif (env.rank == 0 or file is not None) and time.monotonic() > deadline:
            # Over TCP, only rank 0 looks for missing ranks; otherwise thousands of ranks would each query
            # every other rank.
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
    """Raise FatalError if a lower-numbered rank on this node has registered with the same GPU."""
    for other in range(env.rank - env.local_rank, env.rank):
        if (_read(env, store, _arrival(other)) or "").endswith(f" {gpu}"):
            raise FatalError(
                f"ranks {other} and {env.rank} on {socket.gethostname()} have the same GPU, {gpu}",
                hint=GPU_BINDING_HINT,
            )


def _pause_s(world_size: int) -> float:
    """Return a rank's polling interval in seconds, which grows with the number of ranks."""
    return min(2.0, max(0.05, world_size / 4000))


def _missing_ranks(env: RankEnv, store: Store) -> list[int]:
    return [rank for rank in range(env.world_size) if _read(env, store, _arrival(rank)) is None]


def _arrival(rank: int) -> str:
    return f"arrived/{rank}"


def _decide(env: RankEnv, store: Store, verdict: str) -> None:
    store.compare_set("verdict", "", _sealed(env, "verdict", verdict))


def _digest(env: RankEnv, text: str) -> str:
    """Return a keyed digest of `text` that only this attempt can compute and that hides the nonce."""
    return hmac.new(env.nonce.encode(), text.encode(), hashlib.sha256).hexdigest()


def _sealed(env: RankEnv, key: str, text: str) -> str:
    return f"{_digest(env, f'{key} {text}')} {text}"


def _read(env: RankEnv, store: Store, key: str) -> str | None:
    """Return the value of a key in the store, or None if no rank of this attempt has stored the value."""
    if not store.check([key]):
        return None
    digest, _, text = store.get(key).decode(errors="replace").partition(" ")
    # Compare bytes: another process may have stored non-ASCII text, which `compare_digest` rejects in a
    # string.
    return text if hmac.compare_digest(digest.encode(), _digest(env, f"{key} {text}").encode()) else None


def _open_store(env: RankEnv, timeout: timedelta) -> TCPStore:
    """Open the TCP store: rank 0 listens (on loopback if all ranks are local), other ranks connect."""
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
        # torch's libuv server cannot take over a listening socket.
        return store(master_listen_fd=listener.detach(), use_libuv=False)
    return store()


def _store_in(file: Path, env: RankEnv, timeout: timedelta) -> Store:
    """Return a store backed by a file that only the file's owner can open."""
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    store = FileStore(str(file))
    store.set_timeout(timeout)
    return PrefixStore(_digest(env, "keys"), store)


def _open_attempt_store(env: RankEnv, timeout: timedelta) -> Store:
    """Return rank 0's store, with all keys prefixed for this attempt.

    Raises TrainkitError if the store at rank 0's address belongs to another job.
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
                f"rank {env.rank} has connected to another job at {env.master_addr}:{env.master_port}, "
                "not rank 0 of its own attempt",
                hint="the other job took the port before rank 0 could; the next attempt chooses another port",
            )
        store.set_timeout(timeout)
    return PrefixStore(_digest(env, "keys"), store)


def _wait_for_main(env: RankEnv, stop: StopRequest, timeout_s: float) -> bool:
    """Wait until rank 0 listens; return False if it does not within `STOP_GRACE_S` of a stop signal."""
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
                    hint="check the log of rank 0: rank 0 may have failed before it started to listen",
                ) from None
            time.sleep(_pause_s(env.world_size))


def _keep_store_alive(env: RankEnv, store: Store, num_ranks: int) -> None:
    """Keep rank 0, which serves the store, alive until `num_ranks` ranks have read the verdict."""
    store.add("num_left", 1)
    deadline = time.monotonic() + STOP_GRACE_S
    while env.rank == 0 and store.add("num_left", 0) < num_ranks and time.monotonic() < deadline:
        time.sleep(_pause_s(num_ranks))
