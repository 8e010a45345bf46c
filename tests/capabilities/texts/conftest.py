"""Provides the fixtures of the tests of data."""

from data_fixtures import data_config, tokenizer_json

__all__ = ["data_config", "tokenizer_json"]
