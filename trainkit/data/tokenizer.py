"""Turns text into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainkit.data.tokenizer_identity import BYTES, identify
from trainkit.errors import UsageError

Tokens = npt.NDArray[Any]
"""uint16 or uint32, little endian, as they are stored."""


def token_dtype(vocab_size: int) -> str:
    """The smallest unsigned type that holds every token."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class Tokenizer:
    """A tokenizer as `data.tokenizer` names it: `bytes`, or the path of a tokenizer.json."""

    def __init__(self, name: str) -> None:
        self.identity = identify(name)
        self._library = None if name == BYTES else _load(name)
        self._dtype = np.dtype(token_dtype(self.identity.vocab_size)).newbyteorder("<")

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """The ids of each text, without special tokens; UnicodeDecodeError for a text that is not UTF-8."""
        if self._library is None:
            return [np.frombuffer(text, dtype=np.uint8).astype(self._dtype) for text in texts]
        encodings = self._library.encode_batch_fast(
            [text.decode() for text in texts], add_special_tokens=False
        )
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]


def _load(path: str) -> Any:
    import tokenizers  # 60 ms that the byte tokenizer does not need

    try:
        library = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing more precise
        raise UsageError(
            f"tokenizer {path} cannot be loaded by tokenizers {tokenizers.__version__}: {error}",
            hint="install a newer version of tokenizers, or save the tokenizer again",
        ) from None
    library.no_truncation()
    library.no_padding()
    return library
