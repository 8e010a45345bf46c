"""Provides texts and configs to make datasets from."""

import pytest

from trainkit.config.training import DataConfig


@pytest.fixture
def data_config(tmp_path):
    """Return a function that makes a `data` section.

    Other keys have their defaults, and the cache is in the test's folder.
    """

    def make(**changes):
        values = {"seq_len": 16, "num_workers": 1, "val_fraction": 0.1, "cache_dir": str(tmp_path / "cache")}
        return DataConfig(**(values | changes))

    return make


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory):
    """Make a small byte-level BPE tokenizer of Hugging Face, and return its file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 50, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
