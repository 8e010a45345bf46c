"""Tests the GPU of a rank, and the rendezvous before there is a process group."""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.support.runs import free_port, make_attempt
from tests.support.said import said
from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART, EXIT_STOPPED, TrainkitError
from trainkit.job.failure.records import suspect_host
from trainkit.job.rank_env import RankEnv
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import LaunchPlan, Layout
from trainkit.run.end import RankFailure
from trainkit.run.files import read_json
from trainkit.trainer import distributed, worker
from trainkit.trainer.distributed import join_world, select_device, startup_barrier
from trainkit.trainer.progress import Progress


class FakeCuda:
    """Answers torch's queries about GPUs, and records the selected GPU."""

    def __init__(self) -> None:
        self.count = 1
        self.uuids = ["aaaa"]
        self.name = "NVIDIA H100 80GB HBM3"
        self.selected: list[torch.device] = []
        self.capability = (9, 0)
        self.archs = ["sm_75", "sm_80", "sm_90a", "compute_120"]
        self.has_virtual_memory = True

    def empty(self, size: int, *, device: torch.device) -> None:
        assert (size, device) == (1, self.selected[-1])
        if not self.has_virtual_memory:
            raise RuntimeError("CUDA driver error: operation not supported")

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=self.name, uuid=self.uuids[device.index])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: fake.count)
    monkeypatch.setattr(torch.cuda, "set_device", fake.selected.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fake.get_device_properties)
    monkeypatch.setattr(torch, "empty", fake.empty)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: fake.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: fake.capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: fake.archs)
    return fake


@pytest.mark.parametrize(
    ("num_visible", "local_rank", "is_task", "index"),
    [(8, 3, False, 3), (8, 3, True, 3), (1, 3, True, 0), (1, 0, True, 0), (1, 0, False, 0), (4, 3, True, 3)],
)
@pytest.mark.parametrize("is_rocm", [False, True])
def test_the_gpu_of_a_rank(cuda, monkeypatch, is_rocm, num_visible, local_rank, is_task, index):
    cuda.count = num_visible
    if is_rocm:
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    device = torch.device("cuda", index)
    assert select_device("cuda", local_rank, is_task=is_task) == device
    assert cuda.selected == [device]
    assert select_device("cpu", local_rank, is_task=is_task) == torch.device("cpu")


@pytest.mark.parametrize(
    ("num_visible", "is_task", "visible", "exit_code"),
    [
        (1, False, None, EXIT_FAILED),  # the node may have lost GPUs
        (1, False, "0", EXIT_NO_RESTART),  # an agent with four ranks may use only one GPU
        (2, True, "0,1", EXIT_NO_RESTART),
        (0, True, "NoDevFiles", EXIT_NO_RESTART),
        (3, True, "0,1,2,3", EXIT_FAILED),
        (0, False, "0,1,2,3", EXIT_FAILED),
    ],
)
def test_no_gpu_for_a_rank(cuda, monkeypatch, num_visible, is_task, visible, exit_code):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cuda.count = num_visible
    with pytest.raises(TrainkitError, match=f"local rank 3 has no GPU: torch sees {num_visible}") as caught:
        select_device("cuda", 3, is_task=is_task)
    assert caught.value.exit_code == exit_code
    assert caught.value.hint
    assert cuda.selected == []


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "message", "hint"),
    [
        ("no CUDA", (9, 0), "fp16", r"torch .* was built without CUDA", "--index-url https://download.pyt"),
        ("Tesla V100-SXM2-16GB", (7, 0), "fp16", "has no kernels for the GPU Tesla V100", "/cu126`"),
        ("Tesla V100", (7, 0), "bf16", "dtype is bf16, which the tensor cores of Tesla V100", "fp16"),
        ("Tesla T4", (7, 5), "bf16", "dtype is bf16, which the tensor cores of Tesla T4", "fp16"),
        ("Tesla T4", (7, 5), "fp16", "", ""),
        ("NVIDIA A100", (8, 0), "bf16", "", ""),
    ],
)
def test_a_gpu_that_torch_or_its_tensor_cores_do_not_support(
    cuda, monkeypatch, name, capability, dtype, message, hint
):
    cuda.name, cuda.capability = name, capability
    if name == "no CUDA":
        monkeypatch.setattr(torch.version, "cuda", None)
    if "bf16" in message:
        cuda.archs = ["sm_{}{}".format(*capability), *cuda.archs]  # this torch has kernels for the GPU
    if not message:
        assert select_device("cuda", 0, dtype=dtype) == torch.device("cuda", 0)
        return
    with pytest.raises(TrainkitError, match=message) as caught:
        select_device("cuda", 0, dtype=dtype)
    assert hint in caught.value.hint
    failure = RankFailure(host="h1", type="TrainkitError", message=str(caught.value), exit_code=78)
    assert (caught.value.exit_code, suspect_host(failure)) == (EXIT_NO_RESTART, None)


