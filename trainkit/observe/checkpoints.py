"""Lists a run's checkpoints: published, rejected, and saves that never finished."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainkit.run.events import read_events
from trainkit.run.files import Record, as_utc, read_object
from trainkit.run.manifest import Checkpoint, best_step, find_plain_damage, partials, published, rejects
from trainkit.run.rundir import RunDir


@dataclass(frozen=True)
class ListedCheckpoint:
    """One checkpoint folder; fields are None where its files do not contain the value."""

    name: str
    path: str
    state: str
    """``published``, ``rejected``, ``partial``, or ``damaged`` if that is visible without reading tensors."""
    step: int | None
    time: str
    """When it was written, ISO-8601 UTC."""
    bytes: int
    layout: dict[str, int] | None
    world_size: int | None
    best: bool
    reason: str | None
    """Why it was saved, or what is wrong with it."""
    best_metric: str | None = None
    """Metric by which it is the best, with `best_value`, where its manifest says so."""
    best_value: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_checkpoints(run: RunDir) -> list[ListedCheckpoint]:
    """All checkpoints of a run: published ones by step, then rejected and partial ones by name."""
    best = best_step(run.checkpoints_dir)
    saved, rejected = _reasons(run)
    found = []
    for checkpoint in published(run.checkpoints_dir):
        damage = find_plain_damage(checkpoint)
        state = "damaged" if damage else "published"
        reason = damage or saved.get(checkpoint.step)
        found.append(_listed(checkpoint.path, state, checkpoint.step == best, reason))
    for path in rejects(run.checkpoints_dir):
        found.append(_listed(path, "rejected", False, rejected.get(path.name)))
    for path in partials(run.checkpoints_dir):
        found.append(_listed(path, "partial", False, None))
    return found


def _listed(path: Path, state: str, best: bool, reason: str | None) -> ListedCheckpoint:
    manifest = _manifest(path)
    progress = manifest.record("progress")
    # A checkpoint may be validated only after a resume: then later ones say that it is the best.
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
        layout=manifest.values.get("layout"),
        world_size=manifest.count("world_size"),
        best=best,
        reason=reason,
        best_metric=metric or None,
        best_value=progress.number("best_value") if metric else None,
    )


def _manifest(path: Path) -> Record:
    manifest = read_object(Checkpoint(path, 0).manifest_file)
    return Record(manifest if isinstance(manifest.get("files"), dict) else {})


def _reasons(run: RunDir) -> tuple[dict[int, str], dict[str, str]]:
    """Why each step was saved, and why each rejected folder was rejected."""
    saved: dict[int, str] = {}
    rejected: dict[str, str] = {}
    for event in read_events(run, "checkpoint_commit", "checkpoint_rejected"):
        if event.name == "checkpoint_commit":
            saved[event.step or 0] = event.reason or ""
        else:
            rejected[event.text("set_aside") or ""] = event.reason or ""
    return saved, rejected
