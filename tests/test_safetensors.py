"""Tests reading parts of safetensors files, and writing such files."""

import json
import struct
from pathlib import Path

import pytest
import torch

from trainkit.errors import FatalError
from trainkit.safetensors import FILE_NAME, INDEX_NAME, StoredWeights, write_safetensors

TENSORS = {
    "matrix": torch.arange(24, dtype=torch.float32).view(6, 4),
    "vector": torch.arange(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 4),
}


def write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(file, sizes, iter(tensors.values()))


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / FILE_NAME, TENSORS)
    stored = StoredWeights(tmp_path)
    for name, tensor in TENSORS.items():
        assert stored.read(name).dtype == tensor.dtype
        assert torch.equal(stored.read(name), tensor)


def test_the_library_reads_and_writes_the_same(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    write(tmp_path / FILE_NAME, TENSORS)
    assert all(
        torch.equal(value, TENSORS[name]) for name, value in library.load_file(tmp_path / FILE_NAME).items()
    )
    library.save_file(TENSORS, tmp_path / "theirs.safetensors")
    (tmp_path / "theirs.safetensors").replace(tmp_path / FILE_NAME)
    stored = StoredWeights(tmp_path)
    assert all(torch.equal(stored.read(name), value) for name, value in TENSORS.items())


def test_only_the_rows_of_a_part_are_read(tmp_path: Path) -> None:
    write(tmp_path / FILE_NAME, TENSORS)
    stored = StoredWeights(tmp_path)
    assert torch.equal(stored.read("matrix", (slice(2, 4),)), TENSORS["matrix"][2:4])
    assert torch.equal(stored.read("matrix", (slice(1, 3), slice(0, 2))), TENSORS["matrix"][1:3, :2])
    assert stored.read("matrix", (slice(6, 6),)).shape == (0, 4)


def test_files_named_by_an_index(tmp_path: Path) -> None:
    parts = {"a.safetensors": ["matrix"], "b.safetensors": ["vector", "scalar", "empty"]}
    for file, names in parts.items():
        write(tmp_path / file, {name: TENSORS[name] for name in names})
    index = {name: file for file, names in parts.items() for name in names}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    stored = StoredWeights(tmp_path)
    assert all(name in stored for name in TENSORS)
    assert torch.equal(stored.read("vector"), TENSORS["vector"])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(FatalError, match=r"b\.safetensors, which is missing"):
        StoredWeights(tmp_path)
    write(tmp_path / FILE_NAME, {"scalar": TENSORS["scalar"]})
    assert "matrix" not in StoredWeights(tmp_path), "a single file comes first, as in transformers"


def test_the_fingerprint_changes_with_the_values(tmp_path: Path) -> None:
    write(tmp_path / FILE_NAME, TENSORS)
    before = StoredWeights(tmp_path).fingerprint
    assert StoredWeights(tmp_path).fingerprint == before
    (tmp_path / FILE_NAME).unlink()
    write(tmp_path / FILE_NAME, {**TENSORS, "matrix": TENSORS["matrix"] + 1})
    assert StoredWeights(tmp_path).fingerprint != before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is truncated"),
        (struct.pack("<Q", 1 << 60) + b"{}", "is damaged or is not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "is damaged or is not a safetensors file"),
        (struct.pack("<Q", 9) + b"not json!", "is damaged or is not a safetensors file"),
        (
            struct.pack("<Q", 58) + b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0,8]}}'[:58],
            "is damaged or is not a safetensors file",
        ),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(FatalError, match=message):
        StoredWeights(tmp_path)


def test_a_truncated_file(tmp_path: Path) -> None:
    write(tmp_path / FILE_NAME, {"matrix": TENSORS["matrix"]})
    content = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(content[:-1])
    with pytest.raises(FatalError, match="matrix is incomplete"):
        StoredWeights(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(FatalError, match=r"has no model\.safetensors") as caught:
        StoredWeights(tmp_path)
    assert "from_scratch" in caught.value.hint