def test_a_driver_that_is_too_old_for_torch(cuda, monkeypatch):
    library = SimpleNamespace(nvmlInit=lambda: None, nvmlShutdown=lambda: None, NVMLError=OSError)
    library.nvmlSystemGetCudaDriverVersion_v2 = lambda: 12040
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with pytest.raises(TrainkitError, match=r"(?m)driver for CUDA 13, and has one for 12.4$") as caught:
        select_device("cuda", 0)
    assert caught.value.exit_code == EXIT_NO_RESTART
    assert "/cu126`" in caught.value.hint
    assert not cuda.selected


def test_a_virtual_gpu_without_expandable_segments(cuda, monkeypatch):
    cuda.has_virtual_memory = False
    monkeypatch.setattr(distributed, "fix_segments", lambda: vars(cuda).update(has_virtual_memory=True))
    assert select_device("cuda", 0) == torch.device("cuda", 0)
    cuda.has_virtual_memory = False
    # fix_segments would refuse for another reason
    monkeypatch.setattr(distributed, "fix_segments", lambda: None)
    with pytest.raises(RuntimeError, match="operation not supported"):
        select_device("cuda", 0)


@pytest.mark.parametrize("groups", [["dp", "tp"], ["world"]])
def test_every_group_exchanges_a_number_when_the_world_is_made(monkeypatch, groups):
    sent: list[Any] = []
    monkeypatch.setattr(distributed.dist, "new_group", lambda **options: "checkpoints")
    monkeypatch.setattr(distributed.dist, "group", SimpleNamespace(WORLD="world"))
    mesh = SimpleNamespace(get_all_groups=lambda: groups)
    monkeypatch.setattr(distributed, "build_mesh", lambda *args: mesh)
    monkeypatch.setattr(distributed, "context_group", lambda layout, timeout: "cp")
    monkeypatch.setattr(distributed, "set_timeout", lambda *args: None)
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda one, group: sent.append((one.numel(), group)))
    distributed.make_world(0, torch.device("cpu"), Layout())
    assert sent == [(1, name) for name in ("checkpoints", "world", *groups[groups == ["world"] :], "cp")]


@pytest.mark.parametrize(("rank", "pp", "peers"), [(0, 2, (1, 1)), (1, 4, (2, 0)), (3, 4, (0, 2))])
def test_the_pairs_of_a_pipeline_connect_when_the_world_is_made(monkeypatch, rank, pp, peers):
    """A stage connects to both neighbours and to the ends, for interleaved stages and tied weights."""
    exchanged: list[Any] = []
    mesh = MagicMock(get_all_groups=list)
    monkeypatch.setattr(distributed, "dist", MagicMock(isend="send", irecv="receive"))
    monkeypatch.setattr(distributed, "build_mesh", lambda *args: mesh)

    def exchange(group: Any, *operations: Any) -> list[Any]:
        assert group is mesh["pp"].get_group()
        exchanged.extend((kind, tensor.numel(), peer) for kind, tensor, peer in operations)
        return []

    monkeypatch.setattr(distributed, "exchange", exchange)
    distributed.make_world(rank, torch.device("cpu"), Layout(pp=pp))
    expected = [("receive", 1, peer) for peer in peers] + [("send", 1, peer) for peer in peers]
    assert sorted(exchanged) == sorted(expected)


def test_nothing_is_sent_to_one_rank_outside_of_a_batch():
    """NCCL would make a communicator for each pair at its first exchange, long after `connect`."""
    alone = re.compile(r"\bdist\.(?:isend|irecv|send|recv)\(")
    files = Path(distributed.__file__).parent.rglob("*.py")
    assert [str(file) for file in files if alone.search(file.read_text())] == []


@pytest.mark.parametrize(
    ("cpus", "allowed", "bound"),
    [
        ("0-3,8-11", range(16), {0, 1, 2, 3, 8, 9, 10, 11}),  # all tasks of the node may use all its CPUs
        ("0-3,8-11", range(2, 6), {2, 3}),
        ("0-3", range(4), None),  # Slurm has already bound the task
        ("0-3", range(4, 8), None),  # Slurm has bound the task to other CPUs
        (None, range(8), None),
    ],
)
def test_a_rank_runs_next_to_its_gpu(cuda, tmp_path, monkeypatch, cpus, allowed, bound):
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.setattr(distributed, "PCI_DEVICES", tmp_path)
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, found: calls.append(found))
    if cpus is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(f"{cpus}\n")
    distributed.bind_to_gpu(torch.device("cuda", 0))
    assert calls == ([] if bound is None else [bound])


