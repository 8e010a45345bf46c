"""A config made short enough for a drill, and what was changed for that."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.config import LoadedConfig, RunConfig
from trainkit.config.changes import Change, short_training, with_values

DEFAULT_STEPS = 30
FEWEST_STEPS = 12
"""With fewer there are not two checkpoints before the last third, in which nothing is interrupted."""
SAVES = 6
"""How often a drill saves."""
ORIGIN = "trainkit drill"


def save_interval(num_steps: int) -> int:
    """Steps between two checkpoints of a drill."""
    return num_steps // SAVES


def shorten(loaded: LoadedConfig, num_steps: int, device: str) -> tuple[LoadedConfig, list[Change]]:
    """The config of a drill of so many steps: what is trained, with what and on what stays as it is.

    `device` is what the plan found: ``cpu`` or ``cuda``.
    """
    possible = [*_changes(loaded.config, num_steps), *_same_bits(loaded.config, device)]
    changes = [change for change in possible if change.value != change.before]
    return with_values(loaded, {change.key: change.value for change in changes}, ORIGIN), changes


def _changes(config: RunConfig, num_steps: int) -> Iterator[Change]:
    yield from short_training(config, num_steps, "drill")
    checkpoint = config.checkpoint
    yield Change(
        "checkpoint.every_steps", save_interval(num_steps), checkpoint.every_steps, "a drill is short"
    )
    yield Change("checkpoint.every_minutes", None, checkpoint.every_minutes, "saves come at known steps")


CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def _same_bits(config: RunConfig, device: str) -> Iterator[Change]:
    """What two runs on GPUs need to be equal to the last digit."""
    if device == "cpu":
        return
    why = "only then are two runs on GPUs equal to the last digit"
    yield Change("train.deterministic", True, config.train.deterministic, why)
    env = config.launch.env
    # Unless told, cuBLAS picks each stream's workspace itself; most versions of torch refuse that here.
    yield Change("launch.env", {CUBLAS_VARIABLE: ":4096:8", **env}, env, "train.deterministic needs it")
