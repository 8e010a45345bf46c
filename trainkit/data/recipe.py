"""What a dataset is made from: the part of the `data` section that decides about the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainkit.data.dataset_file import is_dataset
from trainkit.data.tokenizer_identity import BYTES
from trainkit.errors import UsageError

STDLIB = "stdlib"
"""The source that every machine has: the Python sources that came with the interpreter."""


class DataConfig(Protocol):
    """What this package reads of `trainkit.config.schema.DataConfig`; paths are absolute."""

    @property
    def source(self) -> str | Sequence[str]: ...
    @property
    def val_source(self) -> str | Sequence[str] | None: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def text_key(self) -> str: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def val_fraction(self) -> float: ...
    @property
    def cache_dir(self) -> str | None: ...


@dataclass(frozen=True)
class Recipe:
    """What to make a dataset from, and how."""

    sources: tuple[str, ...]
    val_sources: tuple[str, ...] = ()
    """Replace the split by `val_fraction`."""
    tokenizer: str = BYTES
    val_fraction: float = 0.0
    text_key: str = "text"

    @property
    def split_fraction(self) -> float:
        """The share of `sources` that goes to validation."""
        return 0.0 if self.val_sources else self.val_fraction


def recipe_of(config: DataConfig) -> Recipe:
    """The recipe that a config's data section asks for."""
    return Recipe(
        sources=_listed(config.source),
        val_sources=_listed(config.val_source),
        tokenizer=config.tokenizer,
        val_fraction=config.val_fraction,
        text_key=config.text_key,
    )


def prepared_folder(config: DataConfig) -> Path | None:
    """The folder of token shards that `data.source` names; None when it names texts."""
    sources = _listed(config.source)
    if len(sources) == 1 and sources[0] != STDLIB and is_dataset(Path(sources[0])):
        return Path(sources[0])
    return None


def refuse_val_source(config: DataConfig, folder: Path) -> None:
    """Raise UsageError when a prepared dataset is to be validated on something else than its own split."""
    if _listed(config.val_source):
        raise UsageError(
            f"data.val_source is set, and {folder} is a prepared dataset: its own validation split is used",
            hint="leave data.val_source out, or give the texts of both instead of the dataset",
        )


def _listed(source: str | Sequence[str] | None) -> tuple[str, ...]:
    if source is None:
        return ()
    return (source,) if isinstance(source, str) else tuple(source)