@pytest.mark.parametrize(
    ("device", "numa", "binds", "number"),
    [("cuda", "auto", True, 0), ("cuda", "none", False, 0), ("cpu", "auto", False, 1)],
)
def test_what_a_rank_does_before_the_others_are_there(
    cuda, tmp_path, monkeypatch, device, numa, binds, number
):
    """A rank may bind itself near its GPU, and connects in a separate phase. Rank 0 checks the shards."""
    attempt = make_attempt(tmp_path / "run", [f"device={device}", f"launch.numa={numa}"], num_procs=2)
    bound: list[torch.device] = []
    phases: list[str] = []
    asked: list[bool] = []
    progress = Progress()

    def join(*args: Any, on_arrival: Callable[[], None], **options: Any) -> None:
        phases.append(progress.current.phase)
        on_arrival()
        phases.append(progress.current.phase)

    monkeypatch.setattr(worker, "find_rank_env", lambda: rank(number, 1))
    monkeypatch.setattr(worker, "bind_to_gpu", bound.append)
    monkeypatch.setattr(worker, "build_task", lambda *args, checks_data: asked.append(checks_data))
    monkeypatch.setattr(worker, "join_world", join)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    assert worker.run_worker(attempt, plan, StopRequest(), progress) == EXIT_STOPPED
    assert bound == [torch.device("cuda", 0)] * binds
    assert asked == [number == 0]
    assert phases == ["rendezvous", "connect"]


@pytest.mark.parametrize(("per", "works"), [("gpu", True), ("node", False)])
def test_only_a_rank_that_is_a_task_takes_the_single_gpu(cuda, tmp_path, monkeypatch, per, works):
    attempt = make_attempt(tmp_path / "run", num_procs=2)
    plan = replace(LaunchPlan.from_dict(read_json(attempt.plan_file)), device="cuda", per=per)
    monkeypatch.setattr(worker, "find_rank_env", lambda: rank(1, 1))
    monkeypatch.setattr(worker, "build_task", lambda *args, **options: None)
    monkeypatch.setattr(worker, "join_world", lambda *args, **options: None)
    if works:
        assert worker.run_worker(attempt, plan, StopRequest(), Progress()) == EXIT_STOPPED
        assert set(cuda.selected) == {torch.device("cuda", 0)}
        return
    with pytest.raises(TrainkitError, match="local rank 1 has no GPU: torch sees 1"):
        worker.run_worker(attempt, plan, StopRequest(), Progress())


