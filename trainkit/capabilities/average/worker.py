"""Averages the weights of several checkpoints, a few tensors at a time, for `trainkit ckpt average`.

``python -m trainkit.capabilities.average.worker`` reads an `AverageRequest` as JSON from stdin.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from trainkit.capabilities.export.worker import load_tensors, saved_tensors, show_error
from trainkit.errors import TrainkitError, UsageError
from trainkit.folders import shown_path
from trainkit.run.files import write_json
from trainkit.run.manifest import SEAL, Checkpoint, FileSum, seal
from trainkit.run.rundir import MANIFEST_NAME
from trainkit.trainer.checkpoint.storage import HashingWriter, SafeReader

WEIGHTS, BUFFERS = "model.", "buffer."
GROUP_BYTES = 1 << 28
"""Size in bytes of the tensors that are read together; each read of a checkpoint parses its metadata."""


@dataclass(frozen=True)
class AverageRequest:
    """The checkpoints to average, oldest first, and the folder of the result."""

    checkpoints: list[str]
    steps: list[int]
    out: str


def average(request: AverageRequest) -> None:
    """Write the mean of the checkpoints' weights, and the newest buffers, as a checkpoint.

    Raises UsageError if the checkpoints have different weights.
    """
    readers = [SafeReader(path) for path in request.checkpoints]
    shapes = common_shapes(readers)
    out = Path(request.out)
    planner = MeanPlanner(readers, shapes)

    def publish(files: Mapping[str, FileSum]) -> None:
        newest = Checkpoint(Path(request.checkpoints[-1]), request.steps[-1]).content()
        without = ("files", "progress", "state", SEAL)
        kept = {key: value for key, value in newest.items() if key not in without}
        manifest = {
            **kept,
            "averaged_steps": request.steps,
            "files": {name: asdict(item) for name, item in sorted(files.items())},
        }
        manifest[SEAL] = seal(manifest)
        write_json(out / MANIFEST_NAME, manifest)

    # Only shapes and dtypes are needed before the planner is asked for a value, so allocate one element each.
    state = {name: torch.zeros((), dtype=dtype).expand(size) for name, (size, dtype) in shapes.items()}
    writer = HashingWriter(out, publish)
    state_dict_saver.save(state, storage_writer=writer, planner=planner, no_dist=True)


Shapes = dict[str, tuple[torch.Size, torch.dtype]]


def common_shapes(readers: Sequence[SafeReader]) -> Shapes:
    """Return the shape and dtype of each weight and buffer; raise UsageError if weights differ in shape."""
    found: list[Shapes] = []
    for reader in readers:
        items = {
            f"{prefix}{name}": (item.size, item.properties.dtype)
            for prefix in (WEIGHTS, BUFFERS)
            for name, item in saved_tensors(reader, prefix).items()
        }
        found.append(items)
    newest = found[-1]
    for reader, items in zip(readers, found, strict=True):
        names = sorted(name for name in {*newest, *items} if name.startswith(WEIGHTS))
        different = next((name for name in names if items.get(name) != newest.get(name)), None)
        if different is not None:
            shown = [
                "is missing" if (item := one.get(different)) is None else f"has shape {list(item[0])}"
                for one in (items, newest)
            ]
            raise UsageError(
                f"{different.removeprefix(WEIGHTS)} {shown[0]} in {shown_path(Path(reader.path))}, but "
                f"{shown[1]} in {shown_path(Path(readers[-1].path))}",
                hint="use a smaller --last, so that all checkpoints have the same weights",
            )
    if not any(name.startswith(WEIGHTS) for name in newest):
        message = f"{shown_path(Path(readers[-1].path))} contains no weights of a trainkit model"
        raise UsageError(message, hint="average the tensors of your own training loop with your own code")
    return newest


class MeanPlanner(DefaultSavePlanner):
    """Computes the mean of each tensor when the tensor is written, so that few tensors are in memory."""

    def __init__(self, readers: Sequence[SafeReader], shapes: Shapes) -> None:
        super().__init__()
        self._readers, self._shapes = readers, shapes
        self._means: dict[str, Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self._means:
            self._means = {}  # free the previous group before the next group is read
            self._means = self._read(self._group_from(index.fqn))
        return self._means[index.fqn]

    def _group_from(self, first: str) -> list[str]:
        """Return the names of a tensor and of the next tensors, up to `GROUP_BYTES` in total."""
        names, size, found = list(self._shapes), 0, list[str]()
        for name in names[names.index(first) :]:
            shape, dtype = self._shapes[name]
            size += shape.numel() * dtype.itemsize
            if found and size > GROUP_BYTES:
                break
            found.append(name)
        return found

    def _is_averaged(self, name: str) -> bool:
        return name.startswith(WEIGHTS) and self._shapes[name][1].is_floating_point

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the means of floating-point weights, and the newest values of all other tensors.

        Sums are in float64, so the mean is rounded only once.
        """
        values = {name: torch.empty(self._shapes[name][0], dtype=self._shapes[name][1]) for name in names}
        weights = [name for name in names if self._is_averaged(name)]
        sums = {name: torch.zeros(self._shapes[name][0], dtype=torch.float64) for name in weights}
        for reader in self._readers:
            is_newest = reader is self._readers[-1]
            load_tensors(reader, values if is_newest else {name: values[name] for name in weights})
            for name in weights:
                sums[name] += values[name]
        for name in weights:
            values[name].copy_(sums.pop(name).div_(len(self._readers)))
        return values


def main() -> int:
    """Average the checkpoints in the JSON request on stdin, and return the exit code."""
    try:
        average(AverageRequest(**json.load(sys.stdin)))
    except (OSError, TrainkitError) as error:
        return show_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
