"""The checks of `trainkit doctor` on this machine, and what it says of bandwidth and of Slurm's settings."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.disks import fill, small_disk
from trainkit.cli.main import main
from trainkit.doctor import bandwidth, node
from trainkit.doctor.bandwidth import Layout, link_gbit_s, ring_rounds
from trainkit.doctor.node import Check, Request
from trainkit.doctor.nodes import bandwidth_checks, compare, settings_checks

TWO = Layout(("a", "b"), (1, 1), "a", 1)
THREE = Layout(("a", "b", "c"), (1, 1, 1), "a", 1)
CONFIG = {"SLURM_VERSION": "23.11.4", "ClusterName": "big", "JobRequeue": "1", "KillWait": "30 sec"}


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine alone, whatever it has."""
    monkeypatch.setattr("trainkit.cluster.discovery.has_slurm", lambda *_: False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_healthy_machine_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json", "--run-dir", str(tmp_path)]) == 0
    found = {check["name"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {"Python", "CPU", "GPU", "name", "interface", "port"} <= found
    assert {"disk", "write speed", "rename", "clock"} <= found
    assert list(tmp_path.iterdir()) == []


def test_port_in_use() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        check = node.check_ports(Request(Path("/tmp"), port=port))
        assert (check.state, check.value) == ("failure", f"{port} is in use")
        assert f"sport = :{port}" in check.hint
    assert node.check_ports(Request(Path("/tmp"), port=port)).state == "ok"


def test_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        fill(disk)
        *_, check = node.check_folder(Request(disk))
    assert (check.name, check.state) == ("disk", "failure")
    assert "No space left on device" in check.value
    assert "ckpt prune" in check.hint


def test_disk_with_little_space_fails_before_it_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        first = next(iter(node.check_folder(Request(disk, quick=True))))
    assert (first.name, first.state) == ("disk", "failure")
    assert first.value.startswith("0.1 GiB free in ")


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(node.tempfile, "TemporaryDirectory", refuse)
    (check,) = node.check_folder(Request(tmp_path / "runs"))
    assert (check.state, check.value) == ("failure", f"{tmp_path} cannot be written: Permission denied")


def test_unresolvable_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "node_addr", lambda name, **_: name)
    check = node.check_name(Request(Path("/tmp"), peers=("no-such-host.invalid",)))
    assert check.state == "failure"
    assert check.value == "no-such-host.invalid cannot be resolved, and neither can its NodeAddr"


def test_peer_that_resolves_to_loopback() -> None:
    check = node.check_name(Request(Path("/tmp"), peers=("localhost",)))
    assert (check.state, check.value) == ("failure", "localhost is 127.0.0.1")


def test_interface_that_does_not_exist() -> None:
    check = node.check_interface(Request(Path("/tmp"), network="none0"))
    assert check.state == "failure"
    assert "launch.network is none0" in check.value


@pytest.mark.parametrize("num", range(2, 9))
def test_rounds_of_a_ring_use_no_point_twice(num: int) -> None:
    rounds = list(ring_rounds(num))
    assert sorted(link for links in rounds for link in links) == [(i, (i + 1) % num) for i in range(num)]
    for links in rounds:
        if num > 2:
            points = [point for link in links for point in link]
            assert len(points) == len(set(points))


def test_speed_of_links_is_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, speed in (("eth0", "25000"), ("veth0", "-1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    for port, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        folder = tmp_path / "ib/mlx5_0/ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text("200 Gb/sec (4X HDR)\n")
    monkeypatch.setattr(bandwidth, "NET", tmp_path)
    monkeypatch.setattr(bandwidth, "INFINIBAND", tmp_path / "ib")
    assert link_gbit_s("eth0") == {"ethernet": 25.0, "infiniband": 200.0}
    assert link_gbit_s("veth0") == {"infiniband": 200.0}
    assert link_gbit_s(None) == {"infiniband": 200.0}


def measured(reduced: float, *speeds: float, backend: str = "gloo") -> dict[str, Any]:
    hosts = "abc"[: len(speeds)]
    links = [(host, hosts[(index + 1) % len(hosts)], speeds[index]) for index, host in enumerate(hosts)]
    return {"backend": backend, "size_mib": 32, "all_reduce_gbit_s": reduced, "links": links}


def test_bandwidth_near_what_the_link_gives_is_ok() -> None:
    found = list(bandwidth_checks(TWO, measured(8.0, 9.0, 9.5), [{"ethernet": 10.0}, {"ethernet": 25.0}]))
    assert [check.state for check in found] == ["ok", "ok"]
    assert found[1].value == (
        "9.0 Gbit/s from a to b, the slowest of 2; median 9.2; the network interface should give 10"
    )


def test_bandwidth_far_below_the_link_is_a_warning() -> None:
    found = bandwidth_checks(TWO, measured(0.9, 0.9, 0.9), [{"ethernet": 10.0}] * 2)
    assert [check.state for check in found] == ["warning", "warning"]


def test_gloo_is_not_expected_to_fill_a_fast_link() -> None:
    links = [{"ethernet": 100.0, "infiniband": 400.0}] * 2
    assert [check.state for check in bandwidth_checks(TWO, measured(6.0, 8.0, 8.0), links)] == ["ok", "ok"]
    found = bandwidth_checks(TWO, measured(6.0, 8.0, 8.0, backend="nccl"), links)
    assert [check.state for check in found] == ["warning", "warning"]


def test_one_slow_link_is_named() -> None:
    *_, found = bandwidth_checks(THREE, measured(5.0, 9.0, 2.0, 9.0), [{}, {}, {}])
    assert (found.state, found.hint) == ("warning", "check the links of b to c")


def test_failed_measurement_is_a_failure() -> None:
    (found,) = bandwidth_checks(TWO, {"error": "rank 1 on b: Connection refused"}, [{}, {}])
    assert (found.state, found.value) == ("failure", "not measured: rank 1 on b: Connection refused")


def result(host: str, offset_s: float = 0.0, **versions: str) -> dict[str, Any]:
    return {"facts": {"host": host, "versions": versions}, "time_s": 1000.0 + offset_s, "arrived_s": 1000.0}


def test_nodes_that_differ_are_named() -> None:
    results = [result("a", torch="2.13"), result("b", 600.0, torch="2.12"), result("c", torch="2.13")]
    found = list(compare(results))
    assert found[0] == Check(
        "packages", "failure", "torch is 2.12, but 2.13 on 2 of 3 nodes", found[0].hint, "b"
    )
    assert (found[1].host, found[1].value) == ("b", "600 s ahead of the clocks of other nodes")


def test_missing_package_is_named() -> None:
    found = next(iter(compare([result("a", peft="1"), result("b", peft="1"), result("c")])))
    assert (found.host, found.value) == ("c", "peft is missing, but 1 on 2 of 3 nodes")


def test_messages_of_hosts_survive_being_mixed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, lines = [], []
    for host in ("a", "b"):
        monkeypatch.setattr(node, "own_host", lambda host=host: host)
        sent.append({"host": host, "text": "x y " * 700})
        node.send(sent[-1])
        lines.append(capsys.readouterr().out.splitlines(keepends=True))
    assert len(lines[0]) > 3
    assert max(map(len, lines[0])) < 1024
    mixed = [line for pair in zip(*lines, strict=True) for line in pair]
    assert list(node.received(["srun: a notice\n", *mixed])) == sent


def states(config: dict[str, str], partitions: str = "") -> dict[str, str]:
    return {check.name: check.state for check in settings_checks(config, partitions)}


def test_settings_of_slurm_that_cost_work_are_warnings() -> None:
    assert states({**CONFIG, "AccountingStorageType": "accounting_storage/slurmdbd"}) == {
        **{"Slurm": "ok", "preemption": "ok", "requeue": "ok", "KillWait": "ok", "accounting": "ok"}
    }
    bad = {
        **CONFIG,
        "SLURM_VERSION": "20.02.1",
        "JobRequeue": "0",
        "KillWait": "5 sec",
        "MinJobAge": "10 sec",
    }
    bad = {**bad, "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    assert set(states(bad, "PartitionName=low GraceTime=0 PreemptMode=REQUEUE").values()) == {"warning"}
    (name,) = [key for key, state in states({**bad, "PreemptType": "preempt/none"}).items() if state == "ok"]
    assert name == "preemption"


def test_preemption_says_how_jobs_are_notified() -> None:
    config = {**CONFIG, "PreemptType": "preempt/qos", "PreemptMode": "REQUEUE"}
    partition = "PartitionName=low GraceTime=60"
    (found,) = [item for item in settings_checks(config, partition) if item.name == "preemption"]
    assert (found.state, found.value) == (
        "ok",
        "partition low: REQUEUE, GraceTime 60 s, notice by SIGTERM",
    )
    config["PreemptParameters"] = "youngest_first,send_user_signal"
    (found,) = [item for item in settings_checks(config, partition) if item.name == "preemption"]
    assert found.value.endswith("notice by SIGTERM and the job's own signal")


class FakeNvml:
    """A driver with one GPU."""

    NVML_TEMPERATURE_GPU = 0
    used_gib, temperature, pids = 1.0, 40, ()

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:
        used = int(self.used_gib * 2**30)
        return type("Memory", (), {"used": used, "total": 80 * 2**30, "free": 80 * 2**30 - used})

    def nvmlDeviceGetTemperature(self, *_: int) -> int:
        return self.temperature

    def nvmlDeviceGetName(self, _: int) -> bytes:
        return b"H100"

    def nvmlDeviceGetComputeRunningProcesses(self, _: int) -> list[Any]:
        return [type("Process", (), {"pid": pid}) for pid in self.pids]


@pytest.mark.parametrize(
    ("changes", "state", "hint"),
    [
        ({}, "ok", ""),
        ({"temperature": 91}, "warning", "it is hot"),
        ({"pids": (77,)}, "warning", "processes 77 use it"),
        ({"used_gib": 30.0}, "warning", "something use"),
    ],
)
def test_gpu(changes: dict[str, Any], state: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "gpu_problem", lambda *_: None)
    nvml = FakeNvml()
    vars(nvml).update(changes)
    check = node.check_gpu(nvml, 0)
    assert check.state == state
    assert check.hint.startswith(hint)
    assert check.value.startswith("H100, ")


def test_gpu_with_a_problem_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "gpu_problem", lambda *_: "does not respond: Unknown Error")
    assert node.check_gpu(FakeNvml(), 3).to_dict() == {
        **{"name": "GPU 3", "state": "failure", "value": "does not respond: Unknown Error", "host": None},
        "hint": "administrators can reset or replace it; exclude the node",
    }


@pytest.mark.slow
def test_torch_that_cannot_be_imported_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (check,) = node.check_torch()
    assert check.state == "failure"
    assert "libcudnn.so.9" in check.value


@pytest.mark.slow
def test_bandwidth_between_two_ranks_of_this_host_is_measured() -> None:
    port = node.choose_port(str(os.getpid()), 0)
    found = bandwidth.run_ranks(Layout(("here",), (2,), "127.0.0.1", port), "here", os.environ)
    assert found["backend"] == "gloo"
    assert found["all_reduce_gbit_s"] > 0
    assert [link[:2] for link in found["links"]] == [["GPU 0", "GPU 1"], ["GPU 1", "GPU 0"]]
