"""The checks of `trainkit doctor` on this machine, and what it says of bandwidth and of Slurm's settings."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.disks import fill, small_disk
from trainkit.cli import doctor as cli_doctor
from trainkit.cli.main import main
from trainkit.doctor import bandwidth, disk, environment, gpus, network, node
from trainkit.doctor.bandwidth import Layout, link_gbit_s, ring_rounds
from trainkit.doctor.bandwidth_checks import bandwidth_checks
from trainkit.doctor.check import Check, Request
from trainkit.doctor.compare import compare_clocks, compare_versions
from trainkit.doctor.nodes import can_measure
from trainkit.doctor.slurm_settings import settings_checks
from trainkit.job.node.rendezvous import choose_port

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
        check = network.check_ports(Request(Path("/tmp"), port=port))
        assert (check.state, check.value) == ("failure", f"{port} is in use")
        assert f"sport = :{port}" in check.hint
    assert network.check_ports(Request(Path("/tmp"), port=port)).state == "ok"


def test_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as full:
        fill(full)
        *_, check = disk.check_folder(Request(full))
    assert (check.name, check.state) == ("disk", "failure")
    assert "No space left on device" in check.value
    assert "ckpt prune" in check.hint


def test_disk_with_little_space_fails_before_it_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as small:
        first = next(iter(disk.check_folder(Request(small, quick=True))))
    assert (first.name, first.state) == ("disk", "failure")
    assert first.value.startswith("0.1 GiB free in ")


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk.tempfile, "TemporaryDirectory", refuse)
    (check,) = disk.check_folder(Request(tmp_path / "runs"))
    assert (check.state, check.value) == ("failure", f"{tmp_path} cannot be written: Permission denied")


@pytest.mark.parametrize("name", ["file/runs", "file", "link/runs"])
def test_folder_below_what_is_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (check,) = disk.check_folder(Request(tmp_path / name, quick=True))
    what = "a link to a missing folder" if name.startswith("link") else "a file"
    parent = tmp_path / name.partition("/")[0]
    assert (check.state, check.value) == ("failure", f"{parent} is {what}, not a folder")


def test_folder_in_proc() -> None:
    (check,) = disk.check_folder(Request(Path("/proc/runs"), quick=True))
    assert (check.state, check.value) == ("failure", "no files can be created in /proc")


def test_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "VISIBLE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(disk, "own_host", lambda: "node2")
    with disk.shared_file(tmp_path / "runs") as shared:
        assert not isinstance(shared, Check)
        seen = {item.name: item for item in disk.check_folder(Request(tmp_path, quick=True, shared=shared))}
        assert seen["shared"].state == "ok"
        hidden = Request(tmp_path, quick=True, shared=(f"{tmp_path}/gone", "node1"))
        seen = {item.name: item for item in disk.check_folder(hidden)}
    assert seen["shared"].value == f"{tmp_path} is not shared: a file of node1 is not visible on node2"
    assert seen["shared"].state == "failure"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size", "state"), [("4m", "failure"), ("64m", "warning")])
def test_small_dev_shm_fails_only_under_what_a_job_refuses(size: str, state: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", size) as shm:
        check = disk.check_space("/dev/shm", shm, disk.SHM_HINT)
    assert (check.state, check.value) == (state, f"{size[:-1]} MiB free in {shm}")
    assert "--shm-size" in check.hint


def report(capsys: pytest.CaptureFixture[str], *args: str, code: int) -> dict[str, tuple[str, str]]:
    """Name of each check -> its state and value."""
    assert main(["doctor", "--quick", "--json", *args]) == code
    checks = json.loads(capsys.readouterr().out)["checks"]
    return {check["name"]: (check["state"], check["value"]) for check in checks}


def test_environment_of_the_config_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "python3"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    found = report(capsys, "--set", f"launch.python={other}", code=1)
    assert found["Python"][0] == "failure"
    assert found["Python"][1].endswith("has no trainkit")
    found = report(capsys, "--set", "launch.venv=/nonexistent", code=1)
    assert found["environment"] == (
        "failure",
        "launch.venv is '/nonexistent', and there is no /nonexistent/bin/python",
    )
    assert found["Python"][1] == "/nonexistent/bin/python does not run: No such file or directory"


def test_environment_that_only_the_job_knows_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainkit.cluster.discovery.has_slurm", lambda *_: True)
    monkeypatch.setattr("trainkit.doctor.slurm_settings.slurm_checks", lambda: iter(()))
    found = report(capsys, "--set", "launch.container=torch.sif", code=0)
    text = "checked the environment of this command; the job uses that of launch.container"
    assert found["environment"] == ("warning", text)
    found = report(capsys, "--set", "launch.modules=[cuda]", code=0)
    text = f"checked {sys.executable} without launch.modules, which the job runs first"
    assert found["environment"] == ("warning", text)


def test_config_of_the_folder_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("launch: {network: none0}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--quick"]) == 1
    printed = capsys.readouterr()
    assert "launch.network is none0" in printed.out
    assert printed.err.startswith("config: config.yaml (in this folder)\n")
    assert ", 1 failure\n" in printed.err


def test_values_of_nodes_are_merged(capsys: pytest.CaptureFixture[str]) -> None:
    def values(*texts: str) -> list[str]:
        cli_doctor._echo_nodes(
            [Check("CPU", "ok", text, host=f"n{index}") for index, text in enumerate(texts, 1)]
        )
        return capsys.readouterr().out.splitlines()

    assert values("8 cores, load 0.5", "8 cores, load 12.0", "8 cores, load 3.1") == [
        "ok       CPU: 8 cores, load 0.5 to 12.0 on all 3 nodes"
    ]
    assert values("3.11.7 (/a)", "3.12.1 (/a)") == [
        "ok       n1: CPU: 3.11.7 (/a)",
        "ok       n2: CPU: 3.12.1 (/a)",
    ]


def test_code_of_a_folder_is_compared_without_environments_and_runs(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", "env/lib/c.py", "runs/r/d.py", ".hidden/e.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    files = environment.code_files(tmp_path)
    assert files == [tmp_path / "a.py", tmp_path / "sub/b.py"]
    before = environment.digest(files)
    (tmp_path / "sub/b.py").write_text("x = 1\n")
    assert environment.digest(files) != before


def test_request_survives_json() -> None:
    request = Request(
        Path("/r"), "ib", ("b",), 1, True, ("python", "-u"), (("PYTHONPATH", "/x"),), Path("/c"), ("/f", "a")
    )
    assert Request.from_json(request.to_json()) == request
    assert Request.from_json(Request(Path("/r")).to_json()) == Request(Path("/r"))


def test_unresolvable_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "node_addr", lambda name, **_: name)
    check = network.check_name(Request(Path("/tmp"), peers=("no-such-host.invalid",)))
    assert check.state == "failure"
    assert check.value == "no-such-host.invalid cannot be resolved, and neither can its NodeAddr"


def test_peer_that_resolves_to_loopback() -> None:
    check = network.check_name(Request(Path("/tmp"), peers=("localhost",)))
    assert (check.state, check.value) == ("failure", "localhost is 127.0.0.1")


def test_interface_that_does_not_exist() -> None:
    check = network.check_interface(Request(Path("/tmp"), network="none0"))
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


def result(host: str, offset_s: float = 0.0, server_s: float = 0.0, **versions: str) -> dict[str, Any]:
    """What a node reports; its clock and that of the file server are ahead of this host's by these."""
    facts = {"host": host, "versions": versions, "file_server_offset_s": offset_s - server_s}
    return {"facts": facts, "time_s": 1000.0 + offset_s, "arrived_s": 1000.0}


