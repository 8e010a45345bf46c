"""Copies the code of a run into its folder, so that editing after submit changes nothing."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_IMODE, S_ISLNK
from typing import Any

from trainkit.errors import UsageError
from trainkit.rundir import RunDir
from trainkit.submit.code.ignored_links import find_links, links_notes, make_links
from trainkit.submit.code.import_path import find_import_path
from trainkit.submit.code.source_tree import (
    LeftOut,
    SourceTree,
    below,
    pattern_tree,
    printable,
    repository_tree,
)

MAX_BYTES = 500_000_000
MAX_FILES = 50_000
MAX_LISTED = 100
"""Files that were left out and are named one by one."""
NUM_COPIERS = 8
"""Files copied at a time where each takes long."""
TAKES_LONG_S = 0.001
"""A shared file system takes milliseconds for a file; on a disk of this machine threads only cost."""
NUM_TIMED = 32
"""The first files, by which that is told."""
_CHUNK = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Snapshot:
    """A copy of the code as it was at one moment."""

    source: str
    """Root of what was copied: of the git work tree, or the working directory."""
    code: str
    """The copy of it."""
    subfolder: str
    """The working directory within both; empty when it is the root."""
    kind: str
    """``git`` or ``pattern``."""
    num_files: int
    num_bytes: int
    left_out: tuple[LeftOut, ...]
    links: tuple[str, ...]
    """What is in the copy as a link to the source, which may change."""
    import_path: tuple[str, ...]
    """Folders of the copy for PYTHONPATH, so that modules come from it and not from the source."""
    notes: tuple[str, ...]
    """What a person should know, a sentence each."""

    @property
    def workdir(self) -> Path:
        """The working directory in the copy."""
        return Path(self.code, self.subfolder)

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as JSON; bytes of names that are no UTF-8 become ``\\xNN``."""
        value = asdict(self) | {"workdir": str(self.workdir)}
        value["num_left_out"] = len(self.left_out)
        for key in ("left_out", "links"):
            value[key] = value[key][:MAX_LISTED]
        return {key: _as_text(item) for key, item in value.items()}


def plan_snapshot(
    cwd: Path, run: RunDir, environ: Mapping[str, str] = os.environ, links: bool = False
) -> Snapshot:
    """The snapshot that `take_snapshot` would make now; nothing is copied.

    Raises UsageError when it would be too large.
    """
    return _plan(cwd, run, environ, links)[0]


def take_snapshot(
    cwd: Path, run: RunDir, environ: Mapping[str, str] = os.environ, links: bool = False
) -> Snapshot:
    """Copy the code around a working directory to the run's code/.

    Modes and symlinks are kept: a link within what is copied leads into the copy, any other one to where it
    led. With `links` what is ignored can be reached from the copy too, as it is when the job runs: a command
    works in the copy and may expect its data there. The copy is complete or not there.
    Raises UsageError when it is too large, a file cannot be read, or the run folder cannot be written.
    """
    snapshot, tree = _plan(cwd, run, environ, links)
    if run.code_dir.exists():
        raise UsageError(f"{run.code_dir} exists already", hint="every run has a code folder of its own")
    try:
        stage = tempfile.mkdtemp(prefix=".code.", dir=run.path)
        try:
            _copy_all(tree, stage)
            make_links(tree, snapshot.links, stage)
            Path(stage, snapshot.subfolder).mkdir(parents=True, exist_ok=True)
            Path(stage).rename(run.code_dir)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
    except OSError as error:
        raise _in_words(error, run) from error
    return snapshot


def _plan(cwd: Path, run: RunDir, environ: Mapping[str, str], links: bool) -> tuple[Snapshot, SourceTree]:
    folder, run_dir = os.path.realpath(cwd), os.path.realpath(run.path)
    tree = _find_tree(folder, run_dir)
    num_bytes = sum(found.st_size for found in tree.files.values() if not S_ISLNK(found.st_mode))
    _refuse_too_large(tree, num_bytes)
    subfolder = below(tree.root, folder)
    inherited = environ.get("PYTHONPATH")
    import_path, notes = find_import_path(tree.root, tree.files, str(run.code_dir), subfolder, inherited)
    linked = find_links(tree, folder, run_dir) if links else ()
    snapshot = Snapshot(
        source=tree.root,
        code=str(run.code_dir),
        subfolder=subfolder,
        kind=tree.kind,
        num_files=len(tree.files),
        num_bytes=num_bytes,
        left_out=tuple(tree.left_out),
        import_path=import_path,
        links=linked,
        notes=(*_left_out_notes(tree.left_out), *links_notes(linked), *notes),
    )
    return snapshot, tree


