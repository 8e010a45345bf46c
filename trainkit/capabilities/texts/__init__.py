"""Texts as training data: they are checked, tokenised into shards, and kept in a cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.capability import Capability
from trainkit.errors import KeyProblem

if TYPE_CHECKING:
    from trainkit.config.training import DataConfig
    from trainkit.data.dataset_file import TokenizerIdentity


class Texts(Capability):
    """The capability: its result is a folder of shards, so no plan has a part of it."""

    name = "texts"

    def inspect_texts(
        self, config: DataConfig, tokenizer: TokenizerIdentity | None
    ) -> tuple[list[KeyProblem], dict[str, float] | None]:
        from trainkit.capabilities.texts.checks import inspect_texts

        return inspect_texts(config, tokenizer)

    def prepare_texts(self, config: DataConfig, checks_sizes: bool) -> Path:
        from trainkit.capabilities.texts.cache import prepare_texts

        return prepare_texts(config, checks_sizes)


CAPABILITY = Texts
