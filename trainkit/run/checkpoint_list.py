"""List all checkpoints of a run with their states, for views such as `trainkit ckpt ls`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.run.events import events_of
from trainkit.run.files import Record, as_utc, read_jsonl_reversed, read_object
from trainkit.run.manifest import best_step, find_damage, partials, published, rejects, rolled_back
from trainkit.run.pins import pins
from trainkit.run.rollbacks import checkpoints_in_line
from trainkit.run.rundir import MANIFEST_NAME, RunDir


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint folder; a field is None if its value is not known from the files in the folder."""

    name: str
    path: str
    state: str
    """The state of the checkpoint: ``published``, ``rejected``, ``rolled back``, ``partial``, or ``damaged``
    if the manifest or the file sizes are wrong. A published checkpoint that the next attempt sets aside
    because of a rollback is also ``rolled back``."""
    step: int | None
    time: str
    """The modification time of the newest file in the checkpoint, as ISO 8601 in UTC."""
    bytes: int
    layout: dict[str, int] | None
    world_size: int | None
    best: bool
    reason: str | None
    """The reason for saving the checkpoint, or a description of its damage."""
    best_metric: str | None = None
    """The metric for which this is the best checkpoint, with the value `best_value`; None if unknown."""
    best_value: float | None = None
    pinned_by: list[str] = field(default_factory=list)
    """The holders of the checkpoint's pins, which prevent its deletion."""


def list_checkpoints(run: RunDir) -> list[ListedCheckpoint]:
    """Return all checkpoints of a run: published ones by step, then unused ones, then partial ones."""
    best, reasons = best_step(run.checkpoints_dir), dict[str, str]()
    there, aside = published(run.checkpoints_dir), rejects(run.checkpoints_dir)
    names = {path.name for path in (*(checkpoint.path for checkpoint in there), *aside)}
    records = read_jsonl_reversed(run.events_file, ["checkpoint_commit", "checkpoint_rejected"])
    for event in events_of(records):
        is_commit = event.name == "checkpoint_commit"
        name = run.checkpoint_dir(event.step or 0).name if is_commit else event.text("set_aside") or ""
        reasons.setdefault(name, event.reason or "")
        if names <= reasons.keys():
            break
    # A view of the run shows the other states even if rollbacks.json or the pins cannot be read.
    kept, held = there, dict[int, frozenset[str]]()
    with contextlib.suppress(OSError, UsageError):
        kept = checkpoints_in_line(run)
    with contextlib.suppress(OSError):
        held |= pins(run)
    found = []
    for checkpoint in there:
        damage, path = find_damage(checkpoint, reads_tensors=False), checkpoint.path
        state = "damaged" if damage else "published" if checkpoint in kept else "rolled back"
        own = _listed(path, state, checkpoint.step == best, damage or reasons.get(path.name))
        found.append(replace(own, pinned_by=sorted(held.get(checkpoint.step, ()))))
    found += [_listed(path, "rejected", False, reasons.get(path.name)) for path in aside]
    found += [_listed(path, "rolled back", False, None) for path in rolled_back(run.checkpoints_dir)]
    found += [_listed(path, "partial", False, None) for path in partials(run.checkpoints_dir)]
    return found


def _listed(path: Path, state: str, best: bool, reason: str | None) -> ListedCheckpoint:
    found = read_object(path / MANIFEST_NAME)
    manifest = Record(found if isinstance(found.get("files"), dict) else {})
    progress = manifest.record("progress")
    # A checkpoint that was validated only after a resume is not marked as the best in its own manifest. Such
    # a checkpoint is identified as the best only by the `best_step` in the manifests of later checkpoints.
    is_own = best and progress.count("best_step") == progress.count("step")
    metric = (progress.text("best_metric") or "").partition(" ")[0] if is_own else None
    files = [item.stat() for item in path.rglob("*") if item.is_file()]
    newest_s = max((item.st_mtime for item in files), default=path.stat().st_mtime)
    digits = path.name.partition("-")[2].partition(".")[0]
    return ListedCheckpoint(
        name=path.name,
        path=str(path),
        state=state,
        step=int(digits) if digits.isdigit() else None,
        time=as_utc(datetime.fromtimestamp(newest_s, timezone.utc), "seconds"),
        bytes=sum(item.st_size for item in files),
        layout=layout if isinstance(layout := manifest.values.get("layout"), dict) else None,
        world_size=manifest.count("world_size"),
        best=best,
        reason=reason,
        best_metric=metric or None,
        best_value=progress.number("best_value") if metric else None,
    )
