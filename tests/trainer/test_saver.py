"""Tests that a save writes the state at the call, and that a published checkpoint stays."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager

from tests.support.disks import fill, small_disk
from tests.support.models import ALONE
from tests.support.runs import events
from tests.support.said import said
from trainkit.errors import CheckpointError
from trainkit.plan.keep import KeepRule
from trainkit.run.manifest import Checkpoint, best_step, find_damage, partials, published
from trainkit.run.pins import pin, unpin
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint import saver as saver_module
from trainkit.trainer.checkpoint.loader import choose_checkpoint, load_tensors
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {
        "model.w": torch.randn(512, 257),
        "model.b": torch.randn(33),
        "optimizer.w.exp_avg": torch.randn(512, 257),
        "optimizer.w.step": torch.tensor(3.0),
    }


@pytest.fixture
def make_saver(tensors: dict[str, Tensor]) -> Iterator[Callable[..., CheckpointSaver]]:
    made = []

    def make(folder: Path, keep_last: int | None = 10, keep: KeepRule | None = None) -> CheckpointSaver:
        keep = keep or KeepRule(last=keep_last)
        made.append(CheckpointSaver(RunDir(folder).attempt(1), ALONE, tensors, keep))
        return made[-1]

    yield make
    for saver in made:
        saver.finish()
        saver.close()


def request(step: int, is_best: bool = False) -> SaveRequest:
    return SaveRequest(step, {"progress": {"step": step}}, is_best, "test")


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in published(RunDir(folder).checkpoints_dir)]


def loaded(folder: Path, step: int, like: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: torch.full_like(tensor, -1.0) for name, tensor in like.items()}
    checkpoint = Checkpoint(RunDir(folder).checkpoint_dir(step), step)
    assert find_damage(checkpoint) == ""
    load_tensors(checkpoint, found, ALONE)
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def ruin(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.add_(1000.0)


@pytest.mark.parametrize("blocking", [True, False])
def test_goes_round(tmp_path, tensors, make_saver, blocking):
    saver = make_saver(tmp_path)
    saver.save(request(5), blocking)
    saver.finish()
    assert saver.last_step == 5
    assert_equal(loaded(tmp_path, 5, tensors), tensors)
    chosen = choose_checkpoint(RunDir(tmp_path).attempt(1), ALONE)
    assert chosen[1].progress == {"step": 5}
    assert events(tmp_path, "checkpoint_begin")[0]["step"] == 5
    assert events(tmp_path, "checkpoint_commit")[0]["step"] == 5


@pytest.mark.parametrize("blocking", [True, False])
def test_published_once_the_logs_of_its_steps_are_written(tmp_path, make_saver, blocking):
    """A resume does not log these steps again."""
    saver, published_before = make_saver(tmp_path), []

    def wait() -> None:
        published_before.append(steps(tmp_path))

    saver.save(replace(request(5), wait_for_logs=wait), blocking)
    saver.finish()
    assert (published_before, steps(tmp_path)) == ([[]], [5])


def test_state_may_change_as_soon_as_it_is_staged(tmp_path, tensors, make_saver, monkeypatch):
    """The state changes three times, because a save uses the buffers of the previous save."""
    saver = make_saver(tmp_path)
    expected = {}
    for step in (1, 2, 3):
        expected[step] = clone(tensors)
        gate = hold_back_writing(monkeypatch)
        saver.save(request(step), blocking=False)
        saver.wait_until_staged()
        ruin(tensors)
        assert steps(tmp_path) == list(range(1, step)), "nothing is published yet"
        gate.set()
        saver.finish()
    for step, state in expected.items():
        assert_equal(loaded(tmp_path, step, tensors), state)


def hold_back_writing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no file be opened before the event is set, so that the write comes after the changes."""
    from trainkit.trainer.checkpoint import storage

    gate = threading.Event()
    original = storage._HashingStream.__init__

    def wait_first(self: Any, path: Path) -> None:
        assert gate.wait(timeout=60)
        original(self, path)

    monkeypatch.setattr(storage._HashingStream, "__init__", wait_first)
    return gate