def join(monkeypatch: pytest.MonkeyPatch, devices: list[torch.device]) -> list[Any]:
    """Let two ranks of a node meet, and return the error of each, or its process group's arguments."""
    port, found = free_port(), [None, None]
    monkeypatch.setattr(distributed, "START_TIMEOUT", MINUTE)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *args, **options: options["store"])
    monkeypatch.setattr(distributed, "make_world", lambda number, *args: number)
    monkeypatch.setattr(distributed, "_raise_open_file_limit", lambda count: None)
    arrived = threading.Semaphore(0)
    stores = []  # the store of rank 0 must outlive the other store

    def meet(number: int) -> None:
        try:
            found[number] = join_world(
                rank(number, port),
                devices[number],
                Layout(dp_shard=2),
                StopRequest(),
                on_arrival=arrived.release,
            )
        except TrainkitError as error:
            found[number] = error

    original = distributed.startup_barrier

    def keep(*args: Any) -> Any:
        stores.append(original(*args))
        return stores[-1]

    monkeypatch.setattr(distributed, "startup_barrier", keep)
    threads = [threading.Thread(target=meet, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(arrived.acquire(blocking=False) for _ in found)
    return found


def test_two_tasks_that_see_the_same_gpu(cuda, monkeypatch):
    """Either the node or the step has only one GPU, because Slurm has not bound the GPU to one task."""
    device = torch.device("cuda", 0)
    first, second = join(monkeypatch, [device, device])
    assert first == 0
    assert isinstance(second, TrainkitError)
    said(str(second))
    assert second.exit_code == EXIT_NO_RESTART
    cuda.name = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"  # slices of one GPU
    assert join(monkeypatch, [device, device]) == [0, 1]
    cuda.name, uuids = "NVIDIA A100", iter(["aaaa", "bbbb"])
    properties = lambda device: SimpleNamespace(name=cuda.name, uuid=next(uuids))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert join(monkeypatch, [device, device]) == [0, 1]


SOON, MINUTE = timedelta(seconds=0.3), timedelta(seconds=60)


def rank(number: int, port: int, nonce: str = "a") -> RankEnv:
    sizes = {"world_size": 2, "local_world_size": 2, "node_rank": 0, "num_nodes": 1}
    address = {"master_addr": "127.0.0.1", "master_port": port, "nonce": nonce}
    return RankEnv(rank=number, local_rank=number, source="a test", **sizes, **address)


@pytest.fixture
def port() -> int:
    return free_port()


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(function()))
    thread.start()
    return thread, got


def test_one_that_does_not_come_is_named(port):
    with pytest.raises(TrainkitError, match=r"(?m)1 of 2 ranks did not start within .*: rank 1$"):
        startup_barrier(rank(0, port), StopRequest(), SOON)


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_of_one_machine_meet_in_a_file(number, port, tmp_path):
    """No port is opened, files of another attempt are ignored, and each rank names a missing rank."""
    file = tmp_path / "store"
    with pytest.raises(TrainkitError, match=rf"(?m)1 of 2 ranks did not start within .*: rank {1 - number}$"):
        startup_barrier(rank(number, port, "b"), StopRequest(), SOON, file=file)
    thread, got = in_thread(lambda: startup_barrier(rank(number, port), StopRequest(), MINUTE, file=file))
    while file.read_bytes().count(b"num_arrived") < 2:
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    store = startup_barrier(rank(1 - number, port), StopRequest(), MINUTE, file=file)
    thread.join(60)
    store.set("key", "value")
    assert got[0].get("key") == b"value"


@pytest.mark.parametrize("nonce", ["b", ""])
def test_a_rank_of_another_job_at_the_same_address(port, nonce):
    """The rank of the other job is refused, and does not count as the missing rank."""
    thread, got = in_thread(lambda: startup_barrier(rank(0, port), StopRequest(), MINUTE))
    with pytest.raises(TrainkitError) as caught:
        startup_barrier(rank(1, port, nonce), StopRequest(), MINUTE)
    said(f"{caught.value.message}\n{caught.value.hint}".replace(str(port), "PORT"))
    assert thread.is_alive()
    store = startup_barrier(rank(1, port), StopRequest(), MINUTE)
    thread.join()
    store.set("key", "value")
    assert got[0].get("key") == b"value"


def test_a_store_that_no_rank_0_has_made(port, monkeypatch):
    """Another training program, for example, listens on the port first."""
    monkeypatch.setattr(distributed, "IDENTITY_TIMEOUT", SOON)
    other = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(TrainkitError) as caught:
        startup_barrier(rank(1, port), StopRequest(), MINUTE)
    said(caught.value.message.replace(str(port), "PORT"))
    assert other.num_keys() <= 1


def neighbour(port: int) -> TCPStore:
    """Return another user's connection to the store of rank 0, once the store listens."""
    distributed._wait_for_main(rank(1, port), StopRequest(), 60.0)
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def test_keys_of_two_jobs_do_not_mix_and_none_has_the_nonce(port):
    thread, got = in_thread(lambda: startup_barrier(rank(0, port, "s3cret"), StopRequest(), MINUTE))
    store = neighbour(port)
    store.set("verdict", "stop")
    assert startup_barrier(rank(1, port, "s3cret"), StopRequest(), MINUTE) is not None
    thread.join()
    seen = {key: store.get(key) for key in store.list_keys()}
    assert any("verdict" in key for key in seen.keys() - {"verdict"})
    assert "s3cret" not in repr(seen)
    assert got[0] is not None


def test_a_neighbour_neither_arrives_nor_decides(port):
    """The other user sees the names of the keys in the store, but cannot seal a value."""
    with ThreadPoolExecutor(1) as threads:
        main = threads.submit(startup_barrier, rank(0, port), StopRequest(), MINUTE)
        store = neighbour(port)
        while not (found := [key for key in store.list_keys() if key.endswith("num_arrived")]):
            time.sleep(0.01)
        prefix = found[0].removesuffix("num_arrived")
        store.set(f"{prefix}arrived/1", "élsewhere")
        assert store.add(found[0], 1) == 2
        env = rank(0, port)
        assert distributed._missing_ranks(env, PrefixStore(distributed._digest(env, "keys"), store)) == [1]
        store.compare_set(f"{prefix}verdict", "", "go")
        with pytest.raises(TrainkitError, match="not a rank of this attempt has written to the store"):
            main.result(60)
