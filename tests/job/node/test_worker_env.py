"""Tests the variables of a rank, and which interface the ranks communicate over."""

import os
from dataclasses import replace

import pytest

from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.job.node import worker_env as network
from trainkit.job.node.rendezvous import local_rendezvous
from trainkit.job.node.worker_env import (
    addresses,
    gpu_slice,
    interface_to,
    network_environ,
    rank_folders,
    worker_argv,
    worker_environ,
    worker_rank,
)
from trainkit.job.rank_env import find_rank_env
from trainkit.plan.launch import WorkerEnvironment
from trainkit.plan.workload import Workload
from trainkit.run.process import own_host
from trainkit.run.rundir import RunDir

PLAN = launch_plan(backend="local", device="cuda", threads_per_worker=3)


def place_on(node_rank, local_rank, plan=PLAN):
    return worker_rank(plan, local_rendezvous(plan, node_rank, 12345), local_rank)


def environ(plan=PLAN, configured=None, inherited=None, node_rank=1):
    environment = replace(plan.environment, variables=configured or {})
    plan, place = replace(plan, environment=environment), place_on(node_rank, 1, plan)
    return worker_environ(plan, place, RunDir("/r").attempt(2), inherited=inherited or {}, defaults={})


def test_worker_finds_its_place_and_no_setting_can_move_it():
    found = find_rank_env(environ(configured={"RANK": "0"}, inherited={"RANK": "9", "GROUP_RANK": "9"}))
    assert replace(found, source="") == replace(place_on(1, 1), source="")
    assert found.rank == 3


