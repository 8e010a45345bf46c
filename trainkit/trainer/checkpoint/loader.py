"""Loading: the newest checkpoint that is still what was written, chosen once and for all ranks."""

from __future__ import annotations

import time
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from trainkit.errors import EXIT_NO_RESTART, CheckpointError, TrainkitError
from trainkit.manifest import (
    Checkpoint,
    best_step,
    hash_damage,
    is_newer,
    partials,
    plain_damage,
    point_best_at,
    published,
    rejects,
    remove,
    set_aside,
    unreadable,
)
from trainkit.rundir import RunDir, read_jsonl
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.distributed import World, note_event

log = getLogger(__name__)
T = TypeVar("T")
SETTLE_S = 65.0
"""A host of a network filesystem may see a folder for a minute as it was."""
LOOK_AGAIN_S = 1.0


def from_main(value: T, world: World) -> T:
    """The value that rank 0 has, on all ranks."""
    if not world.distributed:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=world.checkpoint_group)
    return box[0]


def gather(value: T, world: World) -> list[T]:
    """The values of all ranks, on all ranks."""
    found = [value] * world.size
    if world.distributed:
        dist.all_gather_object(found, value, group=world.checkpoint_group)
    return found


def choose_checkpoint(run: RunDir, attempt: int, world: World) -> tuple[Checkpoint, dict[str, Any]] | None:
    """The newest published checkpoint that is intact, with its manifest; None in a run that never had one.

    Rank 0 names the candidate, all ranks share the reading, and what one finds holds for all. A damaged
    checkpoint is set aside, said, and the one before it is tried. Raises CheckpointError: when one cannot be
    read just now; with exit code 78 when a newer trainkit wrote it, or when checkpoints that the run had are
    gone or damaged, since to begin again at step 0 is for a person to decide.
    """
    listed: list[tuple[str, int]] = []
    if world.is_main:
        _remove_leftovers(run)
        listed = [(str(checkpoint.path), checkpoint.step) for checkpoint in reversed(settled_list(run))]
    candidates = from_main(listed, world)
    for path, step in candidates:
        candidate = Checkpoint(Path(path), step)
        if from_main(is_newer(candidate), world):
            raise CheckpointError(
                f"{candidate.path} was written by a newer trainkit",
                hint="resume with that one; nothing was changed",
                exit_code=EXIT_NO_RESTART,
            )
        damage = _agree_on_damage(candidate, world)
        if not damage:
            if world.is_main:
                _restore_best_link(candidate)
            return candidate, from_main(candidate.manifest() if world.is_main else {}, world)
        if world.is_main:
            aside = set_aside(candidate)
            log.warning(f"checkpoint {candidate.path.name} rejected: {damage}; set aside as {aside.name}")
            note_event(run, attempt, "checkpoint_rejected", step=step, reason=damage, set_aside=aside.name)
    lost = from_main(_what_was_lost(run) if world.is_main else "", world)
    if lost:
        raise CheckpointError(
            f"no intact checkpoint is left in {run.checkpoints_dir}: {lost}",
            hint="bring one back from a copy, or start a new run to begin again at step 0",
            exit_code=EXIT_NO_RESTART,
        )
    return None


def settled_list(run: RunDir) -> list[Checkpoint]:
    """The published checkpoints, oldest first, once the newest that was published shows.

    On a network filesystem a host can see a folder for a while as it was before another host wrote to it; to
    begin from an older checkpoint would compute, and then try to publish, what is there already.
    """
    deadline_s, told = time.monotonic() + SETTLE_S, False
    while True:
        listed = published(run.checkpoints_dir)
        known = _newest_that_should_be(run)
        # A later one counts too: it was published, and then its writer died before it could tell.
        if known is None or any(checkpoint.step >= known for checkpoint in listed):
            return listed
        if time.monotonic() > deadline_s:
            return listed
        if not told:
            told = True
            log.warning(
                f"the checkpoint of step {known}, which events.jsonl tells of, is not there; looking again"
                f" for {SETTLE_S:g} s, since a network filesystem may show it late"
            )
        time.sleep(LOOK_AGAIN_S)


