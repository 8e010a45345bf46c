"""Copy a Git repository along with the code, so that Git commands give the same results in the copy.

The copy has its own HEAD, refs, config and index, but shares the objects of the original repository. Git
commands in the copy therefore do not change the original.

A Git index recognizes unchanged files by their inodes and timestamps, which differ in a copy. `carried_index`
replaces the inodes and timestamps, so that Git does not read all files again or report unchanged files as
changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainkit.folders import ensure_folder

GIT = ".git"
GIT_LOCATIONS = {
    f"GIT_{name}"
    for name in ("DIR", "WORK_TREE", "INDEX_FILE", "COMMON_DIR", "PREFIX", "NAMESPACE", "OBJECT_DIRECTORY")
}
"""Environment variables that make Git use a repository other than the one in the working directory; Git sets
them when it runs hooks."""
OF_SHA256 = b"\n\tobjectformat = sha256\n"
"""The lines in a repository's Git config that select SHA-256 hashes."""
_STAT = struct.Struct(">10I")
"""Format of the stat data in an index entry: ctime and mtime in seconds and nanoseconds, device, inode, mode,
user, group and size, each modulo 2**32."""
_HAS_MORE_FLAGS = 0x4000
_FILE_TYPES = (0o10, 0o12)
"""The file type bits in the mode of regular files and symlinks."""
_SUBMODULE = 0o16


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An entry in a Git index; describes one file."""

    position: int
    """The offset of the entry's stat data in the index file."""
    stat: tuple[int, ...]
    oid: bytes
    name: bytes

    def is_unchanged(self, found: os.stat_result, written_s: int) -> bool:
        """Return whether the file with the stat `found` has not changed since the index was written.

        `written_s` is the modification time of the index.
        """
        own = (*self.stat[:1], *self.stat[2:3], self.stat[5], *self.stat[7:])
        # If a file changed in the second when the index was written, the file may have changed again
        # within that second.
        return own == _compared(found) and self.stat[6] == _mode(found) and self.stat[2] < written_s


def _mode(found: os.stat_result) -> int:
    """Return the mode of a file as Git records it.

    The mode is compared too, because a chmod within the same second does not change any timestamp in whole
    seconds.
    """
    if stat.S_ISLNK(found.st_mode):
        return stat.S_IFLNK
    return stat.S_IFREG | (0o755 if found.st_mode & stat.S_IXUSR else 0o644)


def _compared(found: os.stat_result) -> tuple[int, ...]:
    values = (
        int(found.st_ctime),
        int(found.st_mtime),
        found.st_ino,
        found.st_uid,
        found.st_gid,
        found.st_size,
    )
    return tuple(value & 0xFFFFFFFF for value in values)


def index_entries(data: bytes, hash_size: int) -> Iterator[IndexEntry]:
    """Yield the entries of an index with version 2, 3 or 4; raise ValueError for any other version."""
    signature, version, count = struct.unpack_from(">4sII", data)
    if signature != b"DIRC" or version not in (2, 3, 4):
        raise ValueError(f"unsupported Git index version {version}")
    at, name = 12, b""
    for _ in range(count):
        start, at = at, at + _STAT.size
        oid, at = data[at : at + hash_size], at + hash_size
        at += 4 if int.from_bytes(data[at : at + 2], "big") & _HAS_MORE_FLAGS else 2
        # In version 4, an entry stores only the part of its name that differs from the previous entry's name.
        if version == 4:
            num_left_out, at = _varint(data, at)
            end = data.index(b"\0", at)
            name, at = name[: len(name) - num_left_out] + data[at:end], end + 1
        else:
            end = data.index(b"\0", at)
            name, at = data[at:end], start + (end - start + 8) // 8 * 8
        yield IndexEntry(start, _STAT.unpack_from(data, start), oid, name)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at] & 0x7F
    while data[at] & 0x80:
        at += 1
        value = ((value + 1) << 7) | (data[at] & 0x7F)
    return value, at + 1


