"""The weights that a run starts with: those of ``model.hf``, and of another run with ``model.init_from``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from logging import getLogger
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from trainkit.config.training import ModelConfig
from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.run.manifest import (
    BASE_FINGERPRINT,
    BEST_LINK,
    MANIFEST_NAME,
    Checkpoint,
    find_plain_damage,
    published,
)
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.loader import agree_on_damage, broadcast_from_main, gather_from_all
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.distributed import World
from trainkit.trainer.models.model import ReadWeight, Weight, local_tensor, shard_index

log = getLogger(__name__)
PARTS = ("model.", "buffer.")
"""Prefixes of the names of weights and buffers in a checkpoint."""
MAX_NAMED = 3


class InitError(TrainkitError):
    """The weights of another run that do not fit; a restart would not change that."""

    exit_code = EXIT_NO_RESTART


@torch.no_grad()
def read_initial_weights(weights: Sequence[Weight], read: ReadWeight, *, resumed: bool) -> None:
    """Fill the weights whose initial values are in files; a resumed run needs those that are never saved.

    Raises InitError if a file has another shape than the model.
    """
    for weight in weights:
        if not weight.is_read or (resumed and weight.is_saved):
            continue
        shard, index = local_tensor(weight.param), shard_index(weight.param)
        value = read(weight.name, index)
        if value.shape != shard.shape:
            raise InitError(
                f"the file has {list(value.shape)} for {weight.name} {[(i.start, i.stop) for i in index]}",
                hint="the model and its files do not belong together",
            )
        shard.copy_(value)


def load_initial_weights(
    tensors: Mapping[str, Tensor], config: ModelConfig, world: World, base: object = None
) -> None:
    """Fill the weights and buffers among `tensors` that match `model.init_include`, in place.

    Raises InitError unless each of them is in the checkpoint, with its shape; and without `init_include`, if
    the checkpoint has others. A checkpoint of a run with the same `base`, the fingerprint of files with
    weights, may lack some: what was frozen there still is as in the files.
    """
    assert config.init_from is not None
    found = broadcast_from_main(_find(Path(config.init_from)) if world.is_main else None, world)
    if found is None:
        raise InitError(
            f"model.init_from is {config.init_from}, which has no intact checkpoint",
            hint="name a run folder or a checkpoint of it: `trainkit ckpt ls RUN`",
        )
    checkpoint = Checkpoint(Path(found[0]), found[1])
    damage = agree_on_damage(checkpoint, world)
    if damage:
        raise InitError(f"model.init_from: {checkpoint.path} is damaged: {damage}", hint="name another one")
    reader = SafeReader(checkpoint.path)
    saved = reader.read_metadata().state_dict_metadata
    shapes = {name: tuple(saved[name].size) for name in saved if _matches(name, config)}  # type: ignore[union-attr]
    own = {name: tensor for name, tensor in tensors.items() if _matches(name, config)}
    # In a pipeline each rank has only the names of its stages.
    everywhere: dict[str, tuple[int, ...]] = {}
    for part in gather_from_all({name: tuple(tensor.shape) for name, tensor in own.items()}, world):
        everywhere |= part
    if base is not None and checkpoint.manifest()["data"].get(BASE_FINGERPRINT) == base:
        everywhere = {name: shape for name, shape in everywhere.items() if name in shapes}
        own = {name: tensor for name, tensor in own.items() if name in shapes}
    problem = _problem(everywhere, shapes, is_part=bool(config.init_include))
    if problem:
        raise InitError(
            f"the weights of {checkpoint.path} do not fit: {problem}",
            hint="model.init_include takes only the parameters whose names match, such as ['encoder.*']",
        )
    group, no_dist = world.checkpoint_group, not world.distributed
    state_dict_loader.load(own, storage_reader=reader, process_group=group, no_dist=no_dist)
    names = {name for name in tensors if name.startswith(PARTS)}
    total = len(set().union(*gather_from_all(names, world)))
    if world.is_main:
        log.info(f"started from {checkpoint.path}: {len(everywhere)} of {total} weights and buffers")


def _find(path: Path) -> tuple[str, int] | None:
    """The checkpoint that a path names: itself, or of a run folder the best one, else the newest."""
    if (path / MANIFEST_NAME).is_file():
        try:
            return str(path.resolve()), int(Checkpoint(path, 0).manifest()["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
    folder = RunDir(path).checkpoints_dir
    if (folder / BEST_LINK / MANIFEST_NAME).is_file():
        return _find(folder / BEST_LINK)
    # By its file sizes: the ranks verify the hashes together.
    whole = [checkpoint for checkpoint in published(folder) if not find_plain_damage(checkpoint)]
    return (str(whole[-1].path), whole[-1].step) if whole else None


def _matches(name: str, config: ModelConfig) -> bool:
    prefix = next((part for part in PARTS if name.startswith(part)), None)
    if prefix is None:
        return False
    name = name.removeprefix(prefix)
    return not config.init_include or any(fnmatchcase(name, pattern) for pattern in config.init_include)


def _problem(
    own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], *, is_part: bool
) -> str:
    """Why the weights do not fit, as a phrase; empty if they do."""
    if not own:
        return "no parameter matches model.init_include"
    wrong = [
        f"{name} {saved[name]} -> {own[name]}" for name in own if saved.get(name, own[name]) != own[name]
    ]
    missing = [name for name in own if name not in saved]
    unexpected = [] if is_part else [name for name in saved if name not in own]
    found = (("different shape", wrong), ("missing", missing), ("only in the checkpoint", unexpected))
    return "; ".join(f"{what}: {_listed(sorted(names))}" for what, names in found if names)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
