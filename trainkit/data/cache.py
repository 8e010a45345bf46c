"""Where texts are kept as tokens, so that they are tokenised once."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trainkit.data.recipe import STDLIB, DataConfig, Recipe
from trainkit.data.sources import Input
from trainkit.data.tokenizer_identity import identify
from trainkit.data.units import LAYOUT_VERSION

CACHE_HINT = "set data.cache_dir to a folder that you may write to and that has room"


def cache_folder(config: DataConfig) -> Path:
    """`data.cache_dir`, else the user's cache."""
    if config.cache_dir is not None:
        return Path(config.cache_dir)
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trainkit" / "data"


def cache_key(recipe: Recipe, inputs: Sequence[Input]) -> str:
    """Changes with the files as far as names, sizes and times tell, and with the options."""
    only_stdlib = {*recipe.sources, *recipe.val_sources} == {STDLIB}
    tokenizer = identify(recipe.tokenizer)
    made_of = {
        "layout": LAYOUT_VERSION,
        "python": platform.python_version() if only_stdlib else "",
        "tokenizer": [tokenizer.sha256, tokenizer.eos_id],
        "recipe": asdict(recipe) | {"tokenizer": ""},
        "files": [
            [source.name, source.role, source.size] + ([] if only_stdlib else [source.path, source.mtime_ns])
            for source in inputs
        ],
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:24]


def cannot_be_written(folder: Path) -> bool:
    """Whether a folder, or the first of its parents that exists, is none that this user may write to."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK))
