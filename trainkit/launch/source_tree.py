"""Find the code files of a project, and the files to symlink into its code copy.

The folder may have been written by another user, so Git must not start any program that the repository's
config specifies. The config can specify programs for nearly all Git operations: filters for comparing files,
a file system monitor, hooks and transports. Filters in the user's own config are also disabled, because they
may read the repository's config, as git-lfs does.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache
from pathlib import Path
from shlex import quote
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any

from trainkit.errors import UsageError
from trainkit.launch.secrets import looks_secret
from trainkit.run.rundir import RUNS_FOLDER

MAX_LINKS = 10_000
MAX_SEARCHED = 200_000
"""Maximum number of files that are searched without git; a folder with more files is not considered a
project."""
MAX_FILE_BYTES = 50_000_000
"""Size in bytes above which a file is considered data instead of code; used for folders without a Git
repository."""


def _matcher(patterns: str) -> re.Pattern[str]:
    """Return a regular expression for file names that match any of the patterns, such as ``*.py``."""
    return re.compile("|".join(map(translate, patterns.split())))


_SOURCE = _matcher(
    "*.py *.pyi *.pyx *.pxd *.ipynb *.c *.cc *.cpp *.cu *.cuh *.h *.hpp *.so *.yaml *.yml *.json *.toml *.cfg"
    " *.ini *.conf *.txt *.md *.rst *.sh *.bash *.sbatch *.slurm *.j2 *.jinja *.def *.typed"
    " Makefile Dockerfile* LICENSE* MANIFEST.in Snakefile"
)
_OUTPUT = _matcher("*.pt *.pth *.ckpt *.safetensors *.distcp events.out.tfevents.*")
_OUTPUT_FOLDER = _matcher(
    "out output outputs results runs saves checkpoint checkpoints ckpt ckpts log logs tensorboard tb_logs"
    " lightning_logs wandb mlruns"
)
_WRITTEN = _matcher(
    "*.png *.jpg *.jpeg *.gif *.svg *.pdf *.html *.csv *.tsv *.log *.out *.err *.npy *.npz *.pkl *.pickle"
)
"""Matches files that scripts often write to their working directory. If a file of this kind were symlinked, a
run would overwrite the original."""
MAX_WRITTEN, MAX_WRITTEN_BYTES = 100, 1_000_000
"""Limits for copying files that match `_WRITTEN`: the number of files in a folder, and the size of a file in
bytes. Files beyond these limits are considered data and are symlinked."""
_NO_SOURCES = _matcher(".* __pycache__ node_modules runs checkpoints wandb mlruns lightning_logs")
"""Folders that `pattern_tree` skips, in addition to Python environments."""
IS_SECRET = "looks like a secret"
IS_OUTPUT = "looks like an output; to read it, a run must use its absolute path"


def looks_like_source(name: str) -> bool:
    """Return whether a file with this name usually contains code."""
    return _SOURCE.match(name) is not None


def looks_like_output(path: str) -> bool:
    """Return whether a path looks like an output of a training run.

    Outputs must not be symlinked, because a run could then read the weights of another run.
    """
    names = path.split("/")
    if looks_like_source(names[-1]):
        return False  # The file may be new code in a package that is named `logs`.
    return bool(_OUTPUT.match(names[-1])) or any(_OUTPUT_FOLDER.match(name.lower()) for name in names)


@dataclass
class SourceTree:
    """The files of a project, keyed by their path relative to the project's root.

    Paths may contain invalid UTF-8.
    """

    root: str
    kind: str
    """How the files were found: ``git`` or ``pattern``."""
    subfolder: str = ""
    """The path of the working directory relative to the root."""
    files: dict[str, os.stat_result] = field(default_factory=dict)
    """The regular files and symlinks to copy, with their `stat` results."""
    links: list[str] = field(default_factory=list)
    """Paths that are symlinked from the copy to the source instead of being copied."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """The omitted files, as (path, reason)."""
    repositories: list[str] = field(default_factory=list)
    """The path prefixes of the Git repositories in the project; the prefix is empty for the root, and
    otherwise ends with a slash."""
    apart: set[str] = field(default_factory=set)
    """The folders that must not be symlinked, because they contain keys, outputs or files of runs."""
    is_run: Callable[[str], bool] = field(default_factory=lambda: cache(_is_run))
    """A function that returns whether a folder is a run or group; files of runs are not considered code."""

    def add(self, path: str, found: os.stat_result) -> None:
        """Add a regular file or symlink; record any other kind of file as omitted."""
        if S_ISREG(found.st_mode) or S_ISLNK(found.st_mode):
            self.files[path] = found
        else:
            self.left_out.append((path, "is not a regular file"))

    def keep_apart(self, path: str, reason: str) -> None:
        """Omit a file that other runs must not use, and never symlink a parent folder as a whole."""
        self.left_out.append((path, reason))
        self.apart.update(parents(path))

    def is_in_run(self, path: str) -> bool:
        """Return whether a file is in a run folder within the project."""
        return any(self.is_run(f"{self.root}/{parent}") for parent in parents(path))

    @property
    def folders(self) -> set[str]:
        """Return the folders that contain the files; the root is the empty path."""
        return {"", *(parent for path in self.files for parent in parents(path))}


def printable(path: str) -> str:
    r"""Convert a path to printable text; invalid UTF-8 bytes become ``\xNN``."""
    return os.fsencode(path).decode(errors="backslashreplace")


def below(root: str, path: str) -> str:
    """Return a path relative to `root`; an empty string if the path is not below `root`."""
    prefix = root.rstrip("/") + "/"
    return path.removeprefix(prefix) if path.startswith(prefix) else ""


def parents(path: str) -> Iterator[str]:
    """Yield the folders that contain a file, from the innermost to the outermost, excluding the root."""
    while path := path.rpartition("/")[0]:
        yield path


def _is_run(folder: str) -> bool:
    is_group = Path(folder, "sweep.json").is_file() and Path(folder, "logs").is_dir()
    # A run that has never started has no attempts, and a run of `trainkit.loop` outside of trainkit's
    # launcher has no plan.
    is_known = Path(folder, "attempts").is_dir() or Path(folder, "plan.json").is_file()
    return is_group or (is_known and Path(folder, "job.json").is_file())


def find_tree(cwd: str, run_dir: str) -> SourceTree:
    """Return the files listed by git.

    Without git or in an ignored folder, returns the files that look like code.
    """
    known = repository_tree(cwd, run_dir)
    if known is None:
        return pattern_tree(cwd, run_dir)
    if (inside := below(known.root, cwd)) == "" or inside in known.folders:
        return known
    ignored = pattern_tree(cwd, run_dir)
    return ignored if ignored.files else known


def repository_tree(cwd: str, run_dir: str) -> SourceTree | None:
    """Return the code in the Git work tree that contains `cwd`; None if there is no work tree or no git.

    All tracked files, and all untracked files that are not ignored, are considered code, including files in
    submodules and nested clones. Run folders are omitted. Untracked files that look like keys or passwords
    are omitted. Tracked files with such names are included, because the code may need them. The paths `cwd`
    and `run_dir` must not contain symlinks. Raises UsageError if git fails.
    """
    if not any((parent / ".git").exists() for parent in (Path(cwd), *Path(cwd).parents)):
        return None
    try:
        done = run_git(cwd, "rev-parse", "--show-toplevel")
    except FileNotFoundError:
        return None
    stderr = os.fsdecode(done.stderr)
    if "not a git repository" in stderr or "must be run in a work tree" in stderr:
        return None
    if done.returncode != 0:
        raise _git_error(cwd, stderr)
    tree = SourceTree(os.fsdecode(done.stdout.removesuffix(b"\n")), "git")
    _add_repository(tree, "", below(tree.root, run_dir), below(tree.root, f"{cwd}/{RUNS_FOLDER}"))
    return tree


def _git_error(folder: str, stderr: str) -> UsageError:
    reason = next((line for line in stderr.splitlines() if line.startswith("fatal:")), stderr.strip())
    return UsageError(
        f"cannot list the code of {folder}: git failed: {reason.removeprefix('fatal: ')}",
        hint=f"`git -C {quote(folder)} status` must work; --no-snapshot uses the files in place",
    )


def _add_repository(tree: SourceTree, prefix: str, run_dir: str, runs_dir: str) -> None:
    """Add the files of a repository and its nested repositories.

    Tracked files in `runs_dir` are considered code.
    """
    folder = f"{tree.root}/{prefix}"
    tree.repositories.append(prefix)
    # Pass the run folders to git as literal .gitignore patterns, so that git does not search them.
    patterns = [
        "--exclude=/" + re.sub(r"([*?\[\]\\ ])", r"\\\1", path.removeprefix(prefix))
        for path in (run_dir, runs_dir)
        if path and path.startswith(prefix)
    ]
    for is_tracked, args in ((True, ["--cached"]), (False, ["--others", "--exclude-standard", *patterns])):
        done = run_git(folder, "ls-files", "-z", *args)
        if done.returncode != 0:
            raise _git_error(folder, os.fsdecode(done.stderr))
        for name in map(os.fsdecode, filter(None, done.stdout.split(b"\0"))):
            path = prefix + name.rstrip("/")
            if path in tree.files or _is_in(path, run_dir):
                continue
            try:
                found = os.lstat(f"{tree.root}/{path}")
            except (FileNotFoundError, NotADirectoryError):
                continue  # The file was deleted but is still in the Git index.
            if S_ISDIR(found.st_mode):
                if tree.is_in_run(path):
                    tree.apart.update(parents(path))  # The repository is the code copy of an earlier run.
                elif Path(tree.root, path, ".git").exists():
                    _add_repository(tree, f"{path}/", run_dir, runs_dir)
            elif is_tracked:
                tree.add(path, found)
            elif looks_secret(path.rpartition("/")[2]):
                tree.keep_apart(path, IS_SECRET)
            elif looks_like_output(path):
                tree.keep_apart(path, IS_OUTPUT)
            elif tree.is_in_run(path):
                tree.apart.update(parents(path))
            else:
                tree.add(path, found)


def _is_in(path: str, folder: str) -> bool:
    return folder != "" and f"{path}/".startswith(f"{folder}/")


def pattern_tree(cwd: str, run_dir: str) -> SourceTree:
    """Return the code below a folder: files that have names of source files, and all symlinks.

    Hidden folders, Python environments, runs and caches are skipped. Files that look like keys or passwords,
    and very large files, are omitted. The paths `cwd` and `run_dir` must not contain symlinks. Raises
    UsageError if the folder contains too many files to be a project.
    """
    tree, waiting, num_searched = SourceTree(cwd, "pattern"), [cwd], 0
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue  # The folder has been deleted since it was listed.
        except PermissionError:
            tree.left_out.append((below(cwd, folder), "cannot be read"))
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting += [entry.path] if _has_sources(tree, entry, run_dir) else []
                continue
            num_searched += 1
            if num_searched > MAX_SEARCHED:
                raise UsageError(
                    f"{cwd} has more than {MAX_SEARCHED:,} files, too many for a project",
                    hint="submit from the folder of your project, or use --no-snapshot",
                )
            path = below(cwd, entry.path)
            if looks_secret(entry.name):
                tree.keep_apart(path, IS_SECRET)
            elif not entry.name.startswith(".") and (entry.is_symlink() or looks_like_source(entry.name)):
                found = entry.stat(follow_symlinks=False)
                if found.st_size > MAX_FILE_BYTES:
                    tree.left_out.append((path, f"is larger than {MAX_FILE_BYTES / 1e6:.0f} MB"))
                else:
                    tree.add(path, found)
    return tree


def _has_sources(tree: SourceTree, entry: os.DirEntry[str], run_dir: str) -> bool:
    folder = Path(entry.path)
    if _NO_SOURCES.match(entry.name) or entry.path == run_dir:
        return False
    try:
        is_environment = (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").is_dir()
        return not is_environment and not tree.is_run(entry.path)
    except PermissionError:
        return True  # Opening the folder will fail, and the folder is then recorded as omitted.


def add_links(tree: SourceTree, cwd: str, run_dir: str) -> None:
    """Add symlinks for files and folders that are next to copied files but are not copied themselves.

    Keys, passwords, run folders, outputs and Python caches are not symlinked. Outputs are added to
    `tree.left_out`. Small files that a script may overwrite are added to `tree.files`, and so are copied
    instead of symlinked. Raises UsageError if more than `MAX_LINKS` symlinks are required.
    """
    folders, known = tree.folders, {path for path, _ in tree.left_out} | tree.files.keys()
    runs = [below(tree.root, place) for place in (run_dir, f"{cwd}/{RUNS_FOLDER}")]
    # If an output folder were symlinked, a run could read and replace the outputs of another run.
    known |= folders | tree.apart | {place for run in runs for place in (run, *parents(run))}
    entries = (below(tree.root, str(entry)) for name in folders for entry in Path(tree.root, name).iterdir())
    small: dict[str, dict[str, os.stat_result]] = {}
    for path in sorted(path for path in entries if path not in known):
        if not _may_be_linked(tree, path) or any(_is_in(path, place) for place in runs):
            continue
        if looks_like_output(path):
            tree.left_out.append((path, IS_OUTPUT))
        elif (written := _small_output(tree, path)) is not None:
            small.setdefault(path.rpartition("/")[0], {})[path] = written
        else:
            tree.links.append(path)
    for own in small.values():
        if len(own) > MAX_WRITTEN:
            tree.links += own
        else:
            tree.files |= own
    tree.links.sort()
    if len(tree.links) > MAX_LINKS:
        raise UsageError(
            f"{tree.root} has {len(tree.links):,} files besides its code; at most {MAX_LINKS:,} can be "
            "symlinked into the copy of the code",
            hint="move them to a separate folder, or use --no-snapshot",
        )


def _small_output(tree: SourceTree, path: str) -> os.stat_result | None:
    """Return the `stat` of a small file that scripts are likely to overwrite; None for any other file."""
    if not _WRITTEN.match(path.rpartition("/")[2].lower()):
        return None
    found = os.lstat(f"{tree.root}/{path}")
    return found if S_ISREG(found.st_mode) and found.st_size <= MAX_WRITTEN_BYTES else None


def _may_be_linked(tree: SourceTree, path: str) -> bool:
    name, folder = path.rpartition("/")[2], f"{tree.root}/{path}"
    if name in ("__pycache__", ".git") or name.endswith(".pyc") or looks_secret(name):
        return False
    if tree.is_in_run(f"{path}/"):
        return False
    if tree.kind == "git" and Path(folder).is_dir() and not any(files for *_, files in os.walk(folder)):
        # Do not symlink an empty folder, because it is probably meant for outputs, which belong to the run.
        # An empty folder that git ignores is symlinked, because it is usually meant for data.
        return run_git(tree.root, "check-ignore", "--quiet", path).returncode == 0
    try:
        with os.scandir(folder) as entries:
            return not any(
                tree.is_run(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return True  # The path is a file, or a folder that is not readable.


GIT_LIMIT_S = 60.0
_GIT_KEPT = re.compile(r"GIT_(?:EXEC_PATH|CEILING_DIRECTORIES|DISCOVERY_ACROSS_FILESYSTEM|CONFIG_\w+)")
"""Matches the environment variables that are passed to Git: its installation path, its search limits and its
config."""
_GIT_OWN = {
    "LC_ALL": "C",
    # Without this setting, Git would fetch missing objects of a partial clone with a program that the
    # repository specifies.
    "GIT_ALLOW_PROTOCOL": "",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
_GIT_OPTIONS = (
    "--no-pager",
    "--no-optional-locks",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
)
_COMPARING = {
    "diff": ("--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty"),
    "status": ("--ignore-submodules=dirty",),
}
"""Maps Git commands that read the work tree, and would therefore start filters, to the options that disable
filters.

