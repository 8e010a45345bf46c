"""List, verify and delete the checkpoints of a run; each checkpoint has a manifest with hashes of its files.

While a checkpoint is being written, its folder name ends in `.partial`. After the manifest is written, the
folder is published by a single rename. A folder without this suffix, such as `step-00001000`, therefore
contains a completely written checkpoint. The hashes show whether a published checkpoint has been damaged
since it was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path, PurePath
from stat import S_ISREG

from trainkit.formats import JsonObject
from trainkit.run.events import events_of
from trainkit.run.files import (
    Record,
    as_utc,
    open_file,
    read_json,
    read_jsonl_reversed,
    read_object,
    read_record,
)
from trainkit.run.rundir import (
    CHECKPOINT_PREFIX,
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    REJECTED_SUFFIX,
    ROLLED_BACK_SUFFIX,
    RunDir,
)

MANIFEST_VERSION = 1
SEAL = "sha256"
BEST_LINK = "best"
BASE_FINGERPRINT = "the fingerprint of model.hf"
"""The key in `Manifest.data` for the fingerprint of the base model's files; needed because a checkpoint may
omit the base model's weights."""
_PUBLISHED = re.compile(re.escape(CHECKPOINT_PREFIX) + r"(\d{8,})")
_REJECTED = re.compile(_PUBLISHED.pattern + re.escape(REJECTED_SUFFIX) + r"(-\d+)?")
_ROLLED_BACK = re.compile(_PUBLISHED.pattern + re.escape(ROLLED_BACK_SUFFIX) + r"(-\d+)?")
_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class FileSum:
    """The size and hash of a file, as listed in the manifest."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest, which describes everything in a checkpoint except for the tensors."""

    version: int = 0
    step: int = -1
    files: JsonObject = field(default_factory=dict)
    """Maps each file name to the file's ``bytes`` and ``sha256``."""
    task: str | None = None
    optimizer: str = "adamw"
    """The name of the optimizer; the default applies to manifests from older trainkit versions, which do not
    contain the name."""
    data: dict[str, object] = field(default_factory=dict)
    """Values that determine, together with the position in the data, which samples come next."""
    val_fingerprint: str | None = None
    model: dict[str, object] | None = None
    """The dimensions of the built-in decoder; None for other models."""
    progress: dict[str, object] = field(default_factory=dict)
    """The training progress, such as the best validation loss."""
    state: dict[str, object] = field(default_factory=dict)
    """The values that a custom training loop tracks, excluding tensors."""


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, identified by its folder."""

    path: Path
    step: int

    @property
    def manifest_file(self) -> Path:
        return self.path / MANIFEST_NAME

    def content(self) -> dict[str, object]:
        """Return the parsed manifest; raise OSError or ValueError if it is unreadable or invalid."""
        value = read_json(self.manifest_file)
        if not isinstance(value, dict) or not isinstance(value.get("files"), dict):
            raise ValueError("not a manifest")
        for name in value["files"]:
            if PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\0" in name:
                raise ValueError(f"it lists {name!r}, which is not a file in the checkpoint")
        return value

    def manifest(self) -> Manifest:
        """Return the manifest; raise OSError or ValueError if it is unreadable or invalid."""
        return read_record(Manifest, self.content())


def _folders(checkpoints_dir: Path) -> list[Path]:
    return sorted(checkpoints_dir.iterdir()) if checkpoints_dir.is_dir() else []


def published(checkpoints_dir: Path) -> list[Checkpoint]:
    """Return the published checkpoints of a run, oldest first."""
    found = [
        Checkpoint(path, int(match[1]))
        for path in _folders(checkpoints_dir)
        if (match := _PUBLISHED.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_checkpoint(checkpoints_dir: Path) -> str | None:
    """Return the newest published checkpoint's folder, without verifying it; None if there is none."""
    found = [item for item in published(checkpoints_dir) if item.manifest_file.is_file()]
    return str(found[-1].path) if found else None


def rejects(checkpoints_dir: Path) -> list[Path]:
    """Return the folders of damaged checkpoints, which were renamed so that they are no longer used."""
    return [path for path in _folders(checkpoints_dir) if _REJECTED.fullmatch(path.name)]


