"""media.jsonl: what a run has logged besides numbers, one item per name and step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainkit.folders import open_regular
from trainkit.run.events import StepRecord, steps_of
from trainkit.run.files import Record, read_jsonl
from trainkit.run.rundir import RunDir

KINDS = ("image", "histogram", "text")
MAX_FILE_BYTES = 2**26
"""A larger file of an image is not read."""
PNG = b"\x89PNG\r\n\x1a\n"


def media_dir(run: RunDir) -> Path:
    """The folder with the images of a run."""
    return run.path / "media"


def index_file(run: RunDir) -> Path:
    """The file with a line per image, histogram and text."""
    return run.path / "media.jsonl"


class Item(StepRecord):
    """One image, histogram or text."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return str(self.values["name"])

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return str(self.values["kind"])

    @property
    def counts(self) -> list[float]:
        """The counts of a histogram; 0 for what is no number."""
        found = self.values.get("counts")
        counts = (
            [Record({"count": count}).number("count") for count in found] if isinstance(found, list) else []
        )
        return [max(0.0, count or 0.0) for count in counts]


def read_items(run: RunDir) -> list[Item]:
    """The items of a run, by step; skips damaged lines.

    An attempt that resumed from an earlier step replaces what the attempts before had logged under a name,
    from its first item of that name on.
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
    """The items among some records."""
    for step in steps_of(records):
        if isinstance(step.values.get("name"), str) and step.values.get("kind") in KINDS:
            yield Item(step.values)


def read_image(run: RunDir, item: Item) -> bytes | None:
    """The PNG of an image; None if it is missing, or no regular PNG file in the folder of the run."""
    file = image_file(run, item)
    if file is None:
        return None
    try:
        with open_regular(file, os.O_NOFOLLOW) as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError:
        return None
    return data if data.startswith(PNG) and len(data) <= MAX_FILE_BYTES else None


def image_file(run: RunDir, item: Item) -> Path | None:
    """The file of an image; None if it is missing, or not in the folder of the run.

    Whoever wrote the index may have named any other file.
    """
    name = item.text("file") or ""
    file = media_dir(run) / name
    is_own = bool(name) and Path(name).name == name and file.is_file() and not file.is_symlink()
    return file if is_own else None


def by_name(items: Sequence[Item]) -> dict[str, list[Item]]:
    """The items of each name, oldest first."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.name, []).append(item)
    return found


def summary(items: Sequence[Item]) -> list[dict[str, object]]:
    """Name, kind, steps, and the newest file or values of each name."""
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
