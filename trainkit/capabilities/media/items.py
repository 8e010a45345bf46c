"""Reads media.jsonl, which lists the images, histograms and texts of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainkit.capabilities.media.png import SIGNATURE
from trainkit.folders import open_regular
from trainkit.run.events import StepRecord, steps_of
from trainkit.run.files import Record, read_jsonl
from trainkit.run.rundir import RunDir

KINDS = ("image", "histogram", "text")
MAX_FILE_BYTES = 2**26
"""Maximum size of an image file to read, in bytes."""


def media_dir(run: RunDir) -> Path:
    """Return the folder that contains the images of a run."""
    return run.path / "media"


def index_file(run: RunDir) -> Path:
    """Return the index file, which has one line per image, histogram and text."""
    return run.path / "media.jsonl"


class Item(StepRecord):
    """An image, histogram or text, as listed in the index file."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return str(self.values["name"])

    @property
    def kind(self) -> str:
        """Return the kind of this item, which is one of `KINDS`."""
        return str(self.values["kind"])

    @property
    def counts(self) -> list[float]:
        """Return the bin counts of a histogram, with 0 for entries that are not numbers."""
        found = self.values.get("counts")
        counts = (
            [Record({"count": count}).number("count") for count in found] if isinstance(found, list) else []
        )
        return [max(0.0, count or 0.0) for count in counts]


def read_items(run: RunDir) -> list[Item]:
    """Return the items of a run, sorted by step; skip damaged lines of the index file.

    If a newer attempt resumed from an earlier step, its items replace the items that older attempts logged
    after that step. For each name, items of older attempts are replaced from the first step at which the
    newer attempt logged that name.
    """
    found: dict[str, dict[int, Item]] = {}
    attempts: dict[str, int | None] = {}
    for item in items_of(read_jsonl(index_file(run))):
        own = found.setdefault(item.name, {})
        if attempts.setdefault(item.name, item.attempt) != item.attempt:
            attempts[item.name] = item.attempt
            found[item.name] = own = {step: earlier for step, earlier in own.items() if step < item.step}
        own[item.step] = item
    return sorted((item for own in found.values() for item in own.values()), key=lambda item: item.step)


def items_of(records: Iterable[dict[str, object]]) -> Iterable[Item]:
    """Yield the records that are valid items."""
    for step in steps_of(records):
        if isinstance(step.values.get("name"), str) and step.values.get("kind") in KINDS:
            yield Item(step.values)


def read_image(run: RunDir, item: Item) -> bytes | None:
    """Return the contents of an image's PNG file, or None if it is not a regular file in the media folder."""
    file = image_file(run, item)
    if file is None:
        return None
    try:
        with open_regular(file, os.O_NOFOLLOW) as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError:
        return None
    return data if data.startswith(SIGNATURE) and len(data) <= MAX_FILE_BYTES else None


def image_file(run: RunDir, item: Item) -> Path | None:
    """Return the file of an image, or None if it is missing or outside the media folder.

    The index file may have been written by another user, so it can contain any path.
    """
    name = item.text("file") or ""
    file = media_dir(run) / name
    is_own = bool(name) and Path(name).name == name and file.is_file() and not file.is_symlink()
    return file if is_own else None


def by_name(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Group items by name, and sort each group from oldest to newest."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.name, []).append(item)
    return found


def summary(items: Sequence[Item]) -> list[dict[str, object]]:
    """For each name, return the kind, the steps, and the file or the values of the newest item."""
    return [
        {
            "name": name,
            "kind": own[-1].kind,
            "steps": [item.step for item in own],
            "last": {
                key: value for key, value in own[-1].values.items() if key not in ("name", "kind", "step")
            },
        }
        for name, own in by_name(items).items()
    ]
