"""Tests the detection of this machine's cores and GPUs, as far as it works without a GPU."""

from typing import Any

import pytest

from tests.support.fake_gpus.pynvml import FakeNvml
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
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/cpu.max").write_text("150000 100000\n")
    (tmp_path / "a/b/cpu.max").write_text("max 100000\n")
    membership = tmp_path / "cgroup"
    membership.write_text("1:name=systemd:/x\n0::/a/b\n")
    assert cgroup_cpu_quota(tmp_path, membership) == 1.5
    (tmp_path / "a/b/cpu.max").write_text("50000 100000\n")
    assert cgroup_cpu_quota(tmp_path, membership) == 0.5


def test_no_cgroup_no_quota(tmp_path):
    assert cgroup_cpu_quota(tmp_path, tmp_path / "missing") is None
    (tmp_path / "cgroup").write_text("0::/\n")
    assert cgroup_cpu_quota(tmp_path, tmp_path / "cgroup") is None


def test_this_machine():
    machine = detect_machine()
    assert machine.num_cpus >= 1
    assert machine.num_gpus == len(machine.gpu_names)


@pytest.mark.skipif(NVIDIA_DRIVER.exists(), reason="there is a GPU here")
def test_without_a_driver():
    machine = detect_machine()
    assert (machine.num_gpus, machine.gpu_reason) == (0, "there is no NVIDIA driver on this machine")


def test_memory_counts_what_can_be_swapped_out(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4 kB\nHugePages_Total:  0\nSwapTotal:  1 kB\n")
    assert host_memory(meminfo) == 5 * 1024
    assert host_memory(tmp_path / "none") is None
