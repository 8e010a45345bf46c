"""A config of a few steps in which nothing but training is done, and what was changed for that."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.config import RunConfig
from trainkit.config.changes import Change, short_training
from trainkit.errors import UsageError
from trainkit.frozen import dataclass

PROFILED_STEPS = 3
"""The last steps, which the profiler records: they are slower, so none of them is measured."""
COUNTED_PROFILED_STEPS = PROFILED_STEPS - 1
"""In the first of them the ranks wait for each other to start their profilers."""
PROFILED_RANKS = 4
"""A profile of every rank of a large job would take long to write and to read."""


@dataclass(frozen=True)
class Length:
    """The steps of every run of a bench, from 1 on: to warm up, to be measured, to be profiled."""

    steps: int
    warmup: int

    def __post_init__(self) -> None:
        if self.warmup + PROFILED_STEPS >= self.steps:
            raise UsageError(
                f"--steps {self.steps}: with {self.warmup} to warm up (--warmup) and {PROFILED_STEPS} that "
                "are profiled none is left to be measured",
                hint=f"at least --steps {self.warmup + PROFILED_STEPS + 1}",
            )

    @property
    def measured(self) -> range:
        """The steps that count."""
        return range(self.warmup + 1, self.steps - PROFILED_STEPS + 1)

    @property
    def first_profiled(self) -> int:
        """The step that the profiler begins with."""
        return self.measured.stop

    @property
    def words(self) -> str:
        return (
            f"{self.steps} steps each: {self.warmup} to warm up, {len(self.measured)} measured, "
            f"{PROFILED_STEPS} profiled"
        )


def profiled_ranks(world_size: int) -> tuple[int, ...]:
    """All ranks of a small job, of a larger one the first, the last, and some in between."""
    count = min(world_size, PROFILED_RANKS)
    return tuple(index * (world_size - 1) // max(1, count - 1) for index in range(count))


def changes(config: RunConfig, length: Length, world_size: int, keeps_name: bool) -> list[Change]:
    """What a bench changes for all of its runs; what is trained, with what and on what stays as it is.

    `keeps_name` is for a name that was typed.
    """
    possible = [
        *([] if keeps_name else _named(config)),
        *short_training(config, length.steps, "bench"),
        *_bare(config),
        *_profiled(config, length, world_size),
    ]
    return [change for change in possible if change.value != change.before]


def _named(config: RunConfig) -> Iterator[Change]:
    yield Change("name", f"{config.name}-layouts"[:100], config.name, "these are not runs of their own")


def _bare(config: RunConfig) -> Iterator[Change]:
    """Nothing is kept of these runs, and none of them is started again."""
    checkpoint, requeue, logging = config.checkpoint, config.requeue, config.logging
    why = "nothing is saved while it is measured"
    yield Change("checkpoint.every_steps", None, checkpoint.every_steps, why)
    yield Change("checkpoint.every_minutes", None, checkpoint.every_minutes, why)
    yield Change("checkpoint.best_metric", None, checkpoint.best_metric, why)
    yield Change("checkpoint.async", False, checkpoint.async_save, "no memory is set apart for saves")
    yield Change("requeue.on", [], list(requeue.on), "a layout that fails has failed")
    yield Change("requeue.follow_ups", 0, requeue.follow_ups, "a layout that fails has failed")
    why = "summary.csv is what is looked at"
    yield Change("logging.tensorboard", False, logging.tensorboard, why)
    yield Change("logging.mlflow", None, logging.mlflow, why)
    yield Change("logging.wandb", None, logging.wandb, why)


def _profiled(config: RunConfig, length: Length, world_size: int) -> Iterator[Change]:
    profiler, why = config.profiler, "the last steps tell what communication is exposed"
    ranks = list(profiled_ranks(world_size))
    yield Change("profiler.start_step", length.first_profiled, profiler.start_step, why)
    yield Change("profiler.num_steps", PROFILED_STEPS, profiler.num_steps, why)
    yield Change("profiler.ranks", ranks, list(profiler.ranks), why)
