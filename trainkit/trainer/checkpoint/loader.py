"""Loading: the newest checkpoint that is still what was written, chosen once and for all ranks."""

from __future__ import annotations

from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from trainkit.errors import EXIT_NO_RESTART, CheckpointError, TrainkitError
from trainkit.manifest import (
    Checkpoint,
    find_damage,
    is_newer,
    partials,
    published,
    rejects,
    remove,
    set_aside,
)
from trainkit.rundir import RunDir
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.distributed import World
from trainkit.trainer.events import note_event

log = getLogger(__name__)
T = TypeVar("T")


def from_main(value: T, world: World) -> T:
    """The value that rank 0 has, on all ranks."""
    if not world.distributed:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=world.checkpoint_group)
    return box[0]


def choose_checkpoint(run: RunDir, attempt: int, world: World) -> tuple[Checkpoint, dict[str, Any]] | None:
    """The newest published checkpoint that is intact, with its manifest; None in a run that never had one.

    Rank 0 names the candidate, all ranks share the reading, and what one finds holds for all. A damaged
    checkpoint is set aside, said, and the one before it is tried. Raises CheckpointError (exit code 78) when
    none is left, since to begin again at step 0 is for a person to decide, or a newer trainkit wrote it.
    """
    if world.is_main:
        for leftover in partials(run.checkpoints_dir):
            log.warning(f"{leftover.name} is a save that never finished: removed")
            remove(leftover)
    candidates = from_main([(str(c.path), c.step) for c in reversed(published(run.checkpoints_dir))], world)
    for path, step in candidates:
        candidate = Checkpoint(Path(path), step)
        if from_main(is_newer(candidate), world):
            raise CheckpointError(
                f"{candidate.path} was written by a newer trainkit",
                hint="resume with that one; nothing was changed",
                exit_code=EXIT_NO_RESTART,
            )
        damage = _agree(find_damage(candidate, world.rank, world.size), world)
        if not damage:
            return candidate, from_main(candidate.manifest() if world.is_main else {}, world)
        if world.is_main:
            aside = set_aside(candidate)
            log.warning(f"checkpoint {candidate.path.name} rejected: {damage}; set aside as {aside.name}")
            note_event(run, attempt, "checkpoint_rejected", step=step, reason=damage, set_aside=aside.name)
    num_damaged = from_main(len(rejects(run.checkpoints_dir)), world)
    if num_damaged:
        raise CheckpointError(
            f"no intact checkpoint is left in {run.checkpoints_dir}: {num_damaged} set aside as damaged",
            hint="bring one back from a copy, or move the .rejected folders away to begin again at step 0",
            exit_code=EXIT_NO_RESTART,
        )
    return None


def _agree(damage: str, world: World) -> str:
    """The first complaint of any rank."""
    if not world.distributed:
        return damage
    found: list[str] = [""] * world.size
    dist.all_gather_object(found, damage, group=world.checkpoint_group)
    return next(filter(None, found), "")


def load_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor], world: World) -> None:
    """Fill the tensors in place from a checkpoint, whatever layout wrote it.

    Raises TrainkitError (exit code 78) when names or shapes are not those of the checkpoint.
    """
    reader = SafeReader(checkpoint.path)
    saved = reader.read_metadata().state_dict_metadata
    missing = sorted(set(tensors) - set(saved))
    other = [
        f"{name} {tuple(saved[name].size)} -> {tuple(tensor.shape)}"  # type: ignore[union-attr]
        for name, tensor in tensors.items()
        if name in saved and tuple(saved[name].size) != tuple(tensor.shape)  # type: ignore[union-attr]
    ]
    if missing or other or len(saved) != len(tensors):
        surplus = sorted(set(saved) - set(tensors))
        details = [f"not in it: {missing[0]}"] if missing else []
        details += [f"other shape: {other[0]}"] if other else []
        details += [f"only in it: {surplus[0]}"] if surplus else []
        raise TrainkitError(
            f"checkpoint {checkpoint.path} is of another model ({'; '.join(details)})",
            hint="resume with the model section that it was trained with, or start a new run",
            exit_code=EXIT_NO_RESTART,
        )
    state_dict_loader.load(
        tensors, storage_reader=reader, process_group=world.checkpoint_group, no_dist=not world.distributed
    )
