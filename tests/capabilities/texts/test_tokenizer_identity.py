"""Compares values that are read from a tokenizer.json without the library with the library's."""

import json
import shutil

import pytest

from tests.support.said import said
from trainkit.capabilities.texts.tokenize import Tokenizer
from trainkit.data.dataset_file import identify
from trainkit.errors import UsageError


def write_tokenizer(folder, vocab, added=()):
    path = folder / "tokenizer.json"
    tokens = [{"id": number, "content": content} for content, number in added]
    path.write_text(json.dumps({"model": {"type": "x", "vocab": vocab}, "added_tokens": tokens}))
    return str(path)


@pytest.mark.parametrize(
    ("vocab", "added", "found"),
    [
        ({"a": 0, "b": 1}, [("</s>", 9)], (10, 9)),  # added tokens and gaps count
        ([["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0]], (), (3, 1)),
    ],
)
def test_the_size_and_the_end_token_of_a_vocabulary(tmp_path, vocab, added, found):
    identity = identify(write_tokenizer(tmp_path, vocab, added))
    assert (identity.vocab_size, identity.eos_id) == found


def test_no_end_of_document_is_no_guess(tmp_path):
    with pytest.raises(UsageError, match="has no known end-of-document token") as caught:
        identify(write_tokenizer(tmp_path, {"a": 0}))
    assert "eos_token" in caught.value.hint


def test_tokenizer_config_says_which_token_ends_a_document(tmp_path):
    path = write_tokenizer(tmp_path, {"</s>": 0, "<end>": 1})
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert identify(path).eos_token == "<end>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<other>"}')
    with pytest.raises(UsageError, match="no token '<other>'"):
        identify(path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert identify(path).eos_token == "</s>"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {}}', '{"model": {"vocab": {}}}', "null"])
def test_not_a_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=r"is not a Hugging Face tokenizer\.json"):
        identify(str(tmp_path / "tokenizer.json"))


def test_what_the_library_refuses_is_worded(tmp_path):
    path = write_tokenizer(tmp_path, {"</s>": 0})
    with pytest.raises(UsageError, match="cannot be loaded by tokenizers"):
        Tokenizer(path)


def test_missing_or_a_folder(tmp_path, tokenizer_json):
    with pytest.raises(UsageError, match="does not exist"):
        identify(str(tmp_path / "tokenizer.json"))
    shutil.copy(tokenizer_json, tmp_path)
    with pytest.raises(UsageError, match="cannot be read") as caught:
        identify(str(tmp_path))
    said(caught.value.hint)
