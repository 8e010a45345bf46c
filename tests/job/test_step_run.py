"""How the tasks of an interactive step learn what they run."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.errors import TrainkitError
from trainkit.job.slurm_place import SlurmPlace
from trainkit.job.step_run import Announced, announce, announcement_file, await_announcement, withdraw

PLACE = SlurmPlace("7", "0", 0, 1, 0, 1, (2,), ("host0",), "4000")


def test_the_others_wait_for_what_the_first_announces(tmp_path: Path) -> None:
    value = {"run_dir": str(tmp_path / "mine"), "attempt": 3}
    threading.Timer(0.2, announce, (tmp_path / "runs", PLACE, value)).start()
    found = await_announcement(tmp_path / "runs", PLACE, timeout_s=10.0)
    assert isinstance(found, Announced)
    assert (found.run.path, found.attempt) == (tmp_path / "mine", 3)
    withdraw(tmp_path / "runs", PLACE)
    assert not announcement_file(tmp_path / "runs", PLACE).exists()


def test_all_end_with_the_code_of_a_start_that_failed(tmp_path: Path) -> None:
    announce(tmp_path, PLACE, {"exit_code": 2})
    assert await_announcement(tmp_path, PLACE) == 2


def test_what_another_step_announced_does_not_count(tmp_path: Path) -> None:
    announce(tmp_path, replace(PLACE, launcher_port="4001"), {"exit_code": 0})
    with pytest.raises(TrainkitError, match=r"task 0 of step 7\.0 has not said in 0\.2 s what to run"):
        await_announcement(tmp_path, PLACE, timeout_s=0.2)
