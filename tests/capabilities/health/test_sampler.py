"""Tests the samples of a node's health."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_gpus.pynvml import FakeNvml, NVMLError, NVMLError_NotSupported, memory
from tests.support.programs import wait_for
from tests.support.said import said
from tests.support.watched_runs import Watched, ago
from trainkit.capabilities.health import sampler as health
from trainkit.capabilities.health import samples as samples_module
from trainkit.capabilities.health import shown as shown_module
from trainkit.capabilities.health.sampler import HealthSampler, thin_out
from trainkit.capabilities.health.samples import HealthFiles, health_file
from trainkit.capabilities.health.shown import read_nodes
from trainkit.cluster import machine as memory_module
from trainkit.job.processes import descendants
from trainkit.run.files import append_jsonl, read_jsonl
from trainkit.run.rundir import RunDir

KEYS = {
    *("time", "attempt", "host", "cpu_percent", "load_1m", "mem_used_gib", "mem_total_gib", "job_mem_gib"),
    "job_mem_by",
    *("net_rx_mib_s", "net_tx_mib_s", "disk_read_mib_s", "disk_write_mib_s", "gpus"),
}


def test_a_node_is_sampled_until_the_end(tmp_path):
    sampler = HealthSampler(RunDir(tmp_path).attempt(3), "n1", 0.02, {})
    sampler.start()
    wait_for(lambda: sampler.file.exists() and len(list(read_jsonl(sampler.file))) >= 3)
    sampler.end(is_finished=True)
    records = list(read_jsonl(sampler.file))
    assert sampler.file == tmp_path / "health" / "n1.jsonl"
    assert all(set(record) == KEYS for record in records)
    last = records[-1]
    assert (last["attempt"], last["host"]) == (3, "n1")
    assert 0 < last["mem_used_gib"] < last["mem_total_gib"]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert last["mem_total_gib"] == pytest.approx(pages / 2**30, rel=0.1)


def test_rates_are_those_since_the_sample_before(tmp_path, monkeypatch):
    proc = tmp_path / "proc"
    (proc / "net").mkdir(parents=True)
    (tmp_path / "block" / "sda").mkdir(parents=True)
    (tmp_path / "block" / "loop0").mkdir()
    for module in (health, memory_module):
        monkeypatch.setattr(module, "PROC", proc)
    monkeypatch.setattr(health, "BLOCK_DEVICES", tmp_path / "block")
    monkeypatch.setattr(health.time, "monotonic", iter([100.0, 102.0]).__next__)

    def write(busy: int, idle: int, mib: int) -> None:
        (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
        (proc / "meminfo").write_text("MemTotal: 4194304 kB\nMemAvailable: 1048576 kB\n")
        line = f"{mib << 20} 0 0 0 0 0 0 0 {2 * mib << 20} 0"
        (proc / "net" / "dev").write_text(f"h\nh\n  lo: {line}\n  ib0: {line}\n")
        sectors = (mib << 20) // 512
        disk = f"0 0 {sectors} 0 0 0 {3 * sectors} 0"
        (proc / "diskstats").write_text(f"8 0 sda {disk}\n8 1 sda1 {disk}\n7 0 loop0 {disk}\n")

    write(100, 300, 10)
    counters = health._Counters()
    write(160, 340, 30)
    found = counters.sample()
    assert found["cpu_percent"] == 60.0
    assert (found["net_rx_mib_s"], found["net_tx_mib_s"]) == (10.0, 20.0)
    assert (found["disk_read_mib_s"], found["disk_write_mib_s"]) == (10.0, 30.0)
    assert (found["mem_used_gib"], found["mem_total_gib"]) == (3.0, 4.0)


def test_the_memory_of_a_run_on_this_machine_is_what_its_processes_use(tmp_path, monkeypatch):
    """A rank below a launcher counts, shared memory counts once, and the page cache does not count."""
    monkeypatch.setattr(memory_module, "CGROUPS", tmp_path)
    monkeypatch.setattr(health.os, "getppid", os.getpid)
    before = health._Counters()._job_memory()
    rank = "import sys, time; own = b'1' * (200 << 20); print(1, flush=True); time.sleep(60)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        found = health._Counters()._job_memory()
        for pid in (*descendants(child.pid), child.pid):
            os.kill(pid, signal.SIGKILL)
    assert found["job_mem_by"] == "processes"
    grown = float(found["job_mem_gib"] or 0) - float(before["job_mem_gib"] or 0)
    assert 0.19 < grown < 0.35


def test_the_memory_of_a_job_is_that_of_its_control_group_if_it_can_be_read(tmp_path, monkeypatch):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/job_7/step_0\n")
    (tmp_path / "job_7").mkdir()
    (tmp_path / "job_7/memory.current").write_text(f"{5 << 29}\n")
    for name in ("PROC", "CGROUPS"):
        monkeypatch.setattr(memory_module, name, tmp_path)
    assert health._Counters()._job_memory() == {"job_mem_gib": 2.5, "job_mem_by": "cgroup"}
    for module in (health, memory_module):
        monkeypatch.setattr(module, "PROC", tmp_path / "none")
    monkeypatch.setattr(health, "BLOCK_DEVICES", tmp_path / "none")
    found = health._Counters().sample()
    assert {key for key, value in found.items() if value is not None} == {"load_1m"}
    assert memory_module.count_oom_kills() is None


def gpu(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "UUID": ("GPU-aaaa", "GPU-bbbb")[index],
        "slices": ((), ("MIG-x",))[index],
        "Name": "H100",
        "UtilizationRates": SimpleNamespace(gpu=90 + index),
        "MemoryInfo": memory(1.5, 80),
        "PowerUsage": 650_500,
        "Temperature": 88,
        "ClockInfo": 1200,
        "CurrentClocksThrottleReasons": 1 | 32 | 64,
        "TotalEccErrors": 0,
        **changes,
    }


def gpus(monkeypatch: pytest.MonkeyPatch, listed: str | None, **changes: Any) -> tuple[Any, str]:
    """Return the samples of the listed GPUs out of two, and the messages about them."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpu(0, **changes), gpu(1)))
    found = health._Gpus(listed)
    found.open()
    return found.sample()