def rolled_back(checkpoints_dir: Path) -> list[Path]:
    """Return the folders of checkpoints from which the run went back, which were renamed."""
    return [path for path in _folders(checkpoints_dir) if _ROLLED_BACK.fullmatch(path.name)]


def partials(checkpoints_dir: Path) -> list[Path]:
    """Return the folders of saves that did not finish."""
    return [path for path in _folders(checkpoints_dir) if path.name.endswith(PARTIAL_SUFFIX)]


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open_file(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def find_damage(checkpoint: Checkpoint, *, reads_tensors: bool = True) -> str:
    """Describe a checkpoint's damage in one sentence; return "" if all files match the manifest.

    Without `reads_tensors`, checks only the manifest and the file sizes.
    """
    try:
        return plain_damage(checkpoint) or (hash_damage(checkpoint) if reads_tensors else "")
    except OSError as error:
        return unreadable(error)


def unreadable(error: OSError) -> str:
    """Return the message for a file that currently cannot be read."""
    return f"{Path(error.filename or '').name} cannot be read ({error.strerror or error})"


def plain_damage(checkpoint: Checkpoint) -> str:
    """Describe damage found in the manifest and the file sizes; return "" if there is none.

    Raises OSError if a file cannot be read, because the cause may be this host instead of the checkpoint.
    Also raises OSError if a file seems to be missing but is listed in its folder, because an NFS client may
    cache the absence of a new file for up to a minute.
    """
    try:
        if checkpoint.manifest_file.exists() and not checkpoint.manifest_file.is_file():
            return f"{MANIFEST_NAME} is not a regular file"
        manifest = checkpoint.content()
        files = manifest["files"]
        assert isinstance(files, dict)
        return _manifest_damage(checkpoint, manifest) or _size_damage(checkpoint, files)
    except FileNotFoundError as error:
        file = Path(error.filename)
        if checkpoint.path.is_dir() and file in checkpoint.path.iterdir():
            raise
        return f"{file.name} is missing"
    except (AttributeError, TypeError, ValueError) as error:
        return f"{MANIFEST_NAME} cannot be read ({error})"


def hash_damage(checkpoint: Checkpoint, part: int = 0, num_parts: int = 1) -> str:
    """Describe damage found by comparing file hashes; return "" if there is none.

    To share the work between `num_parts` processes, checks only every `num_parts`-th file, starting at index
    `part`. Raises OSError if a file cannot be read.
    """
    files = checkpoint.manifest().files
    for name in sorted(files)[part::num_parts]:
        if file_hash(checkpoint.path / name) != files[name].get("sha256"):
            return f"{name} was changed after it was written (its SHA-256 differs)"
    return ""


def _manifest_damage(checkpoint: Checkpoint, manifest: dict[str, object]) -> str:
    version = manifest.get("version")
    if not isinstance(version, int):
        return f"{MANIFEST_NAME} has no version"
    if version > MANIFEST_VERSION:
        return f"it was written by a newer trainkit version (manifest version {version})"
    if manifest.get("step") != checkpoint.step:
        return f"{MANIFEST_NAME} belongs to step {manifest.get('step')}"
    if not manifest["files"]:
        return f"{MANIFEST_NAME} lists no files"
    if SEAL not in manifest:
        return f"{MANIFEST_NAME} lacks the SHA-256 of its own content"
    if manifest[SEAL] != seal(manifest):
        return f"{MANIFEST_NAME} was changed after it was written (its own SHA-256 differs)"
    return ""


def _size_damage(checkpoint: Checkpoint, files: Mapping[str, dict[str, object]]) -> str:
    for name, expected in files.items():
        found, wanted = (checkpoint.path / name).stat(), expected.get("bytes")
        if not S_ISREG(found.st_mode):
            return f"{name} is not a regular file"
        size = found.st_size
        if size != wanted:
            shown = f"{wanted:,}" if isinstance(wanted, int) else wanted
            return f"{name} has {size:,} bytes instead of {shown}"
    return ""


def seal(manifest: Mapping[str, object]) -> str:
    """Return the SHA-256 of a manifest without its key `SEAL`, where this hash is stored.

    This hash protects the values in the manifest, just as the hashes of the files protect the tensors.
    """
    sealed = {key: value for key, value in manifest.items() if key != SEAL}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def is_newer(checkpoint: Checkpoint) -> bool:
    """Return whether a newer trainkit version wrote the checkpoint, so that this version cannot verify it."""
    try:
        version = checkpoint.content().get("version")
    except (OSError, ValueError):
        return False
    return isinstance(version, int) and version > MANIFEST_VERSION


def newest_intact(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the newest undamaged checkpoint; older checkpoints are not verified."""
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step, reverse=True)
    return next((checkpoint for checkpoint in ordered if not find_damage(checkpoint)), None)


def set_aside(checkpoint: Checkpoint, suffix: str = REJECTED_SUFFIX) -> Path:
    """Rename a checkpoint's folder, so that the checkpoint is no longer used; return the new path.

    The default suffix is for a damaged checkpoint. If the symlink `best` pointed to the checkpoint, the
    symlink is removed.
    """
    target = checkpoint.path.with_name(checkpoint.path.name + suffix)
    number = 1
    while target.exists():
        number += 1
        target = checkpoint.path.with_name(f"{checkpoint.path.name}{suffix}-{number}")
    checkpoint.path.rename(target)
    if best_step(checkpoint.path.parent) == checkpoint.step:
        checkpoint.path.with_name(BEST_LINK).unlink(missing_ok=True)
    return target


def remove(path: Path) -> None:
    """Delete a checkpoint; an interrupted deletion leaves nothing that looks published."""
    if not path.name.endswith(PARTIAL_SUFFIX):
        doomed = doomed_path(path)
        path.rename(doomed)
        path = doomed
    shutil.rmtree(path)


def doomed_path(path: Path) -> Path:
    """Return the path to which a checkpoint is renamed before it is deleted.

    The name is that of an unfinished save, so a killed deletion leaves nothing that looks published. The next
    attempt of the run deletes unfinished saves.
    """
    return path.with_name(f"{path.name}.deleted-{os.getpid()}{PARTIAL_SUFFIX}")


def remove_all(checkpoints_dir: Path) -> None:
    """Delete all checkpoints of a run, including unpublished ones."""
    for path in _folders(checkpoints_dir):
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


def obsolete(
    checkpoints: Iterable[Checkpoint], keep_last: int | None, best_step: int | None
) -> list[Checkpoint]:
    """Return the checkpoints to delete: all except for the newest `keep_last` and the best checkpoint.

    If `keep_last` is None, all checkpoints are kept.
    """
    if keep_last is None:
        return []
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    return [checkpoint for checkpoint in ordered[:-keep_last] if checkpoint.step != best_step]


def point_best_at(checkpoint: Checkpoint) -> None:
    """Point the symlink `best` at a checkpoint."""
    link = checkpoint.path.with_name(BEST_LINK)
    staged = checkpoint.path.with_name(f".{BEST_LINK}-{os.getpid()}")
    staged.unlink(missing_ok=True)
    staged.symlink_to(checkpoint.path.name)
    staged.replace(link)


def best_step(checkpoints_dir: Path) -> int | None:
    """Return the step of the checkpoint that the symlink `best` points to, or None if there is no symlink."""
    link = checkpoints_dir / BEST_LINK
    if not link.is_symlink():
        return None
    match = _PUBLISHED.fullmatch(str(link.readlink()))
    return int(match[1]) if match else None


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint folder; a field is None if its value is not known from the files in the folder."""

    name: str
    path: str
    state: str
    """The state of the checkpoint: ``published``, ``rejected``, ``rolled back``, ``partial``, or ``damaged``
    if the manifest or the file sizes are wrong."""
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
    found = []
    for checkpoint in there:
        damage, path = find_damage(checkpoint, reads_tensors=False), checkpoint.path
        state = "damaged" if damage else "published"
        found.append(_listed(path, state, checkpoint.step == best, damage or reasons.get(path.name)))
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
