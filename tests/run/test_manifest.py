"""Tests manifests: the text for each kind of damage, and how damaged checkpoints are handled."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.said import said
from trainkit.run import manifest
from trainkit.run.manifest import (
    Checkpoint,
    best_step,
    file_hash,
    find_damage,
    hash_damage,
    newest_intact,
    partials,
    point_best_at,
    published,
    rejects,
    remove,
    seal,
    set_aside,
)

SHARDS = ("__0_0.distcp", "__1_0.distcp")


def make(folder: Path, step: int) -> Checkpoint:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = {}
    for index, name in enumerate(SHARDS):
        (path / name).write_bytes(bytes([index, step % 256]) * 600)
        files[name] = {"bytes": 1200, "sha256": file_hash(path / name)}
    checkpoint = Checkpoint(path, step)
    value = {"version": 1, "step": step, "progress": {"samples_seen": 16}, "files": files}
    write(checkpoint, {**value, "sha256": seal(value)})
    return checkpoint


def write(checkpoint: Checkpoint, value: Any) -> None:
    checkpoint.manifest_file.write_text(json.dumps(value))


def change(checkpoint: Checkpoint, **values: Any) -> None:
    """Write the manifest with other values, and make them look like the values of the save."""
    value = {**checkpoint.content(), **values}
    write(checkpoint, {**value, "sha256": seal(value)})


def tamper(checkpoint: Checkpoint, **values: Any) -> None:
    """Write the manifest with values that differ from the values of the save."""
    write(checkpoint, {**checkpoint.content(), **values})


def flip(path: Path, position: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return make(tmp_path, 7)


def shard(checkpoint: Checkpoint) -> Path:
    return checkpoint.path / SHARDS[1]


DAMAGES: dict[str, Callable[[Checkpoint], object]] = {
    "truncated": lambda c: os.truncate(shard(c), 1199),
    "grown": lambda c: os.truncate(shard(c), 1201),
    "deleted": lambda c: shard(c).unlink(),
    "no manifest": lambda c: c.manifest_file.unlink(),
    "empty manifest": lambda c: c.manifest_file.write_text(""),
    "no text": lambda c: c.manifest_file.write_bytes(b"\xff"),
    "a list": lambda c: write(c, []),
    "no files": lambda c: change(c, files=None),
    "names nothing": lambda c: change(c, files={}),
    "newer": lambda c: change(c, version=2),
    "version of nonsense": lambda c: change(c, version="1"),
    "of another step": lambda c: change(c, step=8),
    "sizes of nonsense": lambda c: change(c, files={SHARDS[0]: {"bytes": "many"}}),
    "no sizes": lambda c: change(c, files={SHARDS[0]: {}}),
    "a number was changed": lambda c: tamper(c, progress={"samples_seen": 32}),
    "no seal": lambda c: write(c, {"version": 1, "step": 7, "files": c.manifest().files}),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_that_shows_without_reading_tensors(checkpoint, kind):
    DAMAGES[kind](checkpoint)
    found = find_damage(checkpoint, reads_tensors=False)
    said(found)
    assert find_damage(checkpoint) == found


def test_damage_that_only_the_hashes_show(checkpoint):
    """A byte is flipped, a rank that reads a part of the files finds it, and then a file has no hash."""
    flip(shard(checkpoint))
    assert find_damage(checkpoint, reads_tensors=False) == ""
    said(find_damage(checkpoint))
    assert [hash_damage(checkpoint, part, 3) for part in range(3)] == ["", find_damage(checkpoint), ""]
    change(checkpoint, files={SHARDS[0]: {"bytes": 1200}})
    assert find_damage(checkpoint, reads_tensors=False) == ""
    said(find_damage(checkpoint))


def test_no_flipped_byte_of_a_manifest_goes_unseen(checkpoint):
    whole = checkpoint.manifest_file.read_bytes()
    for position in range(len(whole)):
        flip(checkpoint.manifest_file, position)
        assert find_damage(checkpoint, reads_tensors=False) != "", position
        checkpoint.manifest_file.write_bytes(whole)


def test_published_are_those_with_a_plain_name_by_step(tmp_path):
    assert [listing(tmp_path / "none") for listing in (published, partials, rejects)] == [[], [], []]
    for step in (100, 20, 123_456_789):
        make(tmp_path, step)
    for name in ("step-00000030.partial", "step-00000040.rejected", "step-50", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000060").touch()
    assert [item.step for item in published(tmp_path)] == [20, 100, 123_456_789]
    assert [path.name for path in partials(tmp_path)] == ["step-00000030.partial"]
    assert [path.name for path in rejects(tmp_path)] == ["step-00000040.rejected"]


def test_set_aside_never_overwrites(tmp_path):
    found = []
    for count in range(3):
        checkpoint = make(tmp_path, 7)
        (checkpoint.path / "count").write_text(str(count))
        found.append(set_aside(checkpoint))
    names = [path.name for path in found]
    assert names == ["step-00000007.rejected", "step-00000007.rejected-2", "step-00000007.rejected-3"]
    assert rejects(tmp_path) == found
    assert [(path / "count").read_text() for path in found] == ["0", "1", "2"]
    assert published(tmp_path) == []


def test_remove_interrupted_leaves_nothing_that_looks_published(checkpoint, monkeypatch):
    folder = checkpoint.path.parent
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(manifest.shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
        remove(checkpoint.path)
    assert published(folder) == []
    for leftover in partials(folder):
        remove(leftover)
    assert list(folder.iterdir()) == []


def test_newest_intact(tmp_path):
    checkpoints = [make(tmp_path, step) for step in (1, 2, 3)]
    assert newest_intact(checkpoints) == checkpoints[2]
    flip(shard(checkpoints[2]))
    assert newest_intact(checkpoints) == checkpoints[1]
    assert newest_intact([checkpoints[2]]) is None


def test_best_link_moves_and_survives_a_leftover(tmp_path):
    first, second = make(tmp_path, 1), make(tmp_path, 2)
    assert best_step(tmp_path) is None
    (tmp_path / "best").symlink_to("step-00000007.rejected")
    assert best_step(tmp_path) is None
    (tmp_path / f".best-{os.getpid()}").symlink_to("nowhere")
    point_best_at(first)
    assert best_step(tmp_path) == 1
    point_best_at(second)
    assert best_step(tmp_path) == 2
    assert (tmp_path / "best").resolve() == second.path.resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\0b"])
def test_a_manifest_names_only_files_of_its_folder(checkpoint, name):
    change(checkpoint, files={name: {"bytes": 1, "sha256": ""}})
    said(find_damage(checkpoint))
    with pytest.raises(ValueError, match="it lists"):
        checkpoint.manifest()


@pytest.mark.parametrize("make_it", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_damage(checkpoint, make_it):
    for file in (checkpoint.path / SHARDS[0], checkpoint.manifest_file):
        if file.name == SHARDS[0]:
            files = checkpoint.content()["files"]
            change(checkpoint, files={**files, SHARDS[0]: {**files[SHARDS[0]], "bytes": 0}})
        file.unlink()
        make_it(file)
        said(find_damage(checkpoint))