def carried_index(data: bytes, hash_size: int, written_s: int, source: bytes, target: bytes) -> bytes:
    """Convert a Git index for a copy of its folder, so that Git recognizes unchanged files.

    `source` is the original folder, and `target` is the copy. The timestamps of a file that may have changed
    are set to 0, so that Git compares the file's content.
    """
    changed = bytearray(data)
    for entry in index_entries(data, hash_size):
        if entry.stat[6] >> 12 not in _FILE_TYPES:
            continue
        stat = (0, 0, 0, 0, *entry.stat[4:])
        try:
            if entry.is_unchanged(os.lstat(source + entry.name), written_s):
                new = os.lstat(target + entry.name)
                ctime, mtime = divmod(new.st_ctime_ns, 10**9), divmod(new.st_mtime_ns, 10**9)
                values = (*ctime, *mtime, new.st_dev, new.st_ino, entry.stat[6])
                stat = (*values, new.st_uid, new.st_gid, new.st_size)
        except OSError:
            pass  # The file is missing from the source, the copy or both.
        _STAT.pack_into(changed, entry.position, *(value & 0xFFFFFFFF for value in stat))
    changed[-hash_size:] = hashlib.new(hash_name(hash_size), changed[:-hash_size]).digest()
    return bytes(changed)


def hash_name(hash_size: int) -> str:
    """Return Git's name for the hash algorithm with hashes of `hash_size` bytes."""
    return "sha256" if hash_size == 32 else "sha1"


def write_index(source: Path, target: Path, index: Path, hash_size: int) -> None:
    """Convert the file `index`, which is the Git index of `source`, and write it to the copy `target`."""
    data, written_s = index.read_bytes(), int(index.stat().st_mtime)
    old, new = os.fsencode(source) + b"/", os.fsencode(target) + b"/"
    for entry in index_entries(data, hash_size):
        name = os.fsdecode(entry.name)
        if entry.stat[6] >> 12 == _SUBMODULE and (source / name).is_dir():
            # Create the folder of a submodule, because Git would report a missing submodule folder as
            # deleted.
            ensure_folder(target / name, 0o700, parents=True)
    write_private(target / GIT / "index", carried_index(data, hash_size, written_s, old, new))


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read; create its parent folders if needed."""
    ensure_folder(path.parent, 0o700, parents=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(content)


def hash_size_of(repository: Path) -> int:
    """Return the hash size in bytes for a Git repository that this module or `git_snapshot` created."""
    return 32 if OF_SHA256 in (repository / "config").read_bytes() else 20


def repositories_below(root: Path) -> list[Path]:
    """Return the folders in a code copy that contain a Git repository, relative to the copy's root."""
    found = []
    for folder, folders, _ in os.walk(root):
        if GIT in folders:
            folders.remove(GIT)
            found.append(Path(os.path.relpath(folder, root)))
    return found


def carry_repository(source: Path, target: Path) -> None:
    """Copy the Git repository of `source` to `target`, a copy of its files; both share the Git objects.

    `target` may later be renamed within its parent folder, or moved together with `source`. Raises OSError if
    the repository cannot be read or copied.
    """
    old, new = source / GIT, target / GIT
    for name in (".", "objects", "objects/info"):
        ensure_folder(new / name, 0o700)
    for folder, folders, files in os.walk(old):
        folders[:] = [name for name in folders if Path(folder, name) != old / "objects"]
        for name in folders:  # `os.walk` yields parents first, so the parent folder exists.
            (new / os.path.relpath(folder, old) / name).mkdir(mode=0o700)
        for name in set(files) - {"index"}:
            write_private(new / os.path.relpath(folder, old) / name, Path(folder, name).read_bytes())
    objects = os.path.relpath(os.path.realpath(old / "objects"), os.path.realpath(new) + "/objects")
    write_private(new / "objects/info/alternates", os.fsencode(objects) + b"\n")
    if (old / "index").exists():
        write_index(source, target, old / "index", hash_size_of(old))


def retire_repository(folder: Path, ending: str) -> None:
    """Remove the repository of a working folder, or rename it if the run added Git objects to it."""
    repository = folder / GIT
    if any(path.name != "alternates" for path in (repository / "objects").rglob("*") if path.is_file()):
        repository.rename(folder / f"{GIT}{ending}")
    else:
        shutil.rmtree(repository, ignore_errors=True)
