"""Tests the choice of a checkpoint: the newest intact one, and never step 0 by mistake."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from tests.support.disks import flip
from tests.support.models import ALONE
from tests.support.nfs import FAST_S, nfs_clients
from tests.support.runs import events
from tests.support.said import said
from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART, CheckpointError, TrainkitError
from trainkit.plan.keep import KeepRule
from trainkit.run import manifest
from trainkit.run.files import write_json
from trainkit.run.manifest import (
    SEAL,
    Checkpoint,
    best_step,
    find_damage,
    partials,
    point_best_at,
    published,
    rolled_back,
    seal,
)
from trainkit.run.rollbacks import Rollback, write_rollbacks
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint import loader
from trainkit.trainer.checkpoint.loader import choose_checkpoint, load_tensors
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest
from trainkit.trainer.checkpoint.storage import HashingWriter

TENSORS = {"a": torch.randn(200, 30), "b": torch.tensor(1.0)}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run with checkpoints after steps 1, 2 and 3, on a filesystem without caches."""
    monkeypatch.setattr(loader, "SETTLE_S", 0.0)
    run = RunDir(tmp_path)
    saver = CheckpointSaver(run.attempt(1), ALONE, TENSORS, KeepRule(last=9))
    for step in (1, 2, 3):
        saver.save(SaveRequest(step, {"progress": {"samples_seen": 16 * step}}, False, "test"), blocking=True)
    return run


def chosen_step(run: RunDir) -> int | None:
    chosen = choose_checkpoint(run.attempt(2), ALONE)
    if chosen is None:
        return None
    assert chosen[1].progress == {"samples_seen": 16 * chosen[0].step}
    return chosen[0].step


def rejections(run: RunDir) -> list[tuple[int, str]]:
    return [(event["step"], event["reason"]) for event in events(run.path, "checkpoint_rejected")]


def rewrite(manifest: Path, **changes: Any) -> None:
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))


SHARD, METADATA, MANIFEST = FILES = "__0_0.distcp", ".metadata", "manifest.json"
DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"{name} flipped": lambda f, n=name: flip(f / n) for name in FILES},
    **{f"{name} deleted": lambda f, n=name: (f / n).unlink() for name in FILES},
    f"{SHARD} a folder": lambda f: ((f / SHARD).unlink(), (f / SHARD).mkdir()),
    "manifest with nonsense for files": lambda f: rewrite(f / MANIFEST, files={SHARD: "yes"}),
}
"""Maps a kind of damage of any file to its code. tests/run/test_manifest.py has the other kinds."""


@pytest.mark.parametrize("damage", [*DAMAGES])
def test_a_damaged_one_is_set_aside_with_a_reason(run, damage, caplog):
    DAMAGES[damage](run.checkpoint_dir(3))
    assert chosen_step(run) == 2
    ((step, reason),) = rejections(run)
    assert step == 3
    assert reason
    assert f": {reason};" in caplog.text
    assert [c.step for c in published(run.checkpoints_dir)] == [1, 2]
    assert chosen_step(run) == 2, "and it stays aside"


def test_set_aside_twice_keeps_both(run):
    copy = shutil.copytree(run.checkpoint_dir(3), run.path / "copy")
    for _ in range(2):
        flip(run.checkpoint_dir(3) / SHARD)
        assert chosen_step(run) == 2
        shutil.copytree(copy, run.checkpoint_dir(3))
    names = {path.name for path in run.checkpoints_dir.iterdir()}
    assert {"step-00000003.rejected", "step-00000003.rejected-2"} < names
    assert chosen_step(run) == 3, "an intact copy brought back is used"


def test_when_none_is_intact_a_person_decides(run):
    for step in (1, 2, 3):
        flip(run.checkpoint_dir(step) / SHARD)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no intact checkpoint is left .*: 3 set aside") as caught:
            choose_checkpoint(run.attempt(2), ALONE)
        assert caught.value.exit_code == EXIT_NO_RESTART
        said(caught.value.hint)
    assert len(rejections(run)) == 3
    for folder in run.checkpoints_dir.glob("*.rejected"):
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"the checkpoints recorded in events.jsonl are missing"):
        choose_checkpoint(run.attempt(2), ALONE)
    run.events_file.unlink()
    assert chosen_step(run) is None


def test_what_cannot_be_read_is_not_thrown_out(run, monkeypatch):
    def stale(path: Path) -> str:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("trainkit.run.manifest.file_hash", stale)
    with pytest.raises(
        CheckpointError, match=r"rank 0 cannot read .*step-00000003: .* cannot be read"
    ) as caught:
        choose_checkpoint(run.attempt(2), ALONE)
    assert caught.value.exit_code == EXIT_FAILED
    monkeypatch.undo()
    assert chosen_step(run) == 3


@pytest.mark.parametrize("late", [1, 3])
def test_a_view_that_is_late_is_waited_for(run, monkeypatch, caplog, late):
    """The host sees the folder as it was before the newest checkpoints were published."""
    looks = []

    def stale(folder: Path) -> list[Checkpoint]:
        looks.append(folder)
        return published(folder)[: None if len(looks) > 2 else -late]

    monkeypatch.setattr(loader, "published", stale)
    monkeypatch.setattr(loader, "SETTLE_S", 5.0)
    monkeypatch.setattr(loader, "RETRY_S", 0.01)
    assert chosen_step(run) == 3
    [message] = [message for message in caplog.messages if "retrying" in message]
    said(message)


