"""Load the initial state of a run: its newest checkpoint, or weights from a model or from another run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from logging import getLogger
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from trainkit.config.training import ModelConfig
from trainkit.errors import EXIT_NO_RESTART, CheckpointError, FatalError
from trainkit.run.events import read_events
from trainkit.run.files import read_record, refresh_listing
from trainkit.run.manifest import (
    BASE_FINGERPRINT,
    BEST_LINK,
    Checkpoint,
    Manifest,
    best_step,
    find_damage,
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
from trainkit.run.rollbacks import move_aside, read_rollbacks
from trainkit.run.rundir import MANIFEST_NAME, ROLLED_BACK_SUFFIX, AttemptDir, RunDir
from trainkit.trainer.checkpoint.state import owner_prefix, state_prefix
from trainkit.trainer.checkpoint.storage import SafeReader, SplittingLoadPlanner
from trainkit.trainer.distributed import World, broadcast_from_main, gather_from_all, record_event
from trainkit.trainer.models.model import ReadWeight, Weight, local_tensor, shard_index
from trainkit.trainer.split_master import SplitMaster, master_of
from trainkit.trainer.user_code import listed

T = TypeVar("T")
log = getLogger(__name__)
SETTLE_S = 65.0
"""How long a host may see a stale listing of a folder on a network filesystem, in seconds."""
RETRY_S = 1.0


def choose_checkpoint(attempt: AttemptDir, world: World) -> tuple[Checkpoint, Manifest] | None:
    """Return the newest intact published checkpoint and its manifest, or None if there never was one.

    Rank 0 proposes a checkpoint, and each rank verifies some of the checkpoint's files. If any rank finds
    damage, the checkpoint is considered damaged. A damaged checkpoint is logged and renamed, and the next
    older checkpoint is tried. Checkpoints from which the run went back are renamed too.

    Raises CheckpointError if a checkpoint is temporarily unreadable or was written by a newer trainkit
    version, and if all checkpoints are missing or damaged. The error's exit code is 78 if a newer trainkit
    version is needed or no intact checkpoint is left, because only the user may decide to start over at step
    0.
    """
    run = attempt.run
    listed: list[tuple[str, int]] = []
    if world.is_main:
        _remove_leftovers(run)
        # A client of a network filesystem may have cached that the run had no rollback.
        refresh_listing(run.path)
        _move_aside(run)
        listed = [(str(checkpoint.path), checkpoint.step) for checkpoint in reversed(list_published(run))]
    candidates = broadcast_from_main(listed, world)
    for path, step in candidates:
        candidate = Checkpoint(Path(path), step)
        if broadcast_from_main(is_newer(candidate), world):
            raise CheckpointError(
                f"{candidate.path} was written by a newer trainkit version",
                hint="resume with that trainkit version; the checkpoint is unchanged",
                exit_code=EXIT_NO_RESTART,
            )
        damage = agree_on_damage(candidate, world)
        if not damage:
            # A manifest that could not be read at first may belong to a checkpoint from which the run went
            # back.
            if broadcast_from_main(world.is_main and candidate.path.name in _move_aside(run), world):
                continue
            if world.is_main:
                _restore_best_link(candidate)
            content = broadcast_from_main(candidate.content() if world.is_main else {}, world)
            return candidate, read_record(Manifest, content)
        if world.is_main:
            aside = set_aside(candidate)
            log.warning(f"checkpoint {candidate.path.name} rejected: {damage}; set aside as {aside.name}")
            record_event(attempt, "checkpoint_rejected", step=step, reason=damage, set_aside=aside.name)
    lost = broadcast_from_main(_describe_lost(run) if world.is_main else "", world)
    if lost:
        raise CheckpointError(
            f"no intact checkpoint is left in {run.checkpoints_dir}: {lost}",
            hint="restore a checkpoint from a backup, or start a new run at step 0",
            exit_code=EXIT_NO_RESTART,
        )
    return None


def list_published(run: RunDir) -> list[Checkpoint]:
    """Return the published checkpoints, oldest first, after waiting for the newest one to become visible.

    On a network filesystem, a host may see a stale listing of a folder for a while. Without waiting, the run
    could resume from an older checkpoint and later publish a step that already exists.
    """
    deadline_s, warned = time.monotonic() + SETTLE_S, False
    while True:
        refresh_listing(run.checkpoints_dir)
        listed = published(run.checkpoints_dir)
        known = _newest_committed_step(run)
        # Also accept a checkpoint newer than the recorded one, because its writer may have been killed before
        # recording the event.
        is_visible = known is None or any(checkpoint.step >= known for checkpoint in listed)
        if is_visible or time.monotonic() > deadline_s:
            return listed
        if not warned:
            warned = True
            log.warning(
                f"the checkpoint of step {known} is recorded in events.jsonl but not visible; retrying for"
                f" {SETTLE_S:g} s, because a network filesystem may delay its appearance"
            )
        time.sleep(RETRY_S)


def _newest_committed_step(run: RunDir) -> int | None:
    """Return the newest published step in events.jsonl that was neither rejected nor rolled back, or None."""
    newest: list[int] = []
    rollbacks = read_rollbacks(run)
    for event in read_events(run, "checkpoint_commit", "checkpoint_rejected"):
        if event.name == "checkpoint_rejected":
            newest = [other for other in newest if other != event.step]
        elif event.step is not None:
            later = (item for item in rollbacks if (event.attempt or 0) <= item.attempt)
            newest += [] if any(event.step > item.step for item in later) else [event.step]
    return newest[-1] if newest else None


def _move_aside(run: RunDir) -> list[str]:
    """Rename the checkpoints from which the run went back, if the rollback itself was interrupted."""
    moved = move_aside(run)
    for name in moved:
        log.warning(f"the run went back from {name}: set aside with the suffix {ROLLED_BACK_SUFFIX}")
    return moved


def _remove_leftovers(run: RunDir) -> None:
    # Refresh the listing first: an outdated listing could still contain the temporary name of a checkpoint
    # that has since been published.
    refresh_listing(run.checkpoints_dir)
    for leftover in partials(run.checkpoints_dir):
        try:
            remove(leftover)
        except OSError as error:
            log.warning(f"{leftover.name} is an unfinished save, but cannot be removed ({error})")
        else:
            log.warning(f"{leftover.name} is an unfinished save: removed")


def _describe_lost(run: RunDir) -> str:
    """Return why a run without checkpoints must not start over, or "" if the run never published one."""
    num_damaged = len(rejects(run.checkpoints_dir))
    if num_damaged:
        return f"{num_damaged} set aside as damaged"
    if any(item.step == 0 for item in read_rollbacks(run)) and _newest_committed_step(run) is None:
        return ""
    if any(read_events(run, "checkpoint_commit")):
        return "the checkpoints recorded in events.jsonl are missing"
    return ""


def _restore_best_link(checkpoint: Checkpoint) -> None:
    """Point the symlink `best` at the manifest's best step, in case a crash kept the save from doing so."""
    step = checkpoint.manifest().progress.get("best_step")
    best = next((c for c in published(checkpoint.path.parent) if c.step == step), None)
    if best is not None and best_step(checkpoint.path.parent) != step:
        try:
            point_best_at(best)
        except OSError as error:
            log.error(f"cannot point `best` at {best.path.name} ({error})")


