"""Tests the detection of this machine's cores and GPUs, as far as it works without a GPU."""

from typing import Any

import pytest

from tests.support.fake_gpus.pynvml import FakeNvml
from tests.support.said import said
from trainkit.cluster import machine as memory
from trainkit.cluster.machine import (
    NVIDIA_DRIVER,
    cgroup_cpu_quota,
    detect_machine,
    host_memory,
    visible_names,
)

UUIDS = ("GPU-aaa1", "GPU-bbb2", "GPU-bbc3")
GPUS: list[dict[str, Any]] = [{"Name": name, "UUID": uuid} for name, uuid in zip("ABC", UUIDS, strict=True)]
GPUS[0]["slices"] = ("MIG-1", "MIG-2")


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ("A", "B", "C")),
        ("", ()),
        ("-1", ()),
        ("1", ("B",)),
        ("2,0", ("C", "A")),
        ("0,7,1", ("A",)),
        ("0, 1", ("A", "B")),
        ("GPU-bbc", ("C",)),
        ("GPU-nope,0", ()),
        ("MIG-1,MIG-2", ("A", "A")),
        ("NoDevFiles", ()),
    ],
)
def test_visible_devices(chosen, names):
    assert visible_names(FakeNvml(*GPUS), chosen) == names


def test_cgroup_quota_is_the_smallest_of_the_path(tmp_path):
    assert cgroup_cpu_quota(tmp_path, tmp_path / "missing") is None
    (tmp_path / "cgroup").write_text("0::/\n")
    assert cgroup_cpu_quota(tmp_path, tmp_path / "cgroup") is None
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/cpu.max").write_text("150000 100000\n")
    (tmp_path / "a/b/cpu.max").write_text("max 100000\n")
    membership = tmp_path / "cgroup"
    membership.write_text("1:name=systemd:/x\n0::/a/b\n")
    assert cgroup_cpu_quota(tmp_path, membership) == 1.5
    (tmp_path / "a/b/cpu.max").write_text("50000 100000\n")
    assert cgroup_cpu_quota(tmp_path, membership) == 0.5


def test_this_machine():
    machine = detect_machine()
    assert machine.num_cpus >= 1
    assert machine.num_gpus == len(machine.gpu_names)


@pytest.mark.skipif(NVIDIA_DRIVER.exists(), reason="there is a GPU here")
def test_without_a_driver():
    machine = detect_machine()
    assert machine.num_gpus == 0
    said(machine.gpu_reason)


def test_memory_counts_what_can_be_swapped_out(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4 kB\nHugePages_Total:  0\nSwapTotal:  1 kB\n")
    assert host_memory(meminfo) == 5 * 1024
    assert host_memory(tmp_path / "none") is None


USED, NO_OOM = f"{3 << 29}\n", "oom_kill_disable 0\nunder_oom 0\n"


@pytest.mark.parametrize(
    ("own", "file", "text", "memory_gib", "oom_kills"),
    [
        ("0::/sys/job_7/step_0/task_0", "sys/job_7/memory.current", USED, 1.5, None),
        # The control group of a login counts the page cache of every file that its user has read.
        ("0::/user.slice", "user.slice/memory.current", USED, None, None),
        ("0::/user.slice/my_job_7", "user.slice/my_job_7/memory.current", USED, None, None),
        ("4:memory:/slurm/job_7", "memory/slurm/job_7/memory.usage_in_bytes", USED, 1.5, None),
        ("0::/a/job_7/b", "a/job_7/b/memory.events", "oom 3\noom_kill 2\noom_group_kill 0\n", None, 2),
        (
            "9:name=systemd:/\n4:memory:/job_7\n0::/",
            "memory/job_7/memory.oom_control",
            f"{NO_OOM}oom_kill 5\n",
            None,
            5,
        ),
        # The kernel does not count kills, and the memory has no control group.
        ("4:memory:/", "memory/memory.oom_control", NO_OOM, None, None),
        ("", None, "", None, None),
        ("0::/", None, "", None, None),
        ("1:cpu:/x", None, "", None, None),
    ],
)
def test_the_control_group_of_a_job(tmp_path, monkeypatch, own, file, text, memory_gib, oom_kills):
    """The limit comes from the cgroup of the job, the number of kills from the cgroup of this process."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"{own}\n")
    if file is not None:
        (tmp_path / "sys" / file).parent.mkdir(parents=True)
        (tmp_path / "sys" / file).write_text(text)
    monkeypatch.setattr(memory, "PROC", tmp_path)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "sys")
    assert (memory.job_memory_gib(), memory.count_oom_kills()) == (memory_gib, oom_kills)


MIB = "55d0c-7ffd ---p 00000000 00:00 0    [rollup]\nRss: 999999 kB\nPss:  {} kB\nPss_Anon: 7 kB\n"


@pytest.mark.parametrize(
    ("files", "memory_gib"),
    [
        ({}, None),
        ({1: ""}, None),
        ({1: None}, None),  # the process belongs to another user
        ({1: MIB.format(1 << 20)}, 1.0),
        ({1: MIB.format(1 << 20), 2: None, 3: MIB.format(1 << 19)}, 1.5),
        ({1: MIB.format(0)}, 0.0),
        ({1: MIB.format(300 << 10), 2: "Pss"}, 0.293),
    ],
)
def test_the_memory_of_processes(tmp_path, monkeypatch, files, memory_gib):
    for pid, text in files.items():
        (tmp_path / f"{pid}").mkdir()
        if text is not None:
            (tmp_path / f"{pid}" / "smaps_rollup").write_text(text)
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert memory.memory_of_gib([*files, 99]) == memory_gib
