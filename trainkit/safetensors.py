"""Reads slices of tensors from safetensors files, and writes safetensors files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainkit.errors import EXIT_FAILED, FatalError

INDEX_NAME = "model.safetensors.index.json"
FILE_NAME = "model.safetensors"
HEADER_LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
"""Maximum size, in bytes, of a file header in the safetensors format."""
TAIL_BYTES = 1 << 16
"""Number of bytes at the end of each file that are included in the fingerprint."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Stored:
    """The position of a tensor in a file, and the tensor's dtype and shape."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class StoredWeights:
    """The tensors in the safetensors files of a folder. Slices can be read without reading whole tensors."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of all files; raise FatalError if there is no file or a file is damaged."""
        self.folder = folder
        self._headers: dict[Path, bytes] = {}
        self._tensors: dict[str, _Stored] = {}
        for file in _files(folder):
            self._add_file(file)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def fingerprint(self) -> str:
        """Return a digest that changes if the files' names, tensor shapes, sizes or last bytes change."""
        digest = hashlib.sha256()
        for file, header in self._headers.items():
            size = file.stat().st_size
            tail = min(TAIL_BYTES, size)
            for part in (str(size).encode(), header, _read(file, size - tail, tail)):
                digest.update(part)
        return digest.hexdigest()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, index: Sequence[slice] = ()) -> Tensor:
        """Read a tensor or a slice of a tensor. `index` contains one slice for each of the first dimensions.

        Only the rows selected by the first slice are read from the file. Raises FatalError if the file is too
        short.
        """
        stored = self._tensors[name]
        start, num_rows, shape = 0, None, stored.shape
        if index and shape:
            first, last, step = index[0].indices(shape[0])
            assert step == 1
            start, num_rows = first, last - first
            shape = (num_rows, *shape[1:])
        row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        with _reading(stored.file):
            num_bytes = math.prod(shape) * stored.dtype.itemsize
            data = _read(stored.file, stored.start + start * row_bytes, num_bytes)
        flat = torch.frombuffer(data, dtype=stored.dtype) if data else torch.empty(0, dtype=stored.dtype)
        columns = (slice(None), *index[1:])
        return flat.view(shape)[columns] if len(index) > 1 else flat.view(shape)

    def _add_file(self, file: Path) -> None:
        with _reading(file):
            size = file.stat().st_size
            [num_bytes] = HEADER_LENGTH.unpack(_read(file, 0, HEADER_LENGTH.size))
            if num_bytes > min(MAX_HEADER_BYTES, size):
                raise ValueError("its header is too long")
            header = _read(file, HEADER_LENGTH.size, num_bytes)
            found = json.loads(header)
            found.pop("__metadata__", None)
            data_start = HEADER_LENGTH.size + num_bytes
            for name, item in found.items():
                first, last = item["data_offsets"]
                dtype, shape = DTYPES.get(item["dtype"]), tuple(item["shape"])
                if dtype is None:
                    message = f"{name} in {file} is {item['dtype']}"
                    raise FatalError(message, "save the model in bfloat16 or float32")
                if last - first != math.prod(shape) * dtype.itemsize or data_start + last > size:
                    raise ValueError(f"{name} is incomplete")
                self._tensors[name] = _Stored(file, data_start + first, dtype, shape)
            self._headers[file] = bytes(header)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise FatalError if a file cannot be read or is not in the safetensors format."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FatalError(
            f"{file} is damaged or is not a safetensors file: {error}", "download it again"
        ) from None
    except OSError as error:
        # If the disk error was temporary, a restart may succeed.
        raise FatalError(f"{file} cannot be read: {error.strerror}", exit_code=EXIT_FAILED) from None


def _files(folder: Path) -> list[Path]:
    """Return the weight files in a folder. A single weight file takes precedence over an index file."""
    if (folder / FILE_NAME).is_file():
        return [folder / FILE_NAME]
    index = folder / INDEX_NAME
    if not index.is_file():
        raise FatalError(
            f"{folder} has no {FILE_NAME}",
            hint="save it with `save_pretrained`; with model.from_scratch: true, no weights are needed",
        )
    with _reading(index):
        files = [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        for file in files:
            if not file.is_file():
                raise ValueError(f"the index refers to {file.name}, which is missing")
    return files


def _read(file: Path, offset: int, num_bytes: int) -> bytearray:
    """Read bytes from a file without memory-mapping, which is slow on network file systems."""
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while view:
            # Linux reads at most 2 GiB per system call.
            count = stream.readinto(view)
            if not count:
                raise ValueError("the file is truncated")
            view = view[count:]
    return buffer


def write_safetensors(
    file: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], values: Iterator[Tensor]
) -> None:
    """Write a safetensors file, one tensor at a time. `values` must have the same order as `tensors`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_LENGTH.size)
    with file.open("xb") as stream:
        stream.write(HEADER_LENGTH.pack(len(text)))
        stream.write(text)
        for (dtype, shape), value in zip(tensors.values(), values, strict=True):
            assert value.shape == shape
            flat = value.to(dtype).contiguous().flatten()
            stream.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        stream.flush()
        os.fsync(stream.fileno())
