"""Recomputes steps of a run, compares the results with the run's records, and lists each step's samples."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.capability import Capability, Part

SAMPLES_FILE = "sample_losses.jsonl"
"""File in the folder of a replay that contains the loss of each sample, by step."""


@dataclass(frozen=True)
class SampleLosses:
    """The losses of all samples in one step, stored as one line of `SAMPLES_FILE`."""

    step: int
    losses: list[float | str]
    """Mean loss of each sample, in the order of the global batch; ``inf`` if a loss is not finite."""


@dataclass(frozen=True)
class ReplayPart(Part):
    """The part of a launch plan that specifies which steps `trainkit replay` recomputes."""

    CAPABILITY = "replay"
    steps: tuple[int, int]
    """The first and the last step to recompute."""


class Replay(Capability):
    """Implements `trainkit replay`.

    A `ReplayPart` in the plan selects the replay worker; only `trainkit replay` adds this part.
    """

    name = "replay"


CAPABILITY = Replay
