"""From the `data` section of a config to tokens that can be read."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from trainkit.data.cache import CACHE_HINT, cache_folder, cache_key
from trainkit.data.dataset_file import VAL, check_shard_sizes, is_dataset, read_dataset_file
from trainkit.data.lock import exclusive
from trainkit.data.prepare import OtherDataset, prepare, show_progress
from trainkit.data.recipe import DataConfig, Recipe, prepared_folder, recipe_of, refuse_val_source
from trainkit.data.shards import TokenShards
from trainkit.data.sources import find_inputs
from trainkit.data.tokenizer_identity import check_made_by
from trainkit.errors import UsageError

_PARTIAL_SUFFIX = ".partial"


def open_dataset(config: DataConfig, seq_len: int, split: str) -> TokenShards:
    """The `train` or `val` split of a config's data, prepared first where that has not been done.

    Raises UsageError for data that cannot be used and for a split shorter than one sample.
    """
    return TokenShards(ensure_prepared(config), split, seq_len)


def has_validation(config: DataConfig) -> bool:
    """Whether a config's data has a `val` split, preparing it first where that has not been done."""
    return read_dataset_file(ensure_prepared(config)).num_tokens(VAL) > 0


def ensure_prepared(config: DataConfig) -> Path:
    """The folder with the token shards of a config.

    A prepared `data.source` is used as it is, with the tokenizer that made it; other sources are tokenised
    once into the cache. Any number of processes may call this at once: one works, the others wait.
    """
    folder = prepared_folder(config)
    if folder is not None:
        refuse_val_source(config, folder)
        check_made_by(config.tokenizer, folder, read_dataset_file(folder).tokenizer)
        return folder
    recipe = recipe_of(config)
    cache = cache_folder(config)
    target = cache / cache_key(recipe, find_inputs(recipe))
    _set_aside_if_damaged(target)
    if not is_dataset(target):
        _prepare_into(cache, target, recipe, max(1, config.num_workers))
    return target


def _set_aside_if_damaged(target: Path) -> None:
    """Take tokens that are not as they were written out of the way of new ones: it is only a cache."""
    if not is_dataset(target):
        return
    try:
        for split in read_dataset_file(target).splits:
            check_shard_sizes(target, read_dataset_file(target), split)
    except UsageError as error:
        aside = target.with_name(f"{target.name}.damaged-{os.getpid()}")
        print(f"{error.message}: made again, the old ones are in {aside.name}", file=sys.stderr)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            target.rename(aside)


def _prepare_into(cache: Path, target: Path, recipe: Recipe, workers: int) -> None:
    partial = target.with_name(target.name + _PARTIAL_SUFFIX)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = exclusive(
            target.with_name(target.name + ".lock"),
            busy=f"waiting for another process to prepare {target}",
            wait=True,
        )
        with lock:
            if is_dataset(target):
                return
            with show_progress("preparing data") as on_progress:
                try:
                    prepare(recipe, partial, workers, on_progress)
                except OtherDataset:
                    # Begun elsewhere from the same texts with other times: it is only a cache.
                    shutil.rmtree(partial)
                    prepare(recipe, partial, workers, on_progress)
            partial.rename(target)
    except OSError as error:
        raise UsageError(
            f"the data cache {cache} cannot be written: {error.strerror}", hint=CACHE_HINT
        ) from error
