"""Tests the workers that read a task's samples. A worker that hangs in its fork is replaced."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, _utils

from tests.support.said import said
from trainkit.trainer import task_batches
from trainkit.trainer.task_batches import ForkedLoader
from trainkit.trainer.torch_private import data_workers

to_hang: list[Path] = []
"""A file for each process that should hang in its fork. Such a process creates its file."""


def hang() -> None:
    """Hang before any code of the new process runs, as during a wait for a lock of Python itself."""
    for file in to_hang:
        if not file.exists():
            file.write_text(str(os.getpid()))
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            while True:
                signal.sigwait([signal.SIGTERM])


os.register_at_fork(after_in_child=hang)


class Squares(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index**2


@pytest.fixture
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Return the files of the processes that should hang, to which tests add files."""
    monkeypatch.setattr(task_batches, "START_S", 5.0)
    # the time that a loader waits for its workers
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield to_hang
    to_hang.clear()


def loader(num_workers: int) -> ForkedLoader:
    return ForkedLoader(Squares(), num_workers, sampler=range(9))


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_loader_begins_again_with_the_same_workers(num_workers):
    squares = loader(num_workers)
    found: list[Any] = []
    for _ in range(2):
        items = iter(squares)
        found.append(({worker.pid for worker in data_workers(items)}, list(items)))
    assert found[0] == found[1]
    assert (len(found[0][0]), found[0][1]) == (num_workers, [i**2 for i in range(9)])


def test_a_worker_that_hangs_in_its_fork_is_replaced(hangs, tmp_path, caplog):
    hangs.append(tmp_path / "hangs")
    items = iter(loader(2))
    assert list(items) == [i**2 for i in range(9)]
    [message] = caplog.messages
    said(message)
    assert not is_running(int(hangs[0].read_text()))


def test_it_gives_up(hangs, tmp_path, monkeypatch):
    monkeypatch.setattr(task_batches, "MAX_STARTS", 2)
    monkeypatch.setattr(task_batches, "START_S", 0.5)
    hangs += [tmp_path / name for name in "ab"]
    with pytest.raises(RuntimeError, match="data workers hung during the fork, 2 times in a row"):
        iter(loader(1))
    assert not any(is_running(int(file.read_text())) for file in hangs)
