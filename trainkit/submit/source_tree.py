"""The files of a project: those that are code, and those that a copy of the code links to."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from shlex import quote
from stat import S_ISDIR, S_ISLNK, S_ISREG

from trainkit.errors import UsageError
from trainkit.run.rundir import RUNS_FOLDER


def _matcher(*patterns: str) -> re.Pattern[str]:
    """A regular expression for file names that match any of the patterns, such as ``*.py``."""
    return re.compile("|".join(map(translate, patterns)))


_SOURCE = _matcher(
    *("*.py", "*.pyi", "*.pyx", "*.pxd", "*.ipynb", "*.c", "*.cc", "*.cpp", "*.cu", "*.cuh", "*.h", "*.hpp"),
    *("*.so", "*.yaml", "*.yml", "*.json", "*.toml", "*.cfg", "*.ini", "*.conf", "*.txt", "*.md", "*.rst"),
    *("*.sh", "*.bash", "*.sbatch", "*.slurm", "*.j2", "*.jinja", "*.def", "*.typed"),
    *("Makefile", "Dockerfile*", "LICENSE*", "MANIFEST.in", "Snakefile"),
)
_SECRET = _matcher(
    *(".env", ".env.*", "*.env", ".netrc", "_netrc", ".pypirc", ".git-credentials", ".htpasswd"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    "kaggle.json",
)
_HARMLESS = re.compile(r"\.pub$|example|sample|template|\.dist$", re.IGNORECASE)


_OUTPUT_FOLDERS = frozenset(
    {
        *(
            "out",
            "output",
            "outputs",
            "results",
            "runs",
            "saves",
            "checkpoint",
            "checkpoints",
            "ckpt",
            "ckpts",
        ),
        *("log", "logs", "tensorboard", "tb_logs", "lightning_logs", "wandb", "mlruns"),
    }
)
_OUTPUT = _matcher("*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.distcp", "events.out.tfevents.*")


IS_OUTPUT = "looks like an output; a run that reads it needs its absolute path"


def looks_like_output(path: str) -> bool:
    """Whether training usually writes this path: with a link to it, one run would read another's weights."""
    *folders, name = path.split("/")
    if looks_like_source(name):
        return False  # new code in a package named `logs`
    return _OUTPUT.match(name) is not None or not _OUTPUT_FOLDERS.isdisjoint(map(str.lower, (*folders, name)))


def looks_like_source(name: str) -> bool:
    """Whether a file with this name is usually code."""
    return _SOURCE.match(name) is not None


def looks_secret(name: str) -> bool:
    """Whether a file with this name usually contains a key or a password."""
    return _SECRET.match(name) is not None and not _HARMLESS.search(name)


