"""Checkpoint files: hashed while they are written, harmless to read."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, state_dict_loader, state_dict_saver

from trainkit.run.manifest import FileSum, file_hash
from trainkit.trainer.checkpoint.storage import METADATA_NAME, HashingWriter, SafeReader


def save(folder: Path) -> HashingWriter:
    writer = HashingWriter(folder)
    tensors = {
        "a": torch.arange(100_000, dtype=torch.float32),
        "b": torch.ones(3, 5, dtype=torch.bfloat16),
        "step": torch.tensor(7.0),
        "empty": torch.zeros(0, 4),
    }
    state_dict_saver.save(tensors, storage_writer=writer, no_dist=True)
    return writer


def test_sizes_and_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    writer = save(tmp_path / "saved")
    on_disk = {path.name for path in (tmp_path / "saved").iterdir()}
    assert METADATA_NAME in on_disk
    assert set(writer.files) == on_disk
    for name, expected in writer.files.items():
        path = tmp_path / "saved" / name
        assert expected == FileSum(path.stat().st_size, file_hash(path))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    found = {
        "a": torch.zeros(100_000),
        "b": torch.zeros(3, 5, dtype=torch.bfloat16),
        "step": torch.zeros(()),
        "empty": torch.zeros(0, 4),
    }
    state_dict_loader.load(found, storage_reader=SafeReader(tmp_path / "saved"), no_dist=True)
    assert torch.equal(found["a"], torch.arange(100_000, dtype=torch.float32))
    assert torch.equal(found["b"], torch.ones(3, 5, dtype=torch.bfloat16))
    assert found["step"].item() == 7


def test_paths_of_another_python_are_read(tmp_path: Path) -> None:
    """Python 3.13 has moved the class."""
    for module in (b"pathlib", b"pathlib._local"):
        (tmp_path / METADATA_NAME).write_bytes(b"c" + module + b"\nPosixPath\n(V/a\ntR.")
        assert SafeReader(tmp_path).read_metadata() == Path("/a")  # type: ignore[comparison-overlap]


def test_an_existing_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    before = save(tmp_path / "saved").files
    with pytest.raises(CheckpointException, match="already exists"):
        save(tmp_path / "saved")
    for name, expected in before.items():
        assert file_hash(tmp_path / "saved" / name) == expected.sha256


def opcodes(module: str, name: str, argument: str, protocol: int) -> bytes:
    """A pickle that calls `module.name(argument)`; from protocol 4 on, a name may be a dotted path."""
    if protocol == 2:
        call = f"c{module}\n{name}\n".encode()
    else:
        call = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)) + b"\x93"
    text = b"\x8c" + bytes([len(argument)]) + argument.encode()
    return b"\x80\x04" + call + text + b"\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "exec"),
        ("builtins", "eval"),
        ("torch", "os.system"),
        ("torch", "load"),
        ("torch.serialization", "os.system"),
        ("torch.serialization", "_get_layout.__globals__"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo.__init__"),
        ("pathlib", "os.system"),
        ("pathlib", "PosixPath.unlink"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_that_would_run_code_is_refused(
    tmp_path: Path, module: str, name: str, protocol: int
) -> None:
    save(tmp_path / "saved")
    trace = tmp_path / "ran"
    (tmp_path / "saved" / METADATA_NAME).write_bytes(opcodes(module, name, f"touch {trace}"[:250], protocol))
    with pytest.raises(pickle.UnpicklingError, match="is not a class of checkpoint metadata"):
        SafeReader(tmp_path / "saved").read_metadata()
    # torch 2.11 drops the reason; `load_tensors` reads the metadata itself before, as above.
    shown = "metadata is None" if torch.__version__ < "2.12" else "is not a class of checkpoint metadata"
    with pytest.raises(CheckpointException, match=shown):
        state_dict_loader.load(
            {"a": torch.zeros(100_000)}, storage_reader=SafeReader(tmp_path / "saved"), no_dist=True
        )
    assert not trace.exists()


def test_the_pickles_here_do_run_code_when_read_carelessly(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    pickle.loads(opcodes("os", "system", f"touch {trace}", 2))
    assert trace.exists()
    trace.unlink()
    pickle.loads(opcodes("torch.distributed.checkpoint.filesystem", "os.system", f"touch {trace}", 4))
    assert trace.exists()


class _Reduces:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit",)


def test_an_object_that_reduces_to_a_call_is_refused(tmp_path: Path) -> None:
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(_Reduces()))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.exec is not a class of checkpoint metadata"):
        SafeReader(tmp_path).read_metadata()


def test_tensor_files_are_read_without_pickled_code(tmp_path: Path) -> None:
    """The file of a tensor replaced by one that torch.load would run."""
    save(tmp_path / "saved")
    metadata = SafeReader(tmp_path / "saved").read_metadata()
    trace = tmp_path / "ran"
    payload = opcodes("os", "system", f"touch {trace}", 2)
    for info in metadata.storage_data.values():
        path = tmp_path / "saved" / info.relative_path
        path.write_bytes(payload.ljust(path.stat().st_size, b"\0"))
    with pytest.raises(CheckpointException, match="Weights only"):
        state_dict_loader.load(
            {"a": torch.zeros(100_000)}, storage_reader=SafeReader(tmp_path / "saved"), no_dist=True
        )
    assert not trace.exists()