def _newest_that_should_be(run: RunDir) -> int | None:
    """The step of the newest checkpoint of which the events say that it was published, and not rejected."""
    newest: list[int] = []
    for event in read_jsonl(run.events_file):
        step = event.get("step")
        if event.get("event") == "checkpoint_commit" and isinstance(step, int):
            newest.append(step)
        elif event.get("event") == "checkpoint_rejected":
            newest = [one for one in newest if one != step]
    return newest[-1] if newest else None


def _remove_leftovers(run: RunDir) -> None:
    for leftover in partials(run.checkpoints_dir):
        try:
            remove(leftover)
        except OSError as error:
            log.warning(f"{leftover.name} is a save that never finished, and cannot be removed ({error})")
        else:
            log.warning(f"{leftover.name} is a save that never finished: removed")


def _what_was_lost(run: RunDir) -> str:
    """Why a run without a published checkpoint must not begin anew; empty when it never had one."""
    num_damaged = len(rejects(run.checkpoints_dir))
    if num_damaged:
        return f"{num_damaged} set aside as damaged"
    if any(event.get("event") == "checkpoint_commit" for event in read_jsonl(run.events_file)):
        return "those that events.jsonl tells of are gone"
    return ""


def _restore_best_link(checkpoint: Checkpoint) -> None:
    """Let `best` name what the progress says: a crash right after a save can have left it behind."""
    step = checkpoint.manifest().get("progress", {}).get("best_step")
    best = next((c for c in published(checkpoint.path.parent) if c.step == step), None)
    if best is not None and best_step(checkpoint.path.parent) != step:
        try:
            point_best_at(best)
        except OSError as error:
            log.error(f"`best` could not be pointed at {best.path.name} ({error})")


def _agree_on_damage(candidate: Checkpoint, world: World) -> str:
    """What is wrong with a checkpoint, found by all ranks together.

    Raises CheckpointError when a rank cannot read it or does not see what rank 0 sees: one sick node must
    not have a good checkpoint thrown out.
    """
    found = _look_together(candidate, world)
    return found[0][0] or next((hashed for _, hashed, _ in found if hashed), "")


def _look_together(candidate: Checkpoint, world: World) -> list[tuple[str, str, str]]:
    """What each rank sees, when all see the same or have had the time to."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        mine = _look(candidate, world)
        found = gather(mine, world)
        agreed = found[0][0]
        odd = next((rank for rank, (plain, _, error) in enumerate(found) if error or plain != agreed), None)
        if odd is None:
            return found
        plain, _, error = found[odd]
        why = error or plain or "it sees what rank 0 does not"
        if not from_main(time.monotonic() < deadline_s, world):
            raise CheckpointError(
                f"rank {odd} cannot read {candidate.path}: {why}",
                hint="look at the file system of that node; nothing was changed, so just try again",
            )
        if world.is_main:
            log.warning(f"rank {odd} cannot read {candidate.path.name} yet: {why}; looking again")
        time.sleep(LOOK_AGAIN_S)


def _look(candidate: Checkpoint, world: World) -> tuple[str, str, str]:
    """What this rank sees: damage that shows at once, damage in its share of the hashes, a read error."""
    try:
        plain = plain_damage(candidate)
        return plain, "" if plain else hash_damage(candidate, world.rank, world.size), ""
    except OSError as error:
        return "", "", unreadable(error)


def load_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor], world: World) -> None:
    """Fill the tensors in place from a checkpoint, whatever layout wrote it.

    Raises TrainkitError (exit code 78) when names or shapes are not those of the checkpoint.
    """
    reader = SafeReader(checkpoint.path)
    saved = reader.read_metadata().state_dict_metadata
    # Of a pipeline, each rank has the names of its stages.
    wanted = set().union(*gather(set(tensors), world))
    missing = sorted(wanted - set(saved))
    other = [
        f"{name} {tuple(saved[name].size)} -> {tuple(tensor.shape)}"  # type: ignore[union-attr]
        for name, tensor in tensors.items()
        if name in saved and tuple(saved[name].size) != tuple(tensor.shape)  # type: ignore[union-attr]
    ]
    if missing or other or len(saved) != len(wanted):
        surplus = sorted(set(saved) - wanted)
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