GIT_LIMIT_S = 60.0
_GIT_LOCATIONS = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_PREFIX",
    "GIT_NAMESPACE",
)


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that was left out of a snapshot, and why."""

    path: str
    reason: str


@dataclass
class SourceTree:
    """The files of a project by their paths below its root; names keep bytes that are not UTF-8."""

    root: str
    kind: str
    """``git`` or ``pattern``."""
    files: dict[str, os.stat_result] = field(default_factory=dict)
    """Files and symlinks."""
    left_out: list[LeftOut] = field(default_factory=list)
    repositories: list[str] = field(default_factory=list)
    """Prefixes of the repositories, nested ones included; ``""`` is the root."""

    def add(self, path: str, found: os.stat_result) -> None:
        """Add a regular file or a symlink; anything else is left out."""
        if S_ISREG(found.st_mode) or S_ISLNK(found.st_mode):
            self.files[path] = found
        else:
            self.left_out.append(LeftOut(path, "is not a regular file"))


def repository_tree(cwd: str, run_dir: str) -> SourceTree | None:
    """The code of the git work tree that contains a folder; None without a work tree or git.

    This is every file that is tracked, or neither tracked nor ignored, including submodules and nested
    clones. Untracked files that look like keys or passwords are left out; tracked ones are in the repository
    anyway, and the code may need them. Run folders are left out. Both paths are real paths. Raises UsageError
    when git fails.
    """
    root = _work_tree(cwd)
    if root is None:
        return None
    tree = SourceTree(root, "git")
    _add_repository(tree, "", below(root, run_dir), below(root, f"{cwd}/{RUNS_FOLDER}"))
    return tree


def below(root: str, path: str) -> str:
    """A path relative to `root`; empty when it is not below it."""
    prefix = root.rstrip("/") + "/"
    return path.removeprefix(prefix) if path.startswith(prefix) else ""


def printable(path: str) -> str:
    r"""A path as text: bytes that are not UTF-8 become ``\xNN``."""
    return os.fsencode(path).decode(errors="backslashreplace")


def is_run(folder: str) -> bool:
    """Whether a folder is that of a run or of a group of runs, whose files are not code."""
    is_group = Path(folder, "sweep.json").is_file() and Path(folder, "logs").is_dir()
    return is_group or (Path(folder, "job.json").is_file() and Path(folder, "attempts").is_dir())


def _work_tree(folder: str) -> str | None:
    """The root of the git work tree that contains a folder; None without a work tree or git."""
    if not any((parent / ".git").exists() for parent in (Path(folder), *Path(folder).parents)):
        return None
    try:
        done = _git(folder, "rev-parse", "--show-toplevel")
    except FileNotFoundError:
        return None
    stderr = os.fsdecode(done.stderr)
    if done.returncode == 0:
        return os.fsdecode(done.stdout.removesuffix(b"\n")) or None
    if "not a git repository" in stderr or "must be run in a work tree" in stderr:
        return None
    raise _git_error(folder, stderr)


def _git(folder: str, *args: str) -> subprocess.CompletedProcess[bytes]:
    environ = {name: value for name, value in os.environ.items() if name not in _GIT_LOCATIONS}
    try:
        return subprocess.run(
            ["git", "-C", folder, *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**environ, "LC_ALL": "C"},
            timeout=GIT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"git took more than {GIT_LIMIT_S:g} s to list the files of {folder}",
            hint="add folders with many files to .gitignore, or use --no-snapshot",
        ) from None


def _git_error(folder: str, stderr: str) -> UsageError:
    reason = next((line for line in stderr.splitlines() if line.startswith("fatal:")), stderr.strip())
    return UsageError(
        f"cannot list the code of {folder}: git failed: {reason.removeprefix('fatal: ')}",
        hint=f"`git -C {quote(folder)} status` must work; --no-snapshot uses the files in place",
    )


def _names(folder: str, *args: str) -> list[str]:
    done = _git(folder, "ls-files", "-z", *args)
    if done.returncode != 0:
        raise _git_error(folder, os.fsdecode(done.stderr))
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def ignored_names(root: str) -> list[str]:
    """The paths that git ignores in a work tree; a completely ignored folder is one path."""
    names = _names(root, "--others", "--ignored", "--exclude-standard", "--directory")
    return [name.rstrip("/") for name in names]


def _add_repository(tree: SourceTree, prefix: str, run_dir: str, runs_dir: str) -> None:
    """Add the files of a repository and of nested ones; files tracked in `runs_dir` are code too."""
    folder = f"{tree.root}/{prefix}"
    tree.repositories.append(prefix)
    patterns = [
        f"--exclude=/{_as_pattern(path[len(prefix) :])}"
        for path in (run_dir, runs_dir)
        if path and path.startswith(prefix)
    ]
    tracked = _names(folder, "--cached")
    untracked = _names(folder, "--others", "--exclude-standard", *patterns)
    runs: dict[str, bool] = {}
    for is_tracked, names in ((True, tracked), (False, untracked)):
        for name in names:
            path = prefix + name.rstrip("/")
            if path in tree.files or _is_in(path, run_dir):
                continue
            try:
                found = os.lstat(f"{tree.root}/{path}")
            except (FileNotFoundError, NotADirectoryError):
                continue  # deleted, but still in the index
            if S_ISDIR(found.st_mode):
                if Path(tree.root, path, ".git").exists():
                    _add_repository(tree, f"{path}/", run_dir, runs_dir)
            elif is_tracked:
                tree.add(path, found)
            elif looks_secret(path.rpartition("/")[2]):
                tree.left_out.append(LeftOut(path, "looks like a secret"))
            elif looks_like_output(path):
                tree.left_out.append(LeftOut(path, IS_OUTPUT))
            elif not _is_in_run(tree.root, path, runs):
                tree.add(path, found)


def _as_pattern(path: str) -> str:
    """A path as a literal .gitignore pattern."""
    return re.sub(r"([*?\[\]\\ ])", r"\\\1", path)


def _is_in(path: str, folder: str) -> bool:
    return folder != "" and (path == folder or path.startswith(f"{folder}/"))


def _is_in_run(root: str, path: str, known: dict[str, bool]) -> bool:
    """Whether a file is in a run folder; `known` caches the answer for folders."""
    parent = path.rpartition("/")[0]
    if not parent:
        return False
    if parent not in known:
        known[parent] = is_run(f"{root}/{parent}") or _is_in_run(root, parent, known)
    return known[parent]


MAX_SEARCHED = 200_000
"""The maximum number of files searched: a larger folder is not a project."""
MAX_FILE_BYTES = 50_000_000
"""Larger files count as data."""
NOT_SOURCES = frozenset(
    {"__pycache__", "node_modules", "runs", "checkpoints", "wandb", "mlruns", "lightning_logs"}
)
"""Folders that the search by pattern skips, besides hidden folders and environments."""


def pattern_tree(cwd: str, run_dir: str) -> SourceTree:
    """The code below a folder: files named like sources, and all symlinks.

    Hidden folders, environments, runs and caches are skipped; files that look like keys or passwords, and
    very large files, are left out. Both paths are real paths.
    Raises UsageError when the folder is too large to be a project.
    """
    tree = SourceTree(cwd, "pattern")
    for num_before, entry in enumerate(_entries(tree, run_dir)):
        if num_before >= MAX_SEARCHED:
            raise UsageError(
                f"{cwd} has more than {MAX_SEARCHED:,} files, too many for a project",
                hint="submit from the folder of your project, or use --no-snapshot",
            )
        path = below(cwd, entry.path)
        if looks_secret(entry.name):
            tree.left_out.append(LeftOut(path, "looks like a secret"))
            continue
        if entry.name.startswith(".") or not (entry.is_symlink() or looks_like_source(entry.name)):
            continue
        found = entry.stat(follow_symlinks=False)
        if found.st_size > MAX_FILE_BYTES:
            tree.left_out.append(LeftOut(path, f"is larger than {MAX_FILE_BYTES / 1e6:.0f} MB"))
        else:
            tree.add(path, found)
    return tree


def _entries(tree: SourceTree, run_dir: str) -> Iterator[os.DirEntry[str]]:
    """All files below the root, except those in folders without sources."""
    waiting = [tree.root]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue  # deleted since it was listed
        except PermissionError:
            tree.left_out.append(LeftOut(below(tree.root, folder), "cannot be read"))
            continue
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield entry
            elif entry.path != run_dir and not _has_no_sources(entry):
                waiting.append(entry.path)


def _has_no_sources(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith(".") or entry.name in NOT_SOURCES:
        return True
    folder = Path(entry.path)
    try:
        is_environment = (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").is_dir()
        return is_environment or is_run(entry.path)
    except PermissionError:
        return False  # reported as left out when it is opened


MAX_LINKS = 10_000
_NEVER_LINKED = frozenset({"__pycache__", ".git"})


def find_links(tree: SourceTree, cwd: str, run_dir: str) -> tuple[str, ...]:
    """The files and folders that a copy of the code links to, by their paths below the root.

    Keys, passwords, run folders, outputs and Python caches are not linked; outputs are added to
    `tree.left_out`. Raises UsageError when there are more than `MAX_LINKS`.
    """
    uncopied = _ignored(tree) if tree.kind == "git" else _uncopied(tree)
    places = (run_dir, f"{cwd}/{RUNS_FOLDER}", cwd)
    reserved = [place for place in (below(tree.root, place) for place in places) if place]
    left_out = {item.path for item in tree.left_out}
    copied = {parent for path in tree.files for parent in _parents(path)}
    runs: dict[str, bool] = {}
    seen: set[str] = set()
    found: list[str] = []
    for path in sorted(uncopied):
        # git lists an ignored folder and also the files in it whose names are ignored.
        if path in left_out or path in copied or not seen.isdisjoint(_parents(path)):
            continue
        seen.add(path)
        if not _is_linked(tree.root, path) or _is_in_run(tree.root, path, runs):
            continue
        if any(f"{place}/".startswith(f"{path}/") for place in reserved):
            continue
        if looks_like_output(path):
            tree.left_out.append(LeftOut(path, IS_OUTPUT))
        else:
            found.append(path)
    if len(found) > MAX_LINKS:
        raise UsageError(
            f"{tree.root} has {len(found):,} files besides its code; at most {MAX_LINKS:,} can be linked "
            "into the copy of the code",
            hint="move them to a separate folder, or use --no-snapshot",
        )
    return tuple(found)


def _is_linked(root: str, path: str) -> bool:
    name = path.rpartition("/")[2]
    if name in _NEVER_LINKED or name.endswith(".pyc") or looks_secret(name):
        return False
    folder = f"{root}/{path}"
    return not is_run(folder) and not _has_runs(folder)


def _has_runs(folder: str) -> bool:
    """Whether a folder contains run folders."""
    try:
        with os.scandir(folder) as entries:
            return any(is_run(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return False  # a file, or a folder that cannot be read


def _ignored(tree: SourceTree) -> Iterator[str]:
    """The paths that git ignores in the repositories of a tree."""
    for prefix in tree.repositories:
        for name in ignored_names(f"{tree.root}/{prefix}"):
            yield prefix + name


def _uncopied(tree: SourceTree) -> Iterator[str]:
    """The entries, in the folders of copied files, that were not copied; for a tree without git."""
    folders = {""} | {parent for path in tree.files for parent in _parents(path)}
    for folder in folders:
        prefix = f"{folder}/" if folder else ""
        for entry in os.scandir(f"{tree.root}/{folder}"):
            path = f"{prefix}{entry.name}"
            if path not in tree.files and path not in folders:
                yield path


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path