def test_gpus_are_sampled_where_there_is_a_driver(monkeypatch):
    found, problem = gpus(monkeypatch, None)
    assert problem == ""
    said("\n".join(f"{key}: {value}" for key, value in found[1].items()))

    def init(nvml: FakeNvml) -> None:
        raise NVMLError("no driver")

    monkeypatch.setattr(FakeNvml, "nvmlInit", init)
    assert gpus(monkeypatch, None) == ([], "")


@pytest.mark.parametrize(
    ("listed", "indices"), [("1", [1]), ("GPU-b", [1]), ("MIG-x", [1]), ("", []), ("0,1", [0, 1])]
)
def test_only_the_gpus_of_the_job(monkeypatch, listed, indices):
    assert [item["index"] for item in gpus(monkeypatch, listed)[0]] == indices


def test_a_value_that_a_gpu_lacks_is_unknown_and_a_lost_gpu_is_a_problem(monkeypatch):
    found, problem = gpus(monkeypatch, "0", TotalEccErrors=NVMLError_NotSupported("no"))
    assert (found[0]["ecc_errors"], problem) == (None, "")
    found, problem = gpus(monkeypatch, "0", PowerUsage=NVMLError("GPU is lost"))
    assert found[0]["power_w"] is None
    said(problem)


def test_a_file_stays_bounded(tmp_path, monkeypatch):
    file = tmp_path / "n1.jsonl"
    file.write_text("".join(json.dumps({"time": number}) + "\n" for number in range(100)))
    thin_out(file)
    times = [record["time"] for record in read_jsonl(file)]
    assert times == [*range(0, 50, 2), *range(50, 100)]
    monkeypatch.setattr(health, "MAX_BYTES", 4000)
    sampler = HealthSampler(RunDir(tmp_path).attempt(3), "n1", 0.001, {})
    sampler.start()
    sizes = []

    def has_been_thinned() -> bool:
        sizes.append(sampler.file.stat().st_size if sampler.file.exists() else 0)
        return any(later < before for before, later in pairwise(sizes))

    wait_for(has_been_thinned)
    sampler.end(is_finished=True)
    assert max(sizes) < 5000


def test_a_full_disk_is_said_once_and_the_next_sample_is_tried(tmp_path, monkeypatch, capfd):
    tries = []

    def full(path: Path, record: dict[str, Any]) -> None:
        tries.append(record)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(health, "append_jsonl", full)
    sampler = HealthSampler(RunDir(tmp_path).attempt(3), "n1", 0.001, {})
    sampler.start()
    wait_for(lambda: len(tries) > 5)
    sampler.end(is_finished=True)
    assert capfd.readouterr().out.count(f"{sampler.file}: No space left on device") == 1


def test_only_files_of_health_that_changed_are_read(tmp_path, monkeypatch):
    made = Watched(tmp_path / "run").job().health(20)
    files, opened = HealthFiles(made.run), []
    newest_sample = samples_module.newest_sample

    def counted(file: Path) -> object:
        opened.append(file.stem)
        return newest_sample(file)

    monkeypatch.setattr(samples_module, "newest_sample", counted)
    files.update()
    files.update()
    assert sorted(opened) == ["node001", "node002"]
    append_jsonl(health_file(made.run, "node002"), {"time": ago(1), "attempt": 1, "cpu_percent": 50.0})
    with health_file(made.run, "node002").open("a") as stream:
        stream.write('{"cut off')
    files.update()
    assert opened[2:] == ["node002"]
    assert files.newest["node002"].number("cpu_percent") == 50.0


def test_of_many_samples_of_nodes_a_share_is_read(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    (run.path / "health").mkdir()
    for host in ("a", "b"):
        for number in range(100):
            append_jsonl(health_file(run, host), {"cpu_percent": float(number), "job_mem_gib": 1.0})
    assert [node.num_samples for node in read_nodes(run)] == [100, 100]
    monkeypatch.setattr(shown_module, "HEALTH_BYTES", health_file(run, "a").stat().st_size)
    first, _ = read_nodes(run)
    assert (first.num_samples, first.cpu_mean_percent) == (50, 49.0)
