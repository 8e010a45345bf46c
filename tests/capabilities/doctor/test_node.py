"""Tests the checks of one node with a made-up GPU driver, and with names, interfaces, ports and folders."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.disks import fill, small_disk
from tests.support.fake_gpus.pynvml import FakeNvml, memory
from tests.support.said import said
from trainkit.capabilities.doctor import Request, node
from trainkit.job.preflight import Finding

WELL = {"Name": "H100", "MemoryInfo": memory(1, 80), "Temperature": 40, "ComputeRunningProcesses": []}


def used_by(*pids: int) -> dict[str, Any]:
    return {"ComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in pids]}


@pytest.mark.parametrize(
    ("changes", "state", "hint"),
    [
        ({}, "ok", ""),
        ({"Temperature": 91}, "warning", "the GPU is hot"),
        (used_by(77), "warning", "process 77 uses this GPU: run `ps -o user,args -p 77`"),
        (used_by(7, 8), "warning", "processes 7, 8 use this GPU: run `ps -o user,args -p 7,8`"),
        ({"MemoryInfo": memory(30, 80)}, "warning", "other processes use memory on this GPU"),
        ({"TotalEccErrors": 3}, "failure", "`nvidia-smi -q -d ECC"),
    ],
)
def test_gpu(changes, state, hint):
    check = node.gpu_finding(FakeNvml({**WELL, **changes}), "0")
    assert (check.name, check.state) == ("GPU 0", state)
    assert check.hint.startswith(hint)
    assert check.value.startswith("has had 3 " if state == "failure" else "H100, ")


def test_mig_slice_whose_temperature_and_processes_are_unknown():
    known = {name: WELL[name] for name in ("Name", "MemoryInfo")}
    found = node.gpu_finding(FakeNvml(known), "0")
    assert found == Finding("GPU 0", "ok", found.value)
    said(found.value)


@pytest.mark.parametrize(
    ("listed", "names"), [("2,0", ["2", "0"]), (None, ["0", "1"]), ("MIG-x", ["0", "1"])]
)
def test_the_gpus_that_this_task_sees(tmp_path, monkeypatch, listed, names):
    monkeypatch.setattr(node, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(WELL, WELL))
    monkeypatch.setattr(node, "driver_version", lambda: "580.1")
    monkeypatch.setattr(node, "gpu_finding", lambda _, name: Finding(name, "ok", ""))
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert [found.name for found in node.check_gpus()] == ["driver", *names]


@pytest.mark.parametrize(
    ("check", "asked", "value"),
    [
        (node.check_name, {"peers": ("x.invalid",)}, "x.invalid cannot be resolved, and neither can its"),
        (node.check_name, {"peers": ("localhost",)}, "localhost is 127.0.0.1"),
        (node.check_interface, {"network": "none0"}, "launch.network is none0"),
    ],
)
def test_host_or_interface_that_cannot_be_used(check, asked, value, monkeypatch):
    monkeypatch.setattr(node, "node_addr", lambda name, **_: name)
    found = check(Request(Path("/tmp"), **asked))
    assert found.state == "failure"
    assert found.value.startswith(value)


def test_a_disk_with_little_space(tmp_path):
    with small_disk(tmp_path / "disk", "2m") as full:
        fill(full)
        *_, check = node.check_folder(Request(full))
    assert (check.name, check.state) == ("disk", "failure")
    said(check.value)
    assert "ckpt prune" in check.hint
    with small_disk(tmp_path / "larger", "64m") as small:
        first = next(iter(node.check_folder(Request(small, quick=True))))
    assert (first.name, first.state) == ("disk", "failure")
    assert first.value.startswith("0.1 GiB free in ")


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(node.tempfile, "TemporaryDirectory", refuse)
    (check,) = node.check_folder(Request(tmp_path / "runs"))
    assert check.state == "failure"
    said(check.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("file/runs", "{}/file cannot be written: Not a directory"),
        ("file", "{}/file cannot be written: Not a directory"),
        ("link/runs", "no files can be created in {}/link"),
        ("/proc/runs", "no files can be created in /proc"),
    ],
)
def test_folder_below_what_is_no_folder(name, value, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (check,) = node.check_folder(Request(tmp_path / name, quick=True))
    assert (check.state, check.value) == ("failure", value.format(tmp_path))


def test_folder_that_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "VISIBLE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(node, "own_host", lambda: "node2")
    with node.shared_file(tmp_path / "runs") as shared:
        assert not isinstance(shared, Finding)
        visible = Request(tmp_path, quick=True, shared=(shared[0], "node1"))
        seen = {item.name: item for item in node.check_folder(visible)}
        assert seen["shared"].state == "ok"
        hidden = Request(tmp_path, quick=True, shared=(f"{tmp_path}/gone", "node1"))
        seen = {item.name: item for item in node.check_folder(hidden)}
    said(seen["shared"].value)
    assert seen["shared"].state == "failure"
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_task_leaves_is_removed(tmp_path):
    with node.shared_file(tmp_path / "runs") as shared:
        assert not isinstance(shared, Finding)
        for name in (f"{Path(shared[0]).name}-abc", ".doctor-of-another"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "probe").touch()
    assert [path.name for path in tmp_path.iterdir()] == [".doctor-of-another"]