For a submodule with changed files, Git would start another process that runs the filters in the submodule's
config.
"""


def run_git(
    folder: str, *args: str, timeout_s: float = GIT_LIMIT_S, content: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder, ignoring most GIT_* environment variables; raise UsageError after `timeout_s`.

    `content` is passed to git as standard input. ``diff`` and ``status`` compare the files as they are on
    disk, without applying filters. Also raises UsageError if the name of a filter cannot be passed in git's
    options.
    """
    own = _without_filters(folder, timeout_s) if args[0] in _COMPARING else []
    return _call_git(folder, [*own, args[0], *_COMPARING.get(args[0], ()), *args[1:]], timeout_s, content)


def _call_git(
    folder: str, args: list[str], timeout_s: float, content: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or _GIT_KEPT.fullmatch(name)
    }
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if content is None else {"input": content}
    try:
        return subprocess.run(
            ["git", *_GIT_OPTIONS, "-C", folder, *args],
            **given,
            capture_output=True,
            env={**inherited, **_GIT_OWN},
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"git took more than {timeout_s:g} s to read the repository of {folder}",
            hint="add folders with many files to .gitignore, or use --no-snapshot",
        ) from None


def _without_filters(folder: str, timeout_s: float) -> list[str]:
    """Return git options that disable all filters in the repository's and the user's config."""
    listed = _call_git(folder, ["config", "--includes", "-z", "--name-only", "--list"], timeout_s)
    if listed.returncode:
        reason = os.fsdecode(listed.stderr).strip()
        raise UsageError(
            f"git cannot read its config for {folder}: {reason}", hint="`git config --list` must work"
        )
    keys = dict.fromkeys(os.fsdecode(listed.stdout).split("\0"))
    filters = dict.fromkeys(key.rpartition(".")[0] for key in keys if key.startswith("filter."))
    if unnamed := next((name for name in filters if "=" in name), None):
        raise UsageError(
            f"{folder} has the filter {unnamed.removeprefix('filter.')!r}, which git cannot disable",
            hint="rename the filter in the git config; its name must not contain an equals sign",
        )
    values = ("clean=", "process=", "required=false")
    return [word for name in filters for value in values for word in ("-c", f"{name}.{value}")]