def agree_on_damage(candidate: Checkpoint, world: World) -> str:
    """Verify a checkpoint on all ranks together; return a description of the damage, or "" if it is intact.

    Retries for up to `SETTLE_S` seconds until all ranks agree. Raises CheckpointError if a rank cannot read
    the checkpoint or sees different files from rank 0. A single faulty node therefore cannot make the run
    reject an intact checkpoint.
    """
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        found = gather_from_all(_inspect(candidate, world), world)
        agreed = found[0][0]
        odd = next((rank for rank, (plain, _, error) in enumerate(found) if error or plain != agreed), None)
        if odd is None:
            return agreed or next((hashed for _, hashed, _ in found if hashed), "")
        plain, _, error = found[odd]
        reason = error or plain or "this rank sees different files than rank 0"
        if not broadcast_from_main(time.monotonic() < deadline_s, world):
            raise CheckpointError(
                f"rank {odd} cannot read {candidate.path}: {reason}",
                hint="check the filesystem on this rank's node, then resume; the checkpoint is unchanged",
            )
        if world.is_main:
            log.warning(f"rank {odd} cannot read {candidate.path.name} yet: {reason}; retrying")
        time.sleep(RETRY_S)


def _inspect(candidate: Checkpoint, world: World) -> tuple[str, str, str]:
    """Describe a checkpoint's damage: of manifest or sizes, of hashes in this rank's share, and a read error.

    Each result is a description, or "" if there is no such problem.
    """
    try:
        plain = plain_damage(candidate)
        return plain, "" if plain else hash_damage(candidate, world.rank, world.size), ""
    except OSError as error:
        return "", "", unreadable(error)


