"""Pin the checkpoints of a run, so that they are not deleted while a user, process or other run needs them.

Each pin is a small file in the folder `pins` of the run folder. A pin names its holder and does not change
the checkpoint, so the manifest and its hashes stay the same. A pin holds until its holder removes it. Two
kinds of pins also end without their holder:

- The pin of a process ends when the process has died. If the process runs on a host that is not visible from
  here, the pin ends `UNSEEN_S` after the pin was made.
- The pin of another run ends when the folder of the other run no longer exists.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.folders import ensure_folder
from trainkit.formats import JsonObject
from trainkit.run.files import read_json, read_record, utc_now, write_json
from trainkit.run.manifest import Checkpoint, doomed_path, published
from trainkit.run.process import ProcessId
from trainkit.run.rundir import CHECKPOINT_PREFIX, RunDir

UNSEEN_S = 24 * 3600.0
"""Seconds for which the pin of a process holds if this host cannot see whether the process is alive."""
_SUFFIX = ".json"


@dataclass(frozen=True)
class Pin:
    """The content of a pin's file."""

    by: str
    """The name of the holder, such as the name of a user or of a command."""
    step: int
    time: str
    why: JsonObject = field(default_factory=dict)
    """Values that the holder has added. `process` identifies the process, and `other_run` is the path of the
    run for which the pin holds."""

    def holds(self, age_s: float) -> bool:
        """Return whether a pin of an age in seconds still prevents the deletion of its checkpoint."""
        process, run = self.why.get("process"), self.why.get("other_run")
        if isinstance(process, dict):
            alive = read_record(ProcessId, process).alive()
            return age_s < UNSEEN_S if alive is None else alive
        return not isinstance(run, str) or Path(run).exists()


def _file(run: RunDir, step: int, by: str) -> Path:
    # A holder's name may be a path, so the name of the file contains its hash.
    digest = hashlib.sha256(by.encode(errors="surrogateescape")).hexdigest()[:16]
    return run.pins_dir / f"{run.checkpoint_dir(step).name}.{digest}{_SUFFIX}"


def pin(run: RunDir, step: int, by: str, **why: object) -> None:
    """Prevent the deletion of the checkpoint of a step; a second pin of the same holder replaces the first.

    `why` contains JSON values that are stored with the pin; see `Pin.why`. Raises UsageError if the run has
    no checkpoint of this step, and OSError if the pin cannot be written.
    """
    ensure_folder(run.pins_dir, 0o700)
    path = _file(run, step, by)
    write_json(path, asdict(Pin(by, step, utc_now(), why)))
    # The checkpoint is looked up only after the pin is visible, because it may be deleted until then.
    if not run.checkpoint_dir(step).is_dir():
        path.unlink(missing_ok=True)
        raise UsageError(
            f"{run.shown} has no checkpoint of step {step}",
            hint=f"`trainkit ckpt ls {run.quoted}` shows the checkpoints",
        )


def unpin(run: RunDir, step: int, by: str) -> bool:
    """Remove a holder's pin of a step; return False if there was no such pin. Raises OSError."""
    try:
        _file(run, step, by).unlink()
    except FileNotFoundError:
        return False
    return True


def pins(run: RunDir) -> Mapping[int, frozenset[str]]:
    """Return the steps of the published checkpoints that are pinned, with the names of their holders.

    A pin that cannot be read still holds, because its holder may need the checkpoint. Raises OSError if the
    folder of the pins cannot be read.
    """
    steps = {checkpoint.step for checkpoint in published(run.checkpoints_dir)}
    found: dict[int, set[str]] = {}
    for step, by in _held(run):
        if step in steps:
            found.setdefault(step, set()).add(by)
    return {step: frozenset(names) for step, names in sorted(found.items())}


def _held(run: RunDir) -> Iterator[tuple[int, str]]:
    """Yield the step and the holder of each pin that holds, even if its checkpoint is gone."""
    for path in sorted(run.pins_dir.glob(f"{CHECKPOINT_PREFIX}*{_SUFFIX}")):
        digits = path.name.removeprefix(CHECKPOINT_PREFIX).partition(".")[0]
        if not digits.isdecimal():
            continue
        try:
            made_s = path.stat().st_mtime
            found = read_record(Pin, read_json(path), strict=True)
        except FileNotFoundError:
            continue  # The holder has removed the pin in the meantime.
        except (OSError, ValueError, TypeError):
            yield int(digits), f"{path.name} (unreadable)"
            continue
        if found.holds(time.time() - made_s):
            yield int(digits), found.by


@contextmanager
def pinned(run: RunDir, step: int, by: str) -> Iterator[None]:
    """Pin the checkpoint of a step during the block; the pin does not outlive this process.

    Raises the same errors as `pin`.
    """
    holder = f"{by} (process {os.getpid()} on {os.uname().nodename})"
    pin(run, step, holder, process=asdict(ProcessId.of(os.getpid())))
    try:
        yield
    finally:
        unpin(run, step, holder)


def delete(run: RunDir, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Delete checkpoints unless they are pinned; return the deleted ones.

    A killed deletion leaves no folder that looks like a published checkpoint; see `doomed_path`. Raises
    OSError.
    """
    deleted = []
    for checkpoint in checkpoints:
        doomed = doomed_path(checkpoint.path)
        checkpoint.path.rename(doomed)
        # A pin that was made before the rename is seen here, and `pin` fails after the rename. Therefore,
        # no checkpoint is deleted whose `pin` has succeeded.
        if checkpoint.step in {step for step, _ in _held(run)}:
            doomed.rename(checkpoint.path)
            continue
        shutil.rmtree(doomed)
        for path in run.pins_dir.glob(f"{checkpoint.path.name}.*{_SUFFIX}"):
            path.unlink(missing_ok=True)  # The pins that no longer hold would otherwise stay for ever.
        deleted.append(checkpoint)
    return deleted
