"""The checks of the run folder and of the folders for temporary files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.disks import fill, small_disk
from trainkit.doctor import disk
from trainkit.doctor.check import Check, Request


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
        visible = Request(tmp_path, quick=True, shared=(shared[0], "node1"))
        seen = {item.name: item for item in disk.check_folder(visible)}
        assert seen["shared"].state == "ok"
        hidden = Request(tmp_path, quick=True, shared=(f"{tmp_path}/gone", "node1"))
        seen = {item.name: item for item in disk.check_folder(hidden)}
    assert seen["shared"].value == f"{tmp_path} is not shared: a file of node1 is not visible on node2"
    assert seen["shared"].state == "failure"
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_task_leaves_is_removed(tmp_path: Path) -> None:
    with disk.shared_file(tmp_path / "runs") as shared:
        assert not isinstance(shared, Check)
        for name in (f"{Path(shared[0]).name}-abc", ".doctor-of-another"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "probe").touch()
    assert [path.name for path in tmp_path.iterdir()] == [".doctor-of-another"]


@pytest.mark.parametrize(("size", "state"), [("4m", "failure"), ("64m", "warning")])
def test_small_dev_shm_fails_only_under_what_a_job_refuses(size: str, state: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", size) as shm:
        check = disk.check_space("/dev/shm", shm, disk.SHM_HINT)
    assert (check.state, check.value) == (state, f"{size[:-1]} MiB free in {shm}")
    assert "--shm-size" in check.hint
