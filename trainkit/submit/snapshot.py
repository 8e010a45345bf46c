"""Copies the code of a run into its folder, so that edits after submit do not change the run."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE, S_ISLNK

from trainkit.config import RunConfig
from trainkit.errors import UsageError
from trainkit.folders import ensure_folder
from trainkit.plan.launch import LaunchPlan
from trainkit.run.record import CodeCopy, changed_job, read_job
from trainkit.run.rundir import RunDir
from trainkit.submit.source_tree import (
    LeftOut,
    SourceTree,
    below,
    find_links,
    pattern_tree,
    printable,
    repository_tree,
)

MAX_BYTES = 500_000_000
MAX_FILES = 50_000
MAX_LISTED = 100
"""Maximum number of skipped files, and of links, that job.json lists."""
NUM_THREADS = 8
"""On a shared file system each file takes milliseconds."""
_CHUNK = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Snapshot:
    """What a `CodeCopy` describes, completely and with names as they are, also those that are not UTF-8."""

    source: str
    code: str
    subfolder: str
    kind: str
    num_files: int
    num_bytes: int
    left_out: tuple[LeftOut, ...]
    links: tuple[str, ...]
    import_path: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def workdir(self) -> Path:
        """The working directory in the copy."""
        return Path(self.code, self.subfolder)


def wants_copy(config: RunConfig, plan: LaunchPlan) -> bool:
    """Whether a run gets a copy: a job that waits in a queue must not see later edits.

    A command also runs in a copy on this machine, so that what it writes is in the same place everywhere.
    """
    return config.launch.snapshot and (plan.slurm is not None or plan.workload.is_command)


def planned_code(run: RunDir, config: RunConfig, plan: LaunchPlan, cwd: Path) -> CodeCopy | None:
    """The description that `copy_code` would return now; writes nothing."""
    if not wants_copy(config, plan):
        return None
    return _describe(plan_snapshot(cwd, run, links=plan.workload.is_command), plan)


def copy_code(run: RunDir, plan: LaunchPlan, cwd: Path) -> CodeCopy:
    """Copy the code around `cwd` into the run; returns the description for job.json.

    Raises UsageError when the code is too large or cannot be read, or the disk is full.
    """
    return _describe(take_snapshot(cwd, run, links=plan.workload.is_command), plan)


@contextmanager
def renewed_code(run: RunDir, config: RunConfig, plan: LaunchPlan) -> Iterator[None]:
    """Replace the run's copy of the code with the current code, and keep the old copy as ``code.001`` etc.

    Call with the run's lock held. The old copy is restored if the block starts no attempt. Raises UsageError
    like `copy_code`.
    """
    before, attempts = read_job(run), run.attempt_numbers()
    candidates = (run.path / f"code.{number:03d}" for number in range(1, 1000))
    kept = next(folder for folder in candidates if not folder.exists())
    had_one = run.code_dir.exists()
    if had_one:
        run.code_dir.rename(kept)
    try:
        code = copy_code(run, plan, Path(before.cwd or Path.cwd())) if wants_copy(config, plan) else None
    except BaseException:
        if had_one:
            kept.rename(run.code_dir)
        raise
    try:
        with changed_job(run) as job:
            job.code = code
        yield
    except BaseException:
        if run.attempt_numbers() == attempts:
            shutil.rmtree(run.code_dir, ignore_errors=True)
            if had_one:
                kept.rename(run.code_dir)
            with suppress(OSError), changed_job(run) as job:  # what cannot be changed was not
                job.code = before.code
        raise


def _describe(snapshot: Snapshot, plan: LaunchPlan) -> CodeCopy:
    r"""The copy as job.json describes it; bytes of names that are not UTF-8 become ``\xNN``."""
    _refuse_outside(plan.command or (), snapshot)
    source = printable(snapshot.source)
    notes = [*map(printable, snapshot.notes), *((WORK_FOLDER_NOTE,) if plan.workload.is_command else ())]
    for word in plan.command or ():
        # Python then also imports modules next to such a script from the source.
        if Path(word).is_relative_to(source) and Path(word).is_file():
            how = f"name it relative to {source} to run the copy"
            notes.append(f"{word} is run from the source, which may change; {how}")
    left_out = [
        {"path": printable(item.path), "reason": printable(item.reason)}
        for item in snapshot.left_out[:MAX_LISTED]
    ]
    return CodeCopy(
        source=source,
        code=printable(snapshot.code),
        subfolder=printable(snapshot.subfolder),
        kind=snapshot.kind,
        num_files=snapshot.num_files,
        num_bytes=snapshot.num_bytes,
        left_out=left_out,
        links=[printable(path) for path in snapshot.links[:MAX_LISTED]],
        import_path=list(snapshot.import_path),
        notes=notes,
        workdir=str(snapshot.workdir),
        num_left_out=len(snapshot.left_out),
    )


WORK_FOLDER_NOTE = (
    "the command runs in work/ of its run folder, a copy of the code: relative outputs go there"
)


def _refuse_outside(command: Sequence[str], snapshot: Snapshot) -> None:
    """Raise UsageError for a relative path in a command that exists, but not in the copy."""
    cwd = Path(snapshot.source, snapshot.subfolder)
    for word in command:
        for part in (word, word.partition("=")[2]):
            path = os.path.normpath(cwd / part)
            is_outside = path != snapshot.source and not below(snapshot.source, path)
            if part.startswith("../") and is_outside and os.path.lexists(path):
                raise UsageError(
                    f"{part} in the command is outside of {snapshot.source}, which is copied for the run",
                    hint=f"give its absolute path, {path}, or use the files in place with --no-snapshot",
                )


def plan_snapshot(
    cwd: Path, run: RunDir, environ: Mapping[str, str] = os.environ, links: bool = False
) -> Snapshot:
    """The snapshot that `take_snapshot` would take now; copies nothing.

    Raises UsageError when it would be too large.
    """
    return _plan(cwd, run, environ, links)[0]


def take_snapshot(
    cwd: Path, run: RunDir, environ: Mapping[str, str] = os.environ, links: bool = False
) -> Snapshot:
    """Copy the code of a working directory to the run's code/, completely or not at all.

    Modes and symlinks are kept: a link to a copied file points to its copy, any other link to its old target.
    With `links`, files that are not copied are linked: a command that runs in the copy may expect its data
    there, as in ``python train.py --data data/train.jsonl``.
    Raises UsageError when the code is too large, a file cannot be read, or the run folder cannot be written.
    """
    snapshot, tree = _plan(cwd, run, environ, links)
    if run.code_dir.exists():
        raise UsageError(f"{run.code_dir} already exists", hint="every run has its own code folder")
    try:
        stage = tempfile.mkdtemp(prefix=".code.", dir=run.path)
        try:
            _copy_all(tree, stage)
            _make_links(tree, snapshot.links, stage)
            ensure_folder(Path(stage, snapshot.subfolder), parents=True)
            Path(stage).rename(run.code_dir)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
    except OSError as error:
        raise _copy_error(error, run) from error
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
        notes=(*_left_out_notes(tree.left_out), *_links_notes(linked), *notes),
    )
    return snapshot, tree


def _find_tree(cwd: str, run_dir: str) -> SourceTree:
    """The files that git lists; without git or in an ignored folder, those that look like sources."""
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
        f"the code in {tree.root} has {len(tree.files):,} files, {_size(num_bytes)} in total; the limit is"
        f" {MAX_FILES:,} files and {_size(MAX_BYTES)}; the largest: {named}",
        hint="add data to .gitignore or move it, or use the files in place with --no-snapshot",
    )


def _copy_all(tree: SourceTree, target: str) -> None:
    folders = {parent for path in tree.files for parent in _parents(path)}
    for folder in sorted(folders):  # parents first
        Path(target, folder).mkdir(mode=0o700)
    plain = []
    for path, found in tree.files.items():
        if S_ISLNK(found.st_mode):
            Path(target, path).symlink_to(_link_target(tree, folders, path))
        else:
            plain.append(path)
    shares = [plain[index::NUM_THREADS] for index in range(NUM_THREADS)]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(lambda share: _copy_files(tree.root, target, share), shares))


def _parents(path: str) -> Iterator[str]:
    folder = path.rpartition("/")[0]
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def _copy_files(root: str, target: str, paths: Iterable[str]) -> None:
    for path in paths:
        _copy_file(f"{root}/{path}", f"{target}/{path}")


def _copy_file(source: str, target: str) -> None:
    """Copy bytes and mode; no hard link, since an editor may write to the source in place."""
    try:
        # The file may just have been replaced: do not follow a link, do not block on a pipe.
        reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # deleted since it was listed
    try:
        found = os.fstat(reading)
        block_size = min(found.st_size + 1, _CHUNK)
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while data := os.read(reading, block_size):
                while data:
                    data = data[os.write(writing, data) :]
            # Read-only: a sweep's points share it, and outputs belong into the run's working folder.
            os.fchmod(writing, S_IMODE(found.st_mode) & 0o555 | 0o400)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _link_target(tree: SourceTree, folders: set[str], path: str) -> str:
    """The target for the copy of a symlink: inside the copy if possible, else the old target."""
    text = str(Path(tree.root, path).readlink())
    parent = path.rpartition("/")[0]
    target = os.path.normpath(text if text.startswith("/") else f"{tree.root}/{parent}/{text}")
    inside = below(tree.root, target)
    if target != tree.root and inside not in tree.files and inside not in folders:
        return target
    return os.path.relpath(inside or ".", parent or ".") if text.startswith("/") else text


def _left_out_notes(left_out: Iterable[LeftOut]) -> Iterator[str]:
    """One sentence per reason, with the first few names."""
    by_reason: dict[str, list[str]] = {}
    for item in left_out:
        by_reason.setdefault(item.reason, []).append(printable(item.path))
    for reason, names in by_reason.items():
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        yield f"not in the copy of the code: {', '.join(names[:3])}{more} ({reason})"


def _copy_error(error: OSError, run: RunDir) -> UsageError:
    if error.errno in _NO_SPACE:
        return UsageError(
            f"cannot copy the code to {run.path}: {error.strerror}",
            hint="free disk space or quota, or use the files in place with --no-snapshot",
        )
    name = printable(os.fsdecode(error.filename)) if error.filename else str(run.path)
    return UsageError(
        f"cannot copy the code: {name}: {error.strerror or error}",
        hint="make it readable or add it to .gitignore, or use --no-snapshot",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _make_links(tree: SourceTree, paths: Iterable[str], target: str) -> None:
    """Create the links of a copy, each to the absolute path of the source."""
    for path in paths:
        link = Path(target, path)
        ensure_folder(link.parent, 0o700, parents=True)
        link.symlink_to(Path(tree.root, path))


def _links_notes(paths: Sequence[str]) -> Iterator[str]:
    """One sentence about the links, if there are any."""
    if paths:
        named = ", ".join(printable(path) for path in paths[:3])
        more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
        yield f"linked into the copy of the code, not copied: {named}{more}"


_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


def find_import_path(
    source: str, files: Iterable[str], code: str, subfolder: str, inherited: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(folders of the copy for PYTHONPATH, notes about folders that cannot be on it).

    `files` are the paths below `source` that are copied to `code`.

    A project installed with ``pip install -e`` would be imported from the source, which can change after
    submission, but PYTHONPATH takes precedence. The folders are the working directory, the package folder of
    each project around it, and the copies of the folders of `inherited` (PYTHONPATH) below the source.
    """
    taken: list[str] = []
    notes: list[str] = []
    tree = _Listing(files, subfolder)
    for inside in dict.fromkeys(_candidates(source, tree, subfolder, inherited or "")):
        if inside not in tree.folders:
            continue
        folder = str(Path(code, inside))
        shadowing = tree.shadowing(inside)
        if shadowing is not None:
            notes.append(
                f"{folder} is not on PYTHONPATH: its {shadowing} would shadow the standard library's; "
                "rename it"
            )
        elif os.pathsep in folder:
            notes.append(f"{folder} is not on PYTHONPATH, which cannot contain a folder with a colon")
        else:
            taken.append(folder)
    return tuple(taken), tuple(notes)


