"""Provides trained runs that the tests of replays share, and ranks that start without delay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import ForkedWorker, start_worker
from tests.support.replays import OPTIONS, add_job
from tests.support.runs import train
from trainkit.capabilities.replay import replay


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns the trained run of a layout. A test that changes the run copies it."""
    runs: dict[str, Path] = {}

    def run_of(layout: Sequence[str] = ()) -> Path:
        key = " ".join(layout)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("trained") / "run"
            train(runs[key], [*OPTIONS, *layout], 2 if layout else 1)
            add_job(runs[key])
        return runs[key]

    return run_of


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the ranks of a replay forks of a process that has imported torch."""

    def fork(argv: Sequence[str], *, environ: dict[str, str], output: Any, **_: Any) -> ForkedWorker:
        assert tuple(argv[-3:-1]) == ("-m", "trainkit.trainer")
        return ForkedWorker(start_worker(Path(argv[-1]), Path(output.name), environ))

    monkeypatch.setattr(replay, "start_child", fork)
    monkeypatch.setattr(replay, "kill_group", ForkedWorker.kill)
