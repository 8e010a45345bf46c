"""Computes steps of a run again, and shows their samples."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.capability import Capability, Part

SAMPLES_FILE = "sample_losses.jsonl"
"""What the ranks of a replay write into its folder: the losses of the samples of each step."""


@dataclass(frozen=True)
class SampleLosses:
    """A line of `SAMPLES_FILE`."""

    step: int
    losses: list[float | str]
    """The mean loss of each sample, in the order of the global batch; ``inf`` if it is not finite."""


@dataclass(frozen=True)
class ReplayPart(Part):
    """The steps that `trainkit replay` computes again."""

    CAPABILITY = "replay"
    steps: tuple[int, int]
    """The first and the last one."""


class Replay(Capability):
    """The capability: only the command plans a run with its part, which has a worker of its own."""

    name = "replay"


CAPABILITY = Replay
