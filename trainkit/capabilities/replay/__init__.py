"""Computes steps of a run again, compares them, and shows their samples."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.capability import Capability, Part

SAMPLES_FILE = "sample_losses.jsonl"
"""The file in the folder of a replay with the losses of the samples of each step."""


@dataclass(frozen=True)
class SampleLosses:
    """The losses of the samples of one step, a line of `SAMPLES_FILE`."""

    step: int
    losses: list[float | str]
    """The mean loss of each sample, in the order of the global batch; ``inf`` if it is not finite."""


@dataclass(frozen=True)
class ReplayPart(Part):
    """The steps that `trainkit replay` computes again, as a part of the plan."""

    CAPABILITY = "replay"
    steps: tuple[int, int]
    """The first and the last step."""


class Replay(Capability):
    """The capability of `trainkit replay`; only that command adds its part, which selects its own worker."""

    name = "replay"


CAPABILITY = Replay