def test_packages_that_differ_on_one_node_are_named() -> None:
    results = [result("a", torch="2.13"), result("b", torch="2.12"), result("c", torch="2.13")]
    (found,) = compare_versions(results)
    text = "torch is 2.12, but 2.13 on 2 of 3 nodes"
    assert found == Check("packages", "failure", text, found.hint, "b")


def test_two_nodes_that_differ_are_not_blamed() -> None:
    (found,) = compare_versions([result("a", torch="2.13"), result("b", torch="2.12")])
    assert (found.host, found.value) == (None, "torch is 2.13 on a; 2.12 on b")


def test_missing_package_is_named() -> None:
    found = next(iter(compare_versions([result("a", peft="1"), result("b", peft="1"), result("c")])))
    assert (found.host, found.value) == ("c", "peft is missing, but 1 on 2 of 3 nodes")


def clocks(*results: dict[str, Any], caller: str = "login") -> list[tuple[str | None, str, str]]:
    return [(check.host, check.state, check.value) for check in compare_clocks(results, caller)]


def test_clock_of_one_of_two_nodes_is_found_by_those_of_this_host_and_the_file_server() -> None:
    assert clocks(result("a"), result("b", 600.0)) == [("b", "failure", "600 s ahead of the other clocks")]
    assert clocks(result("a", -600.0), result("b")) == [("a", "failure", "600 s behind the other clocks")]


def test_clock_of_this_host_is_not_blamed_on_the_nodes() -> None:
    found = clocks(result("a", 600.0, 600.0), result("b", 600.0, 600.0))
    assert found == [(None, "warning", "this host, login, is 600 s behind the other clocks")]