def test_without_memory_to_stage_in_training_waits_for_every_save(tmp_path, tensors, make_saver, monkeypatch):
    def fails(stager: DefaultStager, state: dict[str, Any]) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(RuntimeError("cudaHostRegister: out of memory"))
        return failed

    saver = make_saver(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(DefaultStager, "stage", fails)
        saver.allocate_buffers()
    for step in (5, 6):
        saver.save(request(step), blocking=False)
        assert saver.last_step == step, "published on return"


def test_blocking_after_asynchronous_and_back(tmp_path, tensors, make_saver):
    saver, expected = make_saver(tmp_path), {}
    for step, blocking in ((1, False), (2, False), (3, True), (4, False), (5, True)):
        expected[step] = clone(tensors)
        saver.save(request(step), blocking)
        saver.wait_until_staged()
        ruin(tensors)
    for step, state in expected.items():
        assert_equal(loaded(tmp_path, step, tensors), state)


def test_the_same_step_is_saved_once(tmp_path, make_saver):
    saver = make_saver(tmp_path)
    for blocking in (False, True, False):
        saver.save(request(5), blocking)
    saver.finish()
    assert steps(tmp_path) == [5]
    assert len(events(tmp_path, "checkpoint_begin")) == 1


def test_poll_reports_without_waiting(tmp_path, make_saver, monkeypatch):
    saver = make_saver(tmp_path)
    gate = hold_back_writing(monkeypatch)
    saver.save(request(1), blocking=False)
    saver.wait_until_staged()
    saver.poll()
    assert saver.last_step is None
    gate.set()
    saver._pending[2].exception(timeout=60)
    saver.poll()
    assert saver.last_step == 1


class TestKeeping:
    def test_the_newest_and_the_best_stay(self, tmp_path, make_saver):
        saver = make_saver(tmp_path, keep_last=2)
        for step in range(1, 7):
            saver.save(request(step, is_best=step == 2), blocking=True)
        assert steps(tmp_path) == [2, 5, 6]
        assert best_step(RunDir(tmp_path).checkpoints_dir) == 2
        saver.save(request(7, is_best=True), blocking=True)
        assert steps(tmp_path) == [6, 7]
        assert best_step(RunDir(tmp_path).checkpoints_dir) == 7
        assert partials(RunDir(tmp_path).checkpoints_dir) == []
        names = sorted(path.name for path in RunDir(tmp_path).checkpoints_dir.iterdir())
        assert names == ["best", "step-00000006", "step-00000007"]

    def test_what_the_rule_and_the_pins_keep_stays(self, tmp_path, make_saver):
        saver, run = make_saver(tmp_path, keep=KeepRule(last=1, every=4, best=2)), RunDir(tmp_path)
        values = {1: 9.0, 2: 1.0, 3: 8.0, 5: 0.5, 6: 2.0, 7: 3.0}
        for step in range(1, 10):
            metric = {"name": "val_loss", "mode": "min", "value": values.get(step)}
            record = {"progress": {"step": step}, **({"metric": metric} if step in values else {})}
            saver.save(SaveRequest(step, record, step in (1, 2, 5), "test"), blocking=True)
            if step == 3:
                pin(run, 3, "me")
        assert steps(tmp_path) == [2, 3, 4, 5, 8, 9]
        assert unpin(run, 3, "me")
        saver.save(request(10), blocking=True)
        assert steps(tmp_path) == [2, 4, 5, 8, 10]
        assert best_step(run.checkpoints_dir) == 5

    def test_all_stay(self, tmp_path, make_saver):
        saver = make_saver(tmp_path, keep_last=None)
        for step in range(1, 6):
            saver.save(request(step, is_best=step == 2), blocking=True)
        assert steps(tmp_path) == [1, 2, 3, 4, 5]
        assert best_step(RunDir(tmp_path).checkpoints_dir) == 2


@pytest.mark.parametrize("blocking", [True, False])
class TestFailure:
    @pytest.mark.parametrize("leave_bytes", [0, 600_000])
    def test_a_full_disk(self, tmp_path, make_saver, blocking, leave_bytes, caplog):
        """The disk is full from the first byte on, events included, or in the middle of a file."""
        with small_disk(tmp_path / "disk", "8m") as disk:
            saver = make_saver(disk)
            saver.save(request(1), blocking=True)
            with RunDir(disk).events_file.open("a") as stream:
                # The page is filled to its end, because it would otherwise have space for more events.
                stream.write(" " * (-RunDir(disk).events_file.stat().st_size % 4096 - 1) + "\n")
            filler = fill(disk, leave_bytes)
            saver.save(request(2), blocking)
            saver.finish()
            filler.unlink()
            self.check_failed_and_recover(disk, saver, blocking, caplog, "No space left", leave_bytes > 0)

    def test_a_save_that_cannot_fit(self, tmp_path, make_saver, blocking, monkeypatch, caplog):
        """A periodic save is not tried, the next one is, and the save at the end is always tried."""
        saver, disk = make_saver(tmp_path), Mock(free=0)
        monkeypatch.setattr(saver_module.shutil, "disk_usage", lambda folder: disk)
        for step, needs_space, disk.free in ((1, True, 0), (2, True, 9**9), (3, True, 900), (4, False, 900)):
            saver.save(replace(request(step), needs_space=needs_space), blocking)
            saver.finish()
            assert (saver.last_step == step) == (step != 3)
        assert steps(tmp_path) == [1, 2, 4]
        assert [event["step"] for event in events(tmp_path, "checkpoint_begin")] == [1, 2, 4]
        assert [event["step"] for event in events(tmp_path, "checkpoint_failed")] == [3]
        (text,) = (record.message for record in caplog.records if "was not tried" in record.message)
        said(text)

    def test_a_full_quota(self, tmp_path, make_saver, blocking, monkeypatch, caplog):
        saver = make_saver(tmp_path)
        saver.save(request(1), blocking=True)
        error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        with monkeypatch.context() as patch:
            patch.setattr(saver_module, "write_json", Mock(side_effect=error))
            saver.save(request(2), blocking)
            saver.finish()
        self.check_failed_and_recover(tmp_path, saver, blocking, caplog, "Disk quota exceeded")

    @staticmethod
    def check_failed_and_recover(
        folder: Path,
        saver: CheckpointSaver,
        blocking: bool,
        caplog: pytest.LogCaptureFixture,
        cause: str,
        events_are_written: bool = True,
    ) -> None:
        assert "step=2" in caplog.text
        assert cause in caplog.text
        if events_are_written:
            (event,) = events(folder, "checkpoint_failed")
            assert event["step"] == 2
            assert cause in event["error"]
        assert saver.last_step == 1
        with pytest.raises(CheckpointError, match=f"state after step 2 could not be saved to .*{cause}"):
            saver.require_saved(2)
        checkpoints_dir = RunDir(folder).checkpoints_dir
        assert [path.name for path in checkpoints_dir.iterdir()] == ["step-00000001"], "no half folder"
        assert find_damage(published(checkpoints_dir)[0]) == ""
        saver.save(request(3), blocking)
        saver.finish()
        assert steps(folder) == [1, 3]
        assert all(find_damage(checkpoint) == "" for checkpoint in published(checkpoints_dir))
        saver.require_saved(3)

    def test_a_folder_that_is_there_already_is_not_touched(self, tmp_path, make_saver, blocking, caplog):
        make_saver(tmp_path).save(request(1), blocking=True)
        written = (RunDir(tmp_path).checkpoint_dir(1) / "manifest.json").read_text()
        other = make_saver(tmp_path)
        other.save(request(1), blocking)
        other.finish()
        assert "step=1" in caplog.text
        assert (RunDir(tmp_path).checkpoint_dir(1) / "manifest.json").read_text() == written
        assert find_damage(published(RunDir(tmp_path).checkpoints_dir)[0]) == ""

    def test_a_folder_that_another_rank_made_and_this_host_does_not_see(
        self, tmp_path, make_saver, blocking, monkeypatch
    ):
        """`mkdir` asks the server, because the cache of a parallel file system's client can be stale."""
        partial = RunDir(tmp_path).checkpoints_dir / "step-00000001.attempt-001.partial"
        partial.mkdir(parents=True)
        is_dir = Path.is_dir
        monkeypatch.setattr(Path, "is_dir", lambda path: path != partial and is_dir(path))
        saver = make_saver(tmp_path)
        saver.save(request(1), blocking)
        saver.finish()
        saver.require_saved(1)
        assert find_damage(published(RunDir(tmp_path).checkpoints_dir)[0]) == ""

    def test_a_folder_that_cannot_be_written(self, tmp_path, make_saver, blocking, caplog):
        RunDir(tmp_path).checkpoints_dir.write_text("a file where the folder should be")
        saver = make_saver(tmp_path)
        saver.save(request(1), blocking)
        saver.finish()
        assert "step=1" in caplog.text
        assert saver.last_step is None
