"""The identity of a `tokenizer.json`, read as plain JSON without the tokenizers library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from trainkit.data.dataset_file import TokenizerIdentity
from trainkit.errors import UsageError
from trainkit.formats import JsonObject

BYTES = "bytes"
BYTES_IDENTITY = TokenizerIdentity(
    kind=BYTES,
    name=BYTES,
    sha256=hashlib.sha256(b"ids 0..255 are bytes, 256 ends a document").hexdigest(),
    vocab_size=257,
    eos_id=256,
    eos_token="<eos>",
)
EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]", "<|im_end|>")
"""Tried in this order if no tokenizer_config.json names the token."""


def identify(tokenizer: str) -> TokenizerIdentity:
    """The identity of `bytes` or of the tokenizer.json at a path.

    Raises UsageError if the file is missing, is not a tokenizer.json, or has no end-of-document token.
    """
    return BYTES_IDENTITY if tokenizer == BYTES else _identify_file(tokenizer)


def check_made_by(wanted: str, identity: TokenizerIdentity, folder: Path, used: TokenizerIdentity) -> None:
    """Raise UsageError if a prepared dataset was made with another tokenizer than `data.tokenizer`.

    `bytes` is the default of the config and accepts any tokenizer.
    """
    if wanted != BYTES and identity.sha256 != used.sha256:
        raise UsageError(
            f"data.tokenizer {wanted} is not the tokenizer of {folder}, which was made with {used.name}",
            hint="remove data.tokenizer, or prepare the texts again with this tokenizer",
        )


def refuse_several(used: Sequence[tuple[str, TokenizerIdentity]]) -> None:
    """Raise UsageError if the sources of a mixture, each with its name, have different tokenizers."""
    (first, expected), *others = used
    for name, tokenizer in others:
        if tokenizer.sha256 != expected.sha256:
            raise UsageError(
                f"the sources of a mixture need one tokenizer: {first} uses {expected.name}, "
                f"{name} uses {tokenizer.name}",
                hint="set data.tokenizer to that of the prepared datasets, or prepare them all with one",
            )


def _identify_file(tokenizer: str) -> TokenizerIdentity:
    sha256, ids = _read(tokenizer)
    eos = _eos_token(Path(tokenizer), ids)
    return TokenizerIdentity(
        "tokenizer.json", Path(tokenizer).name, sha256, max(ids.values()) + 1, ids[eos], eos
    )


@lru_cache(maxsize=4)
def _read(tokenizer: str) -> tuple[str, dict[str, int]]:
    """The sha256 of a tokenizer.json and the id of every token in it."""
    path = Path(tokenizer)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"tokenizer {path} does not exist", hint="use `bytes`, or the path of a tokenizer.json"
        ) from None
    except OSError as error:
        hint = "name the tokenizer.json in that folder" if path.is_dir() else ""
        raise UsageError(f"tokenizer {path} cannot be read: {error.strerror}", hint=hint) from None
    try:
        record = json.loads(content)
        ids = _token_ids(record)
    except (ValueError, KeyError, TypeError, AttributeError):
        ids = {}
    if not ids:
        raise UsageError(
            f"tokenizer {path} is not a Hugging Face tokenizer.json",
            hint="save one with `tokenizer.backend_tokenizer.save(PATH)`, or use `bytes`",
        )
    return hashlib.sha256(content).hexdigest(), ids


def _token_ids(record: JsonObject) -> dict[str, int]:
    vocab = record["model"]["vocab"]
    if isinstance(vocab, list):
        ids = {token: number for number, (token, _score) in enumerate(vocab)}
    else:
        ids = {token: int(number) for token, number in vocab.items()}
    for added in record.get("added_tokens") or ():
        ids[added["content"]] = int(added["id"])
    return ids


def _eos_token(path: Path, ids: dict[str, int]) -> str:
    named = _configured_eos(path.with_name("tokenizer_config.json"))
    if named is not None:
        if named in ids:
            return named
        raise UsageError(
            f"tokenizer {path} has no token {named!r}, which tokenizer_config.json names as eos_token"
        )
    for token in EOS_NAMES:
        if token in ids:
            return token
    raise UsageError(
        f"tokenizer {path} has no known end-of-document token: none of {' '.join(EOS_NAMES)}",
        hint='put {"eos_token": "…"} with a token of its vocabulary into tokenizer_config.json next to it',
    )


def _configured_eos(path: Path) -> str | None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    eos = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(eos, dict):
        eos = eos.get("content")
    return eos if isinstance(eos, str) else None