def test_what_another_host_has_published_on_nfs(tmp_path):
    """The NFS client of this host has seen the folder of the save before its files and its final name."""
    (tmp_path / "server").mkdir()
    with nfs_clients(tmp_path / "server", tmp_path / "first", tmp_path / "other"):
        first, other = RunDir(tmp_path / "first"), RunDir(tmp_path / "other")
        folders = [first.checkpoint_dir(step).with_suffix(".attempt-001.partial") for step in (1, 2)]
        for folder in folders:
            folder.mkdir(parents=True)
        for folder in partials(other.checkpoints_dir):
            # The ranks of this host write their shards in this way.
            writer = HashingWriter(folder)
            writer.set_up_storage_writer(is_coordinator=False)
            writer.prepare_local_plan(SavePlan([]))
        saver = CheckpointSaver(first.attempt(1), ALONE, TENSORS, KeepRule(last=9))
        for step in (1, 2):
            progress = {"progress": {"samples_seen": 16 * step}}
            saver.save(SaveRequest(step, progress, False, "test"), blocking=True)
        assert partials(other.checkpoints_dir)
        assert not partials(first.checkpoints_dir)
        started_s = time.monotonic()
        assert chosen_step(other) == 2
        assert time.monotonic() - started_s < FAST_S
        assert [checkpoint.step for checkpoint in published(first.checkpoints_dir)] == [1, 2]
        assert not any(map(find_damage, published(first.checkpoints_dir)))
        assert rejections(other) == []


@pytest.mark.parametrize(("function", "number"), [("read_json", errno.ENOENT), ("file_hash", errno.ESTALE)])
def test_a_file_that_is_listed_is_read_again(run, monkeypatch, function, number):
    """An NFS client may have looked for the file before the file existed."""
    read, looks = getattr(manifest, function), []

    def late(path: Path) -> Any:
        if path.parent == run.checkpoint_dir(3):
            looks.append(path)
            if len(looks) < 4:
                raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(manifest, function, late)
    monkeypatch.setattr(loader, "SETTLE_S", 5.0)
    monkeypatch.setattr(loader, "RETRY_S", 0.01)
    assert chosen_step(run) == 3
    assert len(looks) >= 4
    assert rejections(run) == []


def test_the_one_that_a_person_removed_is_not_waited_for_for_ever(run):
    shutil.rmtree(run.checkpoint_dir(3))
    assert chosen_step(run) == 2


def test_checkpoints_from_which_the_run_went_back_are_not_waited_for(run, caplog, monkeypatch):
    """A later attempt waits only for its own checkpoints."""
    monkeypatch.setattr(loader, "SETTLE_S", 60.0)
    write_rollbacks(run, [Rollback(1, 3, 1)])
    assert chosen_step(run) == 1
    assert not [message for message in caplog.messages if "retrying" in message]
    assert [path.name for path in rolled_back(run.checkpoints_dir)] == [
        "step-00000002.rolled-back",
        "step-00000003.rolled-back",
    ]
    monkeypatch.setattr(loader, "SETTLE_S", 0.0)
    saver = CheckpointSaver(run.attempt(2), ALONE, TENSORS, KeepRule(last=9))
    record = {"progress": {"samples_seen": 32, "num_rollbacks": 1}}
    saver.save(SaveRequest(2, record, False, "test"), blocking=True)
    assert choose_checkpoint(run.attempt(3), ALONE)[0].step == 2
    shutil.rmtree(run.checkpoint_dir(2))
    assert chosen_step(run) == 1


def test_a_run_without_checkpoints_goes_back_to_the_initial_weights(run):
    write_rollbacks(run, [Rollback(0, 3, 1)])
    assert chosen_step(run) is None
    saver = CheckpointSaver(run.attempt(2), ALONE, TENSORS, KeepRule(last=9))
    saver.save(SaveRequest(2, {"progress": {"num_rollbacks": 1}}, False, "test"), blocking=True)
    shutil.rmtree(run.checkpoint_dir(2))
    with pytest.raises(CheckpointError, match=r"recorded in events\.jsonl are missing"):
        chosen_step(run)


def test_best_link_that_a_crash_left_behind_is_put_right(run):
    newest = Checkpoint(run.checkpoint_dir(3), 3)
    manifest = {**newest.content(), "progress": {"best_step": 2}}
    write_json(newest.manifest_file, {**manifest, SEAL: seal(manifest)})
    point_best_at(Checkpoint(run.checkpoint_dir(1), 1))
    chosen = choose_checkpoint(run.attempt(2), ALONE)
    assert chosen[0].step == 3
    assert best_step(run.checkpoints_dir) == 2


def test_leftovers_and_strangers_are_no_checkpoints(run, caplog):
    partial = run.checkpoints_dir / "step-00000009.attempt-001.partial"
    shutil.copytree(run.checkpoint_dir(3), partial)
    (run.checkpoints_dir / "step-9").mkdir()
    (run.checkpoints_dir / "step-00000010").write_text("a file")
    (run.checkpoints_dir / "notes").mkdir()
    with caplog.at_level("INFO"):
        assert chosen_step(run) == 3
    assert partial.name in caplog.text
    assert not partial.exists()
    assert (run.checkpoints_dir / "notes").is_dir()
    assert rejections(run) == []


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a": torch.zeros(200, 31), "b": torch.zeros(())}, r"different shape: a \(200, 30\) -> \(200, 31\)"),
        ({"a": torch.zeros(200, 30)}, "only in the checkpoint: b"),
        ({**TENSORS, "c": torch.zeros(1)}, "not in the checkpoint: c"),
    ],
)
def test_another_model_is_refused(run, tensors, reason):
    checkpoint = Checkpoint(run.checkpoint_dir(3), 3)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(TrainkitError, match=reason) as caught:
        load_tensors(checkpoint, tensors, ALONE)
    assert caught.value.exit_code == EXIT_NO_RESTART
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
