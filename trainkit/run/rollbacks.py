"""Records that a run went back to an earlier checkpoint, and which samples it leaves out from then on.

The file `rollbacks.json` lists the rollbacks of a run, oldest first. A checkpoint contains the number of
rollbacks on which its state is based. From these two facts follow the checkpoints that are still part of the
run, so a process that is killed during a rollback leaves nothing to repair: the next attempt moves the other
checkpoints aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainkit.errors import UsageError
from trainkit.formats import plural
from trainkit.run.files import read_json, read_record, to_json, write_json
from trainkit.run.manifest import Checkpoint, published, set_aside
from trainkit.run.rundir import ROLLED_BACK_SUFFIX, RunDir

EVENT = "rollback"
"""Name of the event that reports a rollback."""
MAX_POSITION = 1 << 62
"""Maximum sample position after a skipped range, so that sums of positions fit into 64 bits."""
Ranges = tuple[tuple[int, int], ...]
"""Ranges of sample positions in ascending order, without overlap: the first position, and the position after
the last one."""


@dataclass(frozen=True)
class Rollback:
    """The return of a run to an earlier checkpoint."""

    step: int
    """The step of the checkpoint from which the run continued; 0 for the initial weights."""
    from_step: int
    """The last step before the rollback."""
    attempt: int
    """The number of the newest attempt at the time of the rollback; the rollback affects later attempts."""
    skipped: Ranges = ()
    """The sample positions that the run leaves out because of this rollback."""
    reason: str = ""
    is_automatic: bool = False
    """True if the ranks decided on the rollback; False if a user requested it."""
    time: str | None = None

    def fields(self) -> dict[str, object]:
        """Return the values of the event that reports the rollback."""
        values = to_json(self)
        return {key: values[key] for key in ("step", "from_step", "skipped", "reason", "is_automatic")}

    def describe(self) -> str:
        """Return the rollback in words."""
        left_out = f", left out {shown_ranges(self.skipped)}" if self.skipped else ""
        moved = f"went back from step {self.from_step} to step {self.step}"
        return f"{moved if self.step < self.from_step else f'continued at step {self.step}'}{left_out}"


def read_rollbacks(run: RunDir) -> tuple[Rollback, ...]:
    """Return the rollbacks of a run, oldest first.

    Raises OSError if the file cannot be read, and UsageError if its content is damaged.
    """
    try:
        return tuple(read_record(Rollback, item, strict=True) for item in read_json(run.rollbacks_file))
    except FileNotFoundError:
        return ()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{run.rollbacks_file} is damaged: {error}",
            hint="restore the file: without it, the run would use the wrong checkpoints and samples",
        ) from None


def write_rollbacks(run: RunDir, rollbacks: Sequence[Rollback]) -> None:
    """Replace the rollbacks of a run. Raises OSError."""
    write_json(run.rollbacks_file, [to_json(item) for item in rollbacks])


def is_rolled_back(checkpoint: Checkpoint, num_rollbacks: int, rollbacks: Sequence[Rollback]) -> bool:
    """Return whether a run went back to before a checkpoint that is based on `num_rollbacks` rollbacks."""
    return any(checkpoint.step > later.step for later in rollbacks[num_rollbacks:])


@dataclass(frozen=True)
class SavedPosition:
    """The position in the data, as saved in the progress of a checkpoint."""

    samples_seen: int = 0
    skipped: Ranges = ()
    num_rollbacks: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SavedPosition:
        """Return the position that a checkpoint contains; raise OSError or ValueError."""
        return read_record(cls, checkpoint.manifest().progress)


def in_line(checkpoints: Iterable[Checkpoint], rollbacks: Sequence[Rollback]) -> list[Checkpoint]:
    """Return the checkpoints that are part of a run after its rollbacks, in the given order.

    A checkpoint that cannot be read is included, because readers report its damage.
    """
    if not rollbacks:
        return list(checkpoints)
    return [one for one in checkpoints if not _is_known_to_be_rolled_back(one, rollbacks)]


def checkpoints_in_line(run: RunDir) -> list[Checkpoint]:
    """Return the published checkpoints that are part of a run after its rollbacks, oldest first.

    Raises OSError and UsageError; see `read_rollbacks`.
    """
    return in_line(published(run.checkpoints_dir), read_rollbacks(run))


def _is_known_to_be_rolled_back(checkpoint: Checkpoint, rollbacks: Sequence[Rollback]) -> bool:
    try:
        return is_rolled_back(checkpoint, SavedPosition.of(checkpoint).num_rollbacks, rollbacks)
    except (OSError, ValueError):
        return False


def move_aside(run: RunDir) -> list[str]:
    """Rename the checkpoints from which a run went back, so that they are no longer used; return their names.

    The files stay intact. Raises OSError and UsageError; see `read_rollbacks`.
    """
    rollbacks, there = read_rollbacks(run), published(run.checkpoints_dir)
    kept = in_line(there, rollbacks)
    moved = [one for one in there if one not in kept]
    for checkpoint in moved:
        set_aside(checkpoint, ROLLED_BACK_SUFFIX)
    return [one.path.name for one in moved]


def merged(*ranges: Iterable[Sequence[int]]) -> Ranges:
    """Return the union of ranges of positions."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted((first, stop) for group in ranges for first, stop in group):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return tuple(found)


def ranges_of(ranges: Iterable[range]) -> Ranges:
    """Convert ranges of sample positions from Python; raise UsageError for an empty or stepped range."""
    found = []
    for one in ranges:
        if one.step != 1 or not 0 <= one.start < one.stop <= MAX_POSITION:
            raise UsageError(
                f"{one} is not a range of sample positions",
                hint="use range(FIRST, STOP), such as range(320, 560)",
            )
        found.append((one.start, one.stop))
    return merged(found)


def position_of(number: int, skipped: Ranges) -> int:
    """Return the position of a trained sample; `number` counts the trained samples from 0."""
    position = number
    for first, stop in skipped:
        position += stop - first if position >= first else 0
    return position


def number_before(position: int, skipped: Ranges) -> int:
    """Return the number of samples before a position, excluding those in `skipped`."""
    return position - sum(max(0, min(stop, position) - first) for first, stop in skipped)


def shown_ranges(ranges: Iterable[Sequence[int]]) -> str:
    """Return the number of samples in some ranges, and the ranges with their last position."""
    ranges = list(ranges)
    total = plural(sum(stop - first for first, stop in ranges), "sample")
    return f"{total} ({', '.join(f'{first}-{stop - 1}' for first, stop in ranges)})"


def parse_ranges(texts: Iterable[str]) -> Ranges:
    """Parse ranges such as ``320-559``, which include both positions; raise UsageError."""
    found = []
    for text in texts:
        first, _, last = text.partition("-")
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < MAX_POSITION):
            raise UsageError(
                f"--skip-samples {text} is not a range of sample positions",
                hint="use FIRST-LAST, such as 320-559; `trainkit data show RUN --step N` shows the positions",
            )
        found.append((int(first), int(last) + 1))
    return merged(found)