def test_defaults_give_way_to_the_user():
    assert environ()["OMP_NUM_THREADS"] == "3"
    assert environ(inherited={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    both = environ(configured={"OMP_NUM_THREADS": "8"}, inherited={"OMP_NUM_THREADS": "7"})
    assert both["OMP_NUM_THREADS"] == "8"
    assert environ(configured={"GLOO_SOCKET_IFNAME": "eth0"})["GLOO_SOCKET_IFNAME"] == "eth0"


def test_memory_grows_in_place_and_torch_records_its_collectives_unless_the_user_set_that_up():
    defaults = {"ALLOC": "expandable_segments:True", "BUFFER_SIZE": "2000"}
    for word, name, older in (
        ("ALLOC", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        ("BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    ):
        assert environ()[name] == defaults[word]
        for one in (name, older):
            for given in ({"configured": {one: "0"}}, {"inherited": {one: "0"}}):
                found = environ(**given)
                assert {key: found[key] for key in found if word in key} == {one: "0"}
    for plan in (replace(PLAN, device="cpu"), replace(PLAN, workload=Workload(("python", "train.py")))):
        assert "PYTORCH_ALLOC_CONF" not in environ(plan)


def test_a_command_looks_like_a_rank_of_torchrun():
    """Frameworks prefer torchrun's variables to Slurm's, which name no ranks with one task per node."""
    command = replace(PLAN, workload=Workload(("python", "train.py")))
    assert environ(command, inherited={"TORCHELASTIC_RUN_ID": "other"})["TORCHELASTIC_RUN_ID"] == "r-2"
    assert "TORCHELASTIC_RUN_ID" not in environ()
    launched = replace(command, workload=replace(command.workload, launcher="torchrun"))
    assert "TORCHELASTIC_RUN_ID" not in environ(launched)


@pytest.mark.parametrize(
    ("node_rank", "visible", "expected"), [(0, None, "0,1"), (1, None, "2,3"), (1, "4,5,6,7", "6,7")]
)
def test_nodes_on_one_machine_share_its_gpus(node_rank, visible, expected):
    assert gpu_slice(PLAN, node_rank, visible) == expected


def test_one_node_sees_all_gpus_that_its_run_has_got():
    one, name = replace(PLAN, num_nodes=1), "CUDA_VISIBLE_DEVICES"
    assert name not in environ(one, node_rank=0)
    found = environ(one, node_rank=0, configured={name: "0,1,2,3"}, inherited={name: "2,3"})
    assert found[name] == "2,3", "the supervisor has chosen them among those of launch.env"


def test_workers_use_the_environment_that_the_plan_names():
    run = RunDir("/r")
    place = place_on(0, 0)
    own = worker_argv(PLAN, place, run)
    environment = WorkerEnvironment(python=("/v/bin/python", "-u"), venv="/v")
    plan = replace(PLAN, environment=environment)
    other = worker_argv(plan, place, run)
    assert other == ("/v/bin/python", "-u", *own[own.index("-m") :])
    found = environ(plan, inherited={"PATH": "/usr/bin", "PYTHONHOME": "/old"})
    assert (found["VIRTUAL_ENV"], found["PATH"]) == ("/v", "/v/bin:/usr/bin")
    assert "PYTHONHOME" not in found


def test_temporary_files_of_ranks_are_where_only_their_user_creates_files(tmp_path):
    tmp_path.chmod(0o1777)
    own = tmp_path / f"trainkit-{os.getuid()}"
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{own}/inductor", "TRITON_CACHE_DIR": f"{own}/triton"}
    for plan in (PLAN, replace(PLAN, workload=Workload(("python", "train.py")))):
        found = environ(plan, inherited={"TMPDIR": str(tmp_path)})
        assert found.items() >= {**caches, "TMPDIR": f"{own}/tmp"}.items()
    asked = environ(configured={"TMPDIR": str(tmp_path)}, inherited={"TRITON_CACHE_DIR": "/mine"})
    assert asked.items() >= {**caches, "TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "/mine"}.items()


def test_an_agent_says_once_that_temporary_files_are_elsewhere(tmp_path, capfd):
    run = RunDir(tmp_path / "run")
    for name, mode in (("tmp", 0o777), ("shared", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    for _ in range(2):
        found = rank_folders(str(tmp_path / "tmp"), run, False)
        assert found.temporary == f"{run.path}/caches/{own_host()}/tmp"
    said(capfd.readouterr().out)
    rank_folders(str(tmp_path / "shared"), run, False)
    said(capfd.readouterr().out)


def test_presets():
    assert interface_to("127.0.0.1") == addresses()["127.0.0.1"] == "lo"
    alone, line = network_environ("auto", None)
    said(line)
    assert interface_to(NOWHERE) is None
    nowhere, line = network_environ("auto", NOWHERE)
    assert nowhere == {}
    said(line)
    auto, line = network_environ("auto", "127.0.0.1")
    assert auto == {"GLOO_SOCKET_IFNAME": "lo"}
    assert alone == {**auto, "NCCL_SOCKET_IFNAME": "=lo"}
    said(line)
    assert network_environ("socket", "127.0.0.1")[0] == {**auto, "NCCL_IB_DISABLE": "1"}
    assert network_environ("debug", "127.0.0.1")[0]["NCCL_DEBUG"] == "INFO"


NOWHERE = "no-such-host.invalid"


class Host:
    """The interfaces of a host. The first one leads to the other hosts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.flags = monkeypatch, dict[str, int]()
        monkeypatch.setattr(network, "_flags", lambda name: self.flags[name])

    def has(self, *names: str) -> None:
        found = {f"10.0.0.{number}": name for number, name in enumerate((*names, "lo"))}
        self.flags = dict.fromkeys(names, UP) | {"lo": UP | network.IFF_LOOPBACK}
        self.patch.setattr(network, "addresses", lambda: found)
        self.patch.setattr(network, "interface_to", lambda host: names[0])


UP = network.IFF_UP | network.IFF_RUNNING


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_the_only_interface_is_that_of_nccl_too(host):
    host.has("eth1")
    environ, line = network_environ("auto", "other")
    # NCCL takes names for prefixes. gloo compares whole names and has no prefix sign.
    assert environ == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    said(line)
    host.has("eth1", "docker0", "virbr0")
    assert network_environ("auto", "other")[0] == environ
    host.has("eth1", "eth2")
    host.flags["eth2"] = network.IFF_UP  # the interface has no cable
    assert network_environ("auto", "other")[0] == environ


@pytest.mark.parametrize("preset", ["auto", "ib", "socket", "debug"])
@pytest.mark.parametrize("more", [("eth10",), ("ib0", "ib1"), ("cni0",)])
def test_nccl_chooses_among_several_interfaces(host, monkeypatch, tmp_path, preset, more):
    """NCCL prefers InfiniBand, and may use several interfaces at once."""
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(network, "INFINIBAND", tmp_path)
    host.has("eth1", *more)
    environ, choice = network_environ(preset, "other")
    assert environ["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "NCCL_SOCKET_IFNAME" not in environ
    said(choice)


def test_the_interfaces_of_this_host():
    assert "lo" not in network.usable_interfaces()
    assert set(network.usable_interfaces()) <= set(addresses().values())
    assert network._flags("lo") & network.IFF_LOOPBACK
    assert network._flags("no-such") == 0


def test_a_named_interface_must_exist():
    environ, line = network_environ("lo", "anything")
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    said(line)
    with pytest.raises(UsageError, match="has no such interface") as caught:
        network_environ("ib7", "anything")
    assert "interfaces are" in caught.value.hint