def load_tensors(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor | SplitMaster], world: World
) -> set[str]:
    """Fill the tensors in place from a checkpoint, which may have been saved with a different layout.

    The state of a capability is loaded if both the checkpoint and the run have it. Returns the prefixes of
    the loaded states (see `state_prefix`). Raises FatalError if the names or shapes of the tensors do not
    match the checkpoint.
    """
    reader = SafeReader(checkpoint.path)
    own, saved = _shapes_on_all_ranks(tensors, world), _saved_shapes(reader)
    loaded = {*map(owner_prefix, own)} & {*map(owner_prefix, saved)}

    def used(found: Mapping[str, T]) -> dict[str, T]:
        return {name: value for name, value in found.items() if owner_prefix(name) in (None, *loaded)}

    problem = _problem(used(own), used(saved))
    if problem:
        raise FatalError(
            f"checkpoint {checkpoint.path} belongs to another model ({problem})",
            hint="resume with the model section that the run was trained with, or start a new run",
        )
    _load(used(tensors), reader, world)
    return {prefix for prefix in loaded if prefix is not None}


def _load(tensors: Mapping[str, Tensor | SplitMaster], reader: SafeReader, world: World) -> None:
    state_dict_loader.load(
        dict(tensors),
        storage_reader=reader,
        planner=SplittingLoadPlanner(),
        process_group=world.checkpoint_group,
        no_dist=not world.distributed,
    )


PARTS = ("model.", "buffer.")
"""Name prefixes of weights and of buffers in a checkpoint."""


@torch.no_grad()
def read_initial_weights(
    weights: Sequence[Weight], buffers: Mapping[str, Tensor], read: ReadWeight, *, resumed: bool
) -> None:
    """Fill weights and buffers from the model's files; if resumed, only what checkpoints do not contain.

    Raises FatalError if a tensor's shape in the file differs from its shape in the model.
    """
    for name, buffer in () if resumed else buffers.items():
        buffer.copy_(read(name, [slice(None)]))
    for weight in weights:
        if not weight.is_read or (resumed and weight.is_saved):
            continue
        whole, index = master_of(weight), shard_index(weight.param)
        shard = local_tensor(whole) if isinstance(whole, Tensor) else whole
        value = read(weight.name, index)
        if value.shape != shard.shape:
            raise FatalError(
                f"the file has shape {list(value.shape)}, not {list(shard.shape)}, for {weight.name}",
                hint="the weight files belong to a different model",
            )
        shard.copy_(value)


