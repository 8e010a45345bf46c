"""What TensorBoard shows of a run, read with its own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainkit.trainer.metrics import SCALARS, TensorBoardLog


def scalars(step: int, **changes: float | None) -> dict[str, float | None]:
    return {**dict.fromkeys(SCALARS, 1.0 + step), "mfu": None, **changes}


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path, 1)
    for step in (1, 2, 3):
        log.write(step, scalars(step, loss=0.5 * step, val_loss=2.0 if step == 2 else None))
    log.close()
    assert curve(tmp_path, "loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert curve(tmp_path, "val_loss") == [(2, 2.0)]
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == set(SCALARS) - {"mfu"}


def test_a_resume_hides_the_steps_that_are_done_again(tmp_path: Path) -> None:
    first = TensorBoardLog(tmp_path, 1)
    for step in range(1, 6):
        first.write(step, scalars(step, loss=10.0 + step))
    first.close()
    second = TensorBoardLog(tmp_path, 4)
    for step in (4, 5, 6):
        second.write(step, scalars(step, loss=20.0 + step))
    second.close()
    assert curve(tmp_path, "loss") == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0), (5, 25.0), (6, 26.0)]


def test_nothing_written_leaves_nothing_behind_that_breaks_the_reader(tmp_path: Path) -> None:
    TensorBoardLog(tmp_path, 1).close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert reader.Tags()["scalars"] == []