def test_clock_of_the_file_server_is_not_blamed_on_the_nodes() -> None:
    found = clocks(result("a", 0.0, 90.0), result("b", 0.0, 90.0))
    text = "the run folder's file server is 90 s ahead of the other clocks"
    assert found == [(None, "failure", text)]


def test_clocks_without_a_majority_are_both_named() -> None:
    # On a disk of each node, the times of files are those of its own clock.
    found = clocks(result("a"), result("b", 600.0, 600.0), caller="a")
    assert found == [(None, "failure", "that of b is 600 s ahead of a")]


def test_clocks_that_agree() -> None:
    assert clocks(result("a"), result("b", 1.5)) == [(None, "ok", "of 2 nodes within 1.5 s")]


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
    NVMLError = RuntimeError
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
        ({"pids": (77,)}, "warning", "process 77 uses it: `ps -o user,args -p 77`"),
        ({"pids": (7, 8)}, "warning", "processes 7, 8 use it: `ps -o user,args -p 7,8`"),
        ({"used_gib": 30.0}, "warning", "another process uses its memory"),
    ],
)
def test_gpu(changes: dict[str, Any], state: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "gpu_problem", lambda *_: None)
    nvml = FakeNvml()
    vars(nvml).update(changes)
    check = gpus.check_gpu(nvml, 0)
    assert check.state == state
    assert check.hint.startswith(hint)
    assert check.value.startswith("H100, ")


def test_mig_slice_whose_temperature_and_processes_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise FakeNvml.NVMLError("Not Supported")

    monkeypatch.setattr(gpus, "gpu_problem", lambda *_: None)
    nvml: Any = FakeNvml()
    nvml.nvmlDeviceGetTemperature = nvml.nvmlDeviceGetComputeRunningProcesses = refuse
    assert gpus.check_gpu(nvml, 0) == Check("GPU 0", "ok", "H100, 79.0 of 80.0 GiB free, unknown temperature")


def test_broken_gpu_stops_the_measurement() -> None:
    assert can_measure([{"name": "GPU 3", "state": "ok"}, {"name": "disk", "state": "failure"}])
    assert not can_measure([{"name": "GPU 3", "state": "failure"}])


def test_gpu_with_a_problem_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "gpu_problem", lambda *_: "does not respond: Unknown Error")
    assert gpus.check_gpu(FakeNvml(), 3).to_dict() == {
        **{"name": "GPU 3", "state": "failure", "value": "does not respond: Unknown Error", "host": None},
        "hint": "administrators can reset or replace it; exclude the node",
    }


@pytest.mark.slow
def test_torch_that_cannot_be_imported_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (check,) = environment.check_torch(Request(tmp_path))
    assert check.state == "failure"
    assert "libcudnn.so.9" in check.value


FAKE_RANK = """
import os, sys
sys.stdout.write("node1:1:1 NCCL INFO cudaDriverVersion 12040 " * 4000)
sys.stderr.write("a warning\\n" * 20000)
if os.environ["RANK"] == "0":
    print('\\ntrainkit-bandwidth: {"backend": "nccl"}')
    print("node1:1:1 NCCL INFO comm destroyed")
elif "fails" in sys.argv:
    sys.exit("RuntimeError: address already in use")
"""


@pytest.fixture
def fake_rank(tmp_path: Path) -> tuple[str, str]:
    """An interpreter whose ranks print as much as with NCCL_DEBUG=INFO."""
    (tmp_path / "rank.py").write_text(FAKE_RANK)
    return sys.executable, str(tmp_path / "rank.py")


def test_result_of_ranks_that_print_much_is_found(fake_rank: tuple[str, str]) -> None:
    layout = Layout(("here",), (3,), "127.0.0.1", 1)
    assert bandwidth.run_ranks(layout, "here", os.environ, fake_rank) == {"backend": "nccl"}


def test_first_rank_that_fails_is_named(fake_rank: tuple[str, str]) -> None:
    layout = Layout(("there", "here"), (1, 1), "127.0.0.1", 1)
    found = bandwidth.run_ranks(layout, "here", os.environ, (*fake_rank, "fails"))
    assert found == {"error": "rank 1 on here: RuntimeError: address already in use"}


@pytest.mark.slow
def test_bandwidth_between_two_ranks_of_this_host_is_measured() -> None:
    port = choose_port(str(os.getpid()), 0)
    found = bandwidth.run_ranks(Layout(("here",), (2,), "127.0.0.1", port), "here", os.environ)
    assert found["backend"] == "gloo"
    assert found["all_reduce_gbit_s"] > 0
    assert [link[:2] for link in found["links"]] == [["GPU 0", "GPU 1"], ["GPU 1", "GPU 0"]]
