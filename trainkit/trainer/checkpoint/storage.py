"""Read checkpoint files, unpickling only their metadata, and write checkpoint files, hashing the data."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainkit.folders import ensure_folder
from trainkit.run.files import open_file
from trainkit.run.manifest import FileSum, file_hash
from trainkit.trainer.split_master import SplitMaster
from trainkit.trainer.torch_private import PICKLED_IN_METADATA

# torch warns if there is no process group, but a single process intentionally saves without one. Warning
# filters apply to all threads, so set the filter once, on import.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

METADATA_NAME = ".metadata"
COPY_AHEAD = 10_000_000
"""Number of bytes copied from the device ahead of time, while earlier data is being written."""
_OF_METADATA = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
)
_SAFE_NAMES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    *PICKLED_IN_METADATA,
}


class HashedResults(list[WriteResult]):
    """The write results that a rank sends to the coordinator, plus the size and hash of each file."""

    files: dict[str, FileSum]


class _HashingStream(io.BufferedWriter):
    """A file that hashes data while writing it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"), buffer_size=1 << 20)
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.num_bytes += memoryview(data).nbytes
        return super().write(data)


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.files: dict[str, FileSum] = {}

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        # Do not create missing parent folders, because the run folder may have been moved or deleted.
        ensure_folder(Path(path).parent)
        ensure_folder(Path(path))

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _HashingStream(Path(path)) as hashing:
            yield cast(io.IOBase, hashing)
        self.files[Path(path).name] = FileSum(hashing.num_bytes, hashing.digest.hexdigest())


class HashingWriter(FileSystemWriter):
    """Writes a sharded checkpoint and calls `publish` with the size and hash of each file.

    After a save, `files` on the coordinator contains the sizes and hashes of all ranks' files. Set
    `from_device` if the tensors are on a GPU; this GPU must be the writing thread's current device.
    """

    def __init__(
        self,
        path: Path,
        publish: Callable[[Mapping[str, FileSum]], None] = lambda files: None,
        *,
        from_device: bool = False,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank=True,
            sync_files=True,
            overwrite=False,
            # Enable copy-ahead only when the calling thread writes: in a thread started by torch, the current
            # device is GPU 0, so the copy would use the wrong GPU.
            per_thread_copy_ahead=COPY_AHEAD if from_device else 0,
        )
        self._hashing = _HashingFileSystem()
        self.fs = self._hashing
        self.files: dict[str, FileSum] = {}
        self._publish = publish
        self._is_coordinator = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._is_coordinator:
            return super().prepare_local_plan(plan)
        # In torch's implementation, every rank looks up the metadata file, which the coordinator writes only
        # later. The host's NFS client would cache the failed lookup for up to a minute.
        self.fs.mkdir(self.path)
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = HashedResults(super().write_data(plan, planner).wait())
        results.files = dict(self._hashing.files)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        for part in results:
            self.files.update(cast(HashedResults, part).files)
        path = Path(self.path) / METADATA_NAME
        with path.open("rb") as stream:
            # torch calls fsync before it flushes the buffer, when the file is still empty, so call fsync
            # again.
            os.fsync(stream.fileno())
        self.files[METADATA_NAME] = FileSum(path.stat().st_size, file_hash(path))
        self._publish(self.files)


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only classes that occur in checkpoint metadata; raises UnpicklingError for others."""

    def find_class(self, module: str, name: str) -> object:
        if module == "pathlib._local":  # Python 3.13 defines the path classes in pathlib._local
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _SAFE_NAMES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in checkpoint metadata")


def _member(enumeration: object, name: str) -> object:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as ``getattr(class, name)``."""
    if isinstance(enumeration, type) and issubclass(enumeration, Enum) and name in enumeration.__members__:
        return enumeration[name]
    raise pickle.UnpicklingError(f"{enumeration}.{name} is not allowed in checkpoint metadata")


class JoiningSavePlanner(DefaultSavePlanner):
    """Saves split master weights in float32, joining the halves of one weight at a time."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._split, tensors = _float32_shapes(state_dict)
        super().set_up_planner(tensors, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        master = self._split.get(index.fqn)
        return super().lookup_object(index) if master is None else master.join()


class SplittingLoadPlanner(DefaultLoadPlanner):
    """Loads float32 tensors into split master weights, splitting one saved piece at a time."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._split, tensors = _float32_shapes(state_dict)
        super().set_up_planner(tensors, metadata, is_coordinator)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        if read_item.dest_index.fqn in self._split:
            return torch.empty(read_item.lengths, dtype=torch.float32)
        found: Tensor = super().resolve_tensor(read_item)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        master = self._split.get(read_item.dest_index.fqn)
        if master is not None:
            ends = zip(read_item.dest_offsets, read_item.lengths, strict=True)
            master[tuple(slice(start, start + length) for start, length in ends)].copy_(tensor)


def _float32_shapes(state: Mapping[str, Any]) -> tuple[dict[str, SplitMaster], dict[str, Any]]:
    """Return the split master weights in a state, and the state with float32 tensors of the same shapes.

    The float32 tensors take the memory of one element, because only their shapes and dtype are used.
    """
    split = {name: item for name, item in state.items() if isinstance(item, SplitMaster)}
    shapes = {
        name: torch.zeros((), dtype=torch.float32).expand(master.shape) for name, master in split.items()
    }
    return split, {**state, **shapes}


class SafeReader(FileSystemReader):
    """Reads a sharded checkpoint without executing any code hidden in its pickled metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open_file(Path(self.path) / METADATA_NAME) as stream:
            return cast(Metadata, _MetadataUnpickler(stream).load())
