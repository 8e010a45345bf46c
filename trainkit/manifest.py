"""Published checkpoints: the manifest that makes one trustworthy, and what is done with those that are not.

A checkpoint is written into a folder whose name ends in `.partial` and published by one rename, after its
manifest. So `step-00001000` without a suffix was complete once; whether it still is, the hashes tell.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.rundir import CHECKPOINT_PREFIX, PARTIAL_SUFFIX, REJECTED_SUFFIX, read_json

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
BEST_LINK = "best"
_PUBLISHED = re.compile(re.escape(CHECKPOINT_PREFIX) + r"(\d{8,})")
_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint folder."""

    path: Path
    step: int

    @property
    def manifest_file(self) -> Path:
        return self.path / MANIFEST_NAME

    def manifest(self) -> dict[str, Any]:
        """The manifest; OSError or ValueError when it cannot be read as one."""
        value = read_json(self.manifest_file)
        if not isinstance(value, dict) or not isinstance(value.get("files"), dict):
            raise ValueError("not a manifest")
        return value


def published(checkpoints_dir: Path) -> list[Checkpoint]:
    """The published checkpoints of a run, oldest first."""
    if not checkpoints_dir.is_dir():
        return []
    found = [
        Checkpoint(path, int(match[1]))
        for path in checkpoints_dir.iterdir()
        if (match := _PUBLISHED.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def partials(checkpoints_dir: Path) -> list[Path]:
    """Folders of saves that never finished."""
    if not checkpoints_dir.is_dir():
        return []
    return sorted(p for p in checkpoints_dir.iterdir() if p.name.endswith(PARTIAL_SUFFIX))


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def find_damage(checkpoint: Checkpoint, part: int = 0, num_parts: int = 1) -> str:
    """What is wrong with a checkpoint, in words; empty when every file is as it was written.

    Sizes of all files are compared, hashes only of every `num_parts`-th file from `part` on, so that
    many ranks can share the reading.
    """
    try:
        manifest = checkpoint.manifest()
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST_NAME} cannot be read ({error})"
    if manifest.get("version", 0) > MANIFEST_VERSION:
        return f"it was written by a newer trainkit (manifest version {manifest['version']})"
    if manifest.get("step") != checkpoint.step:
        return f"{MANIFEST_NAME} is of step {manifest.get('step')}"
    files: dict[str, dict[str, Any]] = manifest["files"]
    try:
        for name, expected in files.items():
            size = (checkpoint.path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
        for name in sorted(files)[part::num_parts]:
            if file_hash(checkpoint.path / name) != files[name]["sha256"]:
                return f"{name} is not what was written (its SHA-256 differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, KeyError, TypeError) as error:
        return f"it cannot be read ({error})"
    return ""


def set_aside(checkpoint: Checkpoint) -> Path:
    """Take a damaged checkpoint out of the list without deleting anything; returns where it is now."""
    target = checkpoint.path.with_name(checkpoint.path.name + REJECTED_SUFFIX)
    number = 1
    while target.exists():
        number += 1
        target = checkpoint.path.with_name(f"{checkpoint.path.name}{REJECTED_SUFFIX}-{number}")
    checkpoint.path.rename(target)
    return target


def remove(path: Path) -> None:
    """Delete a folder of checkpoints' so that a kill half-way never leaves one that looks published."""
    doomed = path.with_name(f".{path.name}.deleted-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def superseded(checkpoints: Iterable[Checkpoint], keep_last: int, best_step: int | None) -> list[Checkpoint]:
    """The checkpoints that may go: all but the newest `keep_last` and the best one."""
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    return [checkpoint for checkpoint in ordered[:-keep_last] if checkpoint.step != best_step]


def point_best_at(checkpoint: Checkpoint) -> None:
    """Let the link `best` name this checkpoint."""
    link = checkpoint.path.with_name(BEST_LINK)
    staged = checkpoint.path.with_name(f".{BEST_LINK}-{os.getpid()}")
    staged.unlink(missing_ok=True)
    staged.symlink_to(checkpoint.path.name)
    staged.replace(link)


def best_step(checkpoints_dir: Path) -> int | None:
    """The step that the link `best` names, None without one."""
    link = checkpoints_dir / BEST_LINK
    if not link.is_symlink():
        return None
    match = _PUBLISHED.fullmatch(str(link.readlink()))
    return int(match[1]) if match else None
