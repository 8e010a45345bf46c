"""Provides the fixtures of the tests of data."""

import pytest
from data_fixtures import data_config, tokenizer_json

__all__ = ["data_config", "tokenizer_json"]


@pytest.fixture
def a_txt(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("hello world\n" * 100)
    return path