def load_initial_weights(
    tensors: Mapping[str, Tensor | SplitMaster], config: ModelConfig, world: World, base: object = None
) -> None:
    """Load the weights and buffers that match `model.init_include` from another run's checkpoint, in place.

    `base` is the fingerprint of the model files that provide the initial weights. Raises FatalError if one of
    the selected tensors is missing from the checkpoint or has a different shape. A tensor may be missing only
    if it was frozen in a run with the same `base`, because the model files still contain its value. Without
    `init_include`, the checkpoint must not contain any other tensors.
    """
    assert config.init_from is not None
    found = broadcast_from_main(_find(Path(config.init_from)) if world.is_main else None, world)
    if found is None:
        raise FatalError(
            f"model.init_from is {config.init_from}, which has no intact checkpoint",
            hint="specify a run folder or one of its checkpoints (see `trainkit ckpt ls RUN`)",
        )
    checkpoint = Checkpoint(Path(found[0]), found[1])
    damage = agree_on_damage(checkpoint, world)
    if damage:
        raise FatalError(f"model.init_from: {checkpoint.path} is damaged: {damage}", hint="name another one")
    reader = SafeReader(checkpoint.path)
    saved = _saved_shapes(reader)
    replaced = {} if config.init_weights is None else other_weights(saved, config.init_weights)
    if config.init_weights is not None and not replaced:
        raise FatalError(
            f"model.init_weights is {config.init_weights}, which {checkpoint.path} does not contain",
            hint="remove model.init_weights, or choose a checkpoint that contains these weights",
        )
    saved |= {name: saved[other] for name, other in replaced.items()}
    shapes = {name: shape for name, shape in saved.items() if _matches(name, config)}
    own = {name: tensor for name, tensor in tensors.items() if _matches(name, config)}
    everywhere = _shapes_on_all_ranks(own, world)
    if base is not None and checkpoint.manifest().data.get(BASE_FINGERPRINT) == base:
        everywhere = {name: shape for name, shape in everywhere.items() if name in shapes}
        own = {name: tensor for name, tensor in own.items() if name in shapes}
    problem = _problem(everywhere, shapes, is_part=bool(config.init_include))
    if not everywhere:
        problem = "no parameter matches model.init_include"
    if problem:
        raise FatalError(
            f"the weights of {checkpoint.path} do not fit the model: {problem}",
            hint="set model.init_include to load only matching parameters, such as ['encoder.*']",
        )
    _load({replaced.get(name, name): tensor for name, tensor in own.items()}, reader, world)
    names = {name for name in tensors if name.startswith(PARTS)}
    total = len(set().union(*gather_from_all(sorted(names), world)))
    if world.is_main:
        log.info(f"initialized from {checkpoint.path}: {len(everywhere)} of {total} weights and buffers")


def other_weights(saved: Iterable[str], capability: str) -> dict[str, str]:
    """Map the names of weights to the names of the values that a capability saved for these weights."""
    prefix = state_prefix(capability)
    return {f"{PARTS[0]}{name.removeprefix(prefix)}": name for name in saved if name.startswith(prefix)}


def _find(path: Path) -> tuple[str, int] | None:
    """Return the path and step of a checkpoint; in a run folder, find the best or newest checkpoint."""
    if (path / MANIFEST_NAME).is_file():
        try:
            step = Checkpoint(path, 0).manifest().step
        except (OSError, ValueError):
            return None
        return None if step < 0 else (str(path.resolve()), step)
    folder = RunDir(path).checkpoints_dir
    if (folder / BEST_LINK / MANIFEST_NAME).is_file():
        return _find(folder / BEST_LINK)
    # Check only file sizes here; the ranks later verify the hashes together.
    whole = [
        checkpoint for checkpoint in published(folder) if not find_damage(checkpoint, reads_tensors=False)
    ]
    return (str(whole[-1].path), whole[-1].step) if whole else None


def _matches(name: str, config: ModelConfig) -> bool:
    prefix = next((part for part in PARTS if name.startswith(part)), None)
    if prefix is None:
        return False
    name = name.removeprefix(prefix)
    return not config.init_include or any(fnmatchcase(name, pattern) for pattern in config.init_include)


def _saved_shapes(reader: SafeReader) -> dict[str, tuple[int, ...]]:
    saved = reader.read_metadata().state_dict_metadata
    return {name: tuple(item.size) for name, item in saved.items()}  # type: ignore[union-attr]


def _shapes_on_all_ranks(
    tensors: Mapping[str, Tensor | SplitMaster], world: World
) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of all ranks, because a pipeline rank has only the tensors of its stages."""
    found: dict[str, tuple[int, ...]] = {}
    for part in gather_from_all({name: list(tensor.shape) for name, tensor in tensors.items()}, world):
        found |= {name: tuple(shape) for name, shape in part.items()}
    return found


def _problem(
    own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], *, is_part: bool = False
) -> str:
    """Describe how tensors and checkpoint differ, or return ""; `is_part` permits extra saved tensors."""
    wrong = [
        f"{name} {saved[name]} -> {own[name]}" for name in own if saved.get(name, own[name]) != own[name]
    ]
    missing = [name for name in own if name not in saved]
    unexpected = [] if is_part else [name for name in saved if name not in own]
    found = (
        ("different shape", wrong),
        ("not in the checkpoint", missing),
        ("only in the checkpoint", unexpected),
    )
    return "; ".join(f"{what}: {listed(sorted(names))}" for what, names in found if names)