class _Listing:
    """Files and folders by their paths below a root; the path of the root is empty."""

    def __init__(self, files: Iterable[str], subfolder: str) -> None:
        self.files = set(files)
        self.folders = {"", subfolder}
        for path in self.files:
            while (path := path.rpartition("/")[0]) and path not in self.folders:
                self.folders.add(path)

    def shadowing(self, folder: str) -> str | None:
        """A module in this folder with the name of a standard library module; None if there is none."""
        prefix = f"{folder}/" if folder else ""
        for path in sorted(path for path in self.files if path.startswith(prefix)):
            name, _, rest = path.removeprefix(prefix).partition("/")
            is_module = rest == "__init__.py" or (not rest and name.endswith(".py"))
            if is_module and name.removesuffix(".py") in sys.stdlib_module_names:
                return name
        return None


def _candidates(source: str, tree: _Listing, subfolder: str, inherited: str) -> Iterator[str]:
    yield subfolder
    folder = subfolder
    while True:
        prefix = f"{folder}/" if folder else ""
        if any(f"{prefix}{name}" in tree.files for name in _PROJECT_FILES):
            yield f"{prefix}src" if f"{prefix}src" in tree.folders else folder
        if not folder:
            break
        folder = folder.rpartition("/")[0]
    for entry in inherited.split(os.pathsep):
        inside = below(source, os.path.realpath(entry)) if entry.startswith("/") else ""
        if inside:
            yield inside