def _find_tree(cwd: str, run_dir: str) -> SourceTree:
    """What git knows; what looks like sources where there is no git, or where it ignores the whole folder."""
    known = repository_tree(cwd, run_dir)
    if known is None:
        return pattern_tree(cwd, run_dir)
    prefix = below(known.root, cwd) + "/"
    if prefix == "/" or any(path.startswith(prefix) for path in known.files):
        return known
    ignored = pattern_tree(cwd, run_dir)
    return ignored if ignored.files else known


def _refuse_too_large(tree: SourceTree, num_bytes: int) -> None:
    if num_bytes <= MAX_BYTES and len(tree.files) <= MAX_FILES:
        return
    largest = sorted(tree.files, key=lambda path: tree.files[path].st_size, reverse=True)[:5]
    named = ", ".join(f"{printable(path)} ({_size(tree.files[path].st_size)})" for path in largest)
    raise UsageError(
        f"the code in {tree.root} is {len(tree.files):,} files of together {_size(num_bytes)}; a run takes"
        f" {MAX_FILES:,} files and {_size(MAX_BYTES)} at most; the largest: {named}",
        hint="put data into .gitignore or elsewhere, or train from the files as they are with --no-snapshot",
    )


def _copy_all(tree: SourceTree, target: str) -> None:
    folders = {parent for path in tree.files for parent in _parents(path)}
    for folder in sorted(folders):  # so a folder comes before what is in it
        Path(target, folder).mkdir(mode=0o700)
    plain = []
    for path, found in tree.files.items():
        if S_ISLNK(found.st_mode):
            Path(target, path).symlink_to(_link_target(tree, folders, path))
        else:
            plain.append(path)
    first, rest = plain[:NUM_TIMED], plain[NUM_TIMED:]
    began_s = time.monotonic()
    _copy_files(tree.root, target, first)
    if time.monotonic() - began_s < TAKES_LONG_S * len(first):
        _copy_files(tree.root, target, rest)
        return
    from concurrent.futures import ThreadPoolExecutor

    shares = [rest[index::NUM_COPIERS] for index in range(NUM_COPIERS)]
    with ThreadPoolExecutor(NUM_COPIERS) as copiers:
        for _ in copiers.map(lambda share: _copy_files(tree.root, target, share), shares):
            pass


def _parents(path: str) -> Iterator[str]:
    folder = path.rpartition("/")[0]
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def _copy_files(root: str, target: str, paths: Iterable[str]) -> None:
    for path in paths:
        _copy_file(f"{root}/{path}", f"{target}/{path}")


def _copy_file(source: str, target: str) -> None:
    """A copy with the mode of the file; its own bytes, since an editor may write into the source in place."""
    try:
        # Not through a link that has just taken the place of the file, and not waiting for a pipe.
        reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # deleted a moment ago
    try:
        found = os.fstat(reading)
        share = min(found.st_size + 1, _CHUNK)
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while data := os.read(reading, share):
                while data:
                    data = data[os.write(writing, data) :]
            os.fchmod(writing, S_IMODE(found.st_mode) & 0o777 | 0o600)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _link_target(tree: SourceTree, folders: set[str], path: str) -> str:
    """What the copy of a symlink has to say to lead into the copy, or else to where the source leads."""
    text = str(Path(tree.root, path).readlink())
    parent = path.rpartition("/")[0]
    whole = os.path.normpath(text if text.startswith("/") else f"{tree.root}/{parent}/{text}")
    inside = below(tree.root, whole)
    if whole != tree.root and inside not in tree.files and inside not in folders:
        return whole
    return os.path.relpath(inside or ".", parent or ".") if text.startswith("/") else text


def _left_out_notes(left_out: Iterable[LeftOut]) -> Iterator[str]:
    """One sentence for every reason, with the first few names."""
    by_reason: dict[str, list[str]] = {}
    for item in left_out:
        by_reason.setdefault(item.reason, []).append(printable(item.path))
    for reason, names in by_reason.items():
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        yield f"not in the copy of the code: {', '.join(names[:3])}{more} ({reason})"


def _in_words(error: OSError, run: RunDir) -> UsageError:
    if error.errno in _NO_SPACE:
        return UsageError(
            f"there is no space for the code in {run.path}: {error.strerror}",
            hint="free some space or quota, or train from the files as they are with --no-snapshot",
        )
    name = printable(os.fsdecode(error.filename)) if error.filename else str(run.path)
    return UsageError(
        f"cannot copy the code: {name}: {error.strerror or error}",
        hint="make it readable or put it into .gitignore, or use --no-snapshot",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, (list, tuple)):
        return [_as_text(item) for item in value]
    return {key: _as_text(item) for key, item in value.items()} if isinstance(value, dict) else value
