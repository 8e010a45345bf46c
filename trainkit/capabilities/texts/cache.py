"""Caches tokenized texts as shards.

This module is used by dry runs, so it imports numpy and tokenizers only when it tokenizes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trainkit.capabilities.texts.inputs import DatasetSpec, Input, dataset_spec, find_inputs
from trainkit.config.training import DataConfig
from trainkit.data.dataset_file import (
    LAYOUT_VERSION,
    TokenizerIdentity,
    checked_dataset,
    identify,
    is_dataset,
)
from trainkit.data.sources import STDLIB
from trainkit.errors import UsageError
from trainkit.folders import ensure_folder, user_cache_folder

CACHE_HINT = "set data.cache_dir to a writable folder with free space"


def cache_folder(config: DataConfig) -> Path:
    """Return `data.cache_dir` or, if it is not set, a default folder in the user's cache directory."""
    if config.cache_dir is not None:
        return Path(config.cache_dir)
    return user_cache_folder() / "data"


def cache_key(spec: DatasetSpec, inputs: Sequence[Input], tokenizer: TokenizerIdentity) -> str:
    """Return a hash of the options and of the inputs' names, sizes and modification times."""
    only_stdlib = {*spec.sources, *spec.val_sources} == {STDLIB}
    contents = {
        "layout": LAYOUT_VERSION,
        "python": platform.python_version() if only_stdlib else "",
        "tokenizer": [tokenizer.sha256, tokenizer.eos_id],
        "recipe": asdict(spec) | {"tokenizer": ""},
        "files": [
            [source.name, source.role, source.size] + ([] if only_stdlib else [source.path, source.mtime_ns])
            for source in inputs
        ],
    }
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:24]


def cannot_be_written(folder: Path) -> bool:
    """Return whether the user lacks write access to a folder or, if it does not exist, its nearest parent."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK))


_PARTIAL_SUFFIX = ".partial"


def prepare_texts(config: DataConfig, checks_sizes: bool) -> Path:
    """Return the folder with the cached shards for a config's texts; prepare the texts if necessary."""
    spec = dataset_spec(config)
    cache = cache_folder(config)
    target = cache / cache_key(spec, find_inputs(spec), identify(spec.tokenizer))
    if checks_sizes:
        _set_aside_if_damaged(target)
    if not is_dataset(target):
        _prepare_into(cache, target, spec, max(1, config.num_workers))
    return target


def _set_aside_if_damaged(target: Path) -> None:
    """Rename a cached dataset that has missing or truncated shards, so that it is prepared again."""
    if not is_dataset(target):
        return
    try:
        checked_dataset(target)
    except UsageError as error:
        aside = target.with_name(f"{target.name}.damaged-{os.getpid()}")
        print(f"{error.message}: moved to {aside.name}, preparing the data again", file=sys.stderr)
        with contextlib.suppress(FileNotFoundError):  # Another process has already renamed the folder.
            target.rename(aside)


def _prepare_into(cache: Path, target: Path, spec: DatasetSpec, workers: int) -> None:
    from trainkit.capabilities.texts.prepare import DatasetMismatch, exclusive, prepare, progress_lines

    partial = target.with_name(target.name + _PARTIAL_SUFFIX)
    try:
        ensure_folder(cache, parents=True)
        with exclusive(target.with_name(f"{target.name}.lock")):
            if _has_appeared(target):
                return
            on_progress = progress_lines("preparing data")
            try:
                prepare(spec, partial, workers, on_progress)
            except DatasetMismatch:
                # This folder was left behind by an interrupted preparation of an older version of the texts.
                # The folder can be deleted, because the cache can be rebuilt.
                shutil.rmtree(partial)
                prepare(spec, partial, workers, on_progress)
            partial.rename(target)
    except OSError as error:
        raise UsageError(f"cannot write the data cache {cache}: {error.strerror}", hint=CACHE_HINT) from error


def _has_appeared(target: Path) -> bool:
    """Return whether another host has prepared the dataset in the meantime; the caller must hold the lock.

    An NFS client may cache for up to a minute that the folder does not exist. Creating the folder forces a
    request to the NFS server.
    """
    try:
        target.mkdir()
    except FileExistsError:
        return is_dataset(target)
    target.rmdir()
    return False
