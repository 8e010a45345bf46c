"""Store the provenance of a run, and a copy of its code that later edits do not change."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_IMODE, S_ISLNK

from trainkit import __version__
from trainkit.config import RunConfig
from trainkit.errors import UsageError
from trainkit.folders import ensure_folder, shown_path, user_name
from trainkit.launch.git_snapshot import NoRepository, finish_repository, make_repository
from trainkit.launch.packages import own_packages
from trainkit.launch.secrets import mask_diff, refuse_leaks, without_secrets
from trainkit.launch.source_tree import SourceTree, add_links, below, find_tree, parents, printable, run_git
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.workload import Workload
from trainkit.run.files import to_json, utc_now, write_json
from trainkit.run.git_copy import GIT, hash_size_of, repositories_below, write_index
from trainkit.run.record import CodeCopy, JobRecord, changed_job
from trainkit.run.rundir import RunDir
from trainkit.shipped import packages_of

MAX_BYTES = 500_000_000
MAX_FILES = 50_000
MAX_LISTED = 100
"""Maximum number of omitted files, and of symlinks, that are listed in job.json."""
NUM_THREADS = 8
"""Number of threads that copy files; several are used because copying a file on a shared file system takes
milliseconds."""
GIT_TIMEOUT_S = 2.0
MAX_DIFF_CHARS = 1_000_000
DIFF_OPTIONS = ("--src-prefix=a/", "--dst-prefix=b/")
"""Options that fix the path prefixes in a diff, because `mask_diff` needs these prefixes and the user's git
config may set others."""
MAX_SCRIPT_BYTES = 1_000_000
_WORDS = re.compile(r"[\s=,:;|&<>()'\"`]+")
"""Separates the words of a command, as in ``sh -c 'train --data ../data'`` or ``--data=../a,../b``."""
_PATH_ABOVE = re.compile(r"[\"'](\.\./[^\"'\n]*\w[^\"'\n]*)[\"']")
"""Matches a quoted path in a script that points outside of the script's folder."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WORK_FOLDER_NOTE = (
    "the command runs in a copy of the code (work/ in the run folder), so relative output paths lead there"
)


NO_REPOSITORY = "Git finds no repository in the copy of the code"


def wants_copy(config: RunConfig, plan: LaunchPlan) -> bool:
    """Return whether a run gets a code copy.

    A copy protects a queued job from later edits of the code. A COMMAND on this machine also runs in a copy,
    so that its outputs are in the same folder as on a cluster.
    """
    return config.launch.snapshot and (plan.is_job or plan.workload.is_command)


def write_origin(
    run: RunDir, config: RunConfig, plan: LaunchPlan, argv: Sequence[str], code_from: CodeCopy | None = None
) -> CodeCopy | None:
    """Copy a run's code and write provenance.json; return a description of the copy.

    `code_from` is another run's code copy, used instead of the current code. Raises UsageError if the code
    cannot be copied, or if a secret would be written to a file.
    """
    cwd = Path.cwd()
    # Run git and the copy in parallel, because both take about the same time.
    with ThreadPoolExecutor(1) as thread:
        provenance = thread.submit(collect_provenance, cwd)
        if code_from is not None:
            code: CodeCopy | None = copy_again(code_from, run)
        else:
            code = copy_code(cwd, run, plan.workload) if wants_copy(config, plan) else None
        value = {**provenance.result(), "argv": without_secrets(argv, config.secrets)}
        value["code"] = to_json(code)
        if others := packages_of(plan.parts):
            value["capabilities"] = others
    refuse_leaks(json.dumps(value), str(run.provenance_file), config.secrets, os.environ)
    write_json(run.provenance_file, value)
    return code


def future_code(
    run: RunDir, config: RunConfig, plan: LaunchPlan, code_from: CodeCopy | None = None
) -> CodeCopy | None:
    """Return the description that `write_origin` would return, without writing anything.

    Raises UsageError for the same reasons as `write_origin`.
    """
    if code_from is not None:
        return moved(code_from, run.code_dir)
    return plan_copy(Path.cwd(), run, plan.workload)[0] if wants_copy(config, plan) else None


@dataclass(frozen=True)
class CodeChanges:
    """How the code in the current folder differs from a run's copy of the code."""

    code: CodeCopy
    """The description that `copy_code` would return for the current folder."""
    changed: Sequence[str]
    """Paths of the files that both have, with different contents."""
    new: Sequence[str]
    """Paths of the files that only the current folder has."""
    removed: Sequence[str]
    """Paths of the files that only the copy has."""

    def __str__(self) -> str:
        parts = {"changed": self.changed, "new": self.new, "removed": self.removed}
        return "; ".join(f"{what}: {_listed(paths)}" for what, paths in parts.items() if paths)


def find_code_changes(run: RunDir, copied: CodeCopy, workload: Workload) -> CodeChanges:
    """Compare the code in the current folder with a run's copy of the code.

    Raises UsageError for the same reasons as `copy_code`.
    """
    code, tree = plan_copy(Path.cwd(), run, workload)
    old = Path(copied.code)
    if not old.is_dir():
        old = run.code_dir  # The run folder was moved.
    before = _copied_paths(old)
    both = sorted(before & tree.files.keys())
    changed = [path for path in both if not _is_same_file(Path(tree.root, path), old / path)]
    new, removed = tree.files.keys() - before, before - tree.files.keys() - set(tree.links)
    return CodeChanges(code, changed, sorted(new), sorted(removed))


def _is_same_file(now: Path, before: Path) -> bool:
    """Compare two files; only files whose size or modification time differ are read."""
    try:
        return filecmp.cmp(now, before)
    except OSError:
        return False  # Symlinks without a target differ.


def _copied_paths(folder: Path) -> set[str]:
    """Return the relative paths of the files in a code copy, excluding its Git repositories."""
    found = set()
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in (GIT, "__pycache__")]
        inside = os.path.relpath(parent, folder)
        found |= {os.path.normpath(f"{inside}/{name}") for name in names}
    return found


@contextmanager
def renewed_code(run: RunDir, before: JobRecord, config: RunConfig, plan: LaunchPlan) -> Iterator[JobRecord]:
    """Replace a run's code copy with the current code; rename the old copy to ``code.001`` and so on.

    `before` is the content of job.json; the function yields the new content. The caller must hold the run's
    lock. If no attempt is started within the block, the old copy is restored. Raises UsageError for the same
    reasons as `copy_code`.
    """
    attempts = run.attempt_numbers()
    candidates = (run.path / f"code.{number:03d}" for number in range(1, 1000))
    kept = next(folder for folder in candidates if not folder.exists())
    had_one = run.code_dir.exists()
    if had_one:
        run.code_dir.rename(kept)
    try:
        cwd = Path(before.cwd or Path.cwd())
        code = copy_code(cwd, run, plan.workload) if wants_copy(config, plan) else None
        with changed_job(run) as job:
            job.code = code
        yield job
    except BaseException:
        if run.attempt_numbers() == attempts:
            shutil.rmtree(run.code_dir, ignore_errors=True)
            if had_one:
                kept.rename(run.code_dir)
            # If job.json cannot be written now, its earlier change was not written either.
            with suppress(OSError), changed_job(run) as job:
                job.code = before.code
        raise


def copy_code(cwd: Path, run: RunDir, workload: Workload) -> CodeCopy:
    """Copy the code in a working directory to the run's code/; if this fails, remove the partial copy.

    Returns a description of the copy. File modes and symlinks are preserved: a symlink to a copied file
    points to the copy of this file, and any other symlink to its original target. For a COMMAND, files that
    are not copied are symlinked, because the COMMAND may expect data in its working directory, as in ``python
    train.py --data data/train.jsonl``. Raises UsageError if the code is too large, a file cannot be read, or
    the run folder is not writable.
    """
    code, tree = plan_copy(cwd, run, workload)
    if run.code_dir.exists():
        raise UsageError(f"{run.code_dir} already exists", hint="every run needs its own code folder")
    try:
        stage = tempfile.mkdtemp(prefix=".code.", dir=run.path)
        try:
            folders = _make_folders(tree, stage)
            with ThreadPoolExecutor(1) as thread:
                made = [
                    (prefix, thread.submit(make_repository, tree, prefix, stage))
                    for prefix in tree.repositories
                ]
                _copy_files(tree, folders, stage)
            for path in tree.links:
                Path(stage, path).symlink_to(Path(tree.root, path))
            ensure_folder(Path(stage, tree.subfolder), parents=True)
            for prefix, repository in made:
                try:
                    finish_repository(tree, prefix, stage, *repository.result())
                except (NoRepository, ValueError) as error:
                    shutil.rmtree(Path(stage, prefix, GIT), ignore_errors=True)
                    code.notes.append(f"{NO_REPOSITORY}: {printable(str(error))}")
            code = replace(code, has_repository=Path(stage, GIT).is_dir())
            Path(stage).rename(run.code_dir)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
    except OSError as error:
        raise _copy_error(error, run) from error
    return code


def copy_again(before: CodeCopy, run: RunDir) -> CodeCopy:
    """Copy another run's code copy to this run's code/; return a description of the new copy.

    Raises UsageError for the same reasons as `copy_code`.
    """
    try:
        shutil.copytree(before.code, run.code_dir, symlinks=True)
        for folder in repositories_below(run.code_dir):
            old = Path(before.code, folder)
            write_index(old, run.code_dir / folder, old / GIT / "index", hash_size_of(old / GIT))
    except OSError as error:
        raise _copy_error(error, run) from error
    return moved(before, run.code_dir)


def moved(code: CodeCopy, folder: Path) -> CodeCopy:
    """Return the description of a code copy after its files were copied or moved to `folder`.

    Raises UsageError if the description refers to files outside of the copy.
    """
    try:
        paths = [
            str(folder / Path(path).relative_to(code.code)) for path in (*code.import_path, code.workdir)
        ]
    except ValueError as error:
        raise UsageError(
            f"the job.json that belongs to {shown_path(folder)} is damaged: {error}",
            hint="restore the file, or use the files in place with --no-snapshot",
        ) from None
    return replace(code, code=str(folder), import_path=paths[:-1], workdir=paths[-1])


def _copy_error(error: OSError, run: RunDir) -> UsageError:
    if error.errno in _NO_SPACE:
        return UsageError(
            f"cannot copy the code to {run.shown}: {error.strerror}",
            hint="free disk space or quota, or use the files in place with --no-snapshot",
        )
    name = printable(os.fsdecode(error.filename)) if error.filename else str(run.path)
    return UsageError(
        f"cannot copy the code: {name}: {error.strerror or error}",
        hint="make the file readable or add it to .gitignore, or use --no-snapshot",
    )


def plan_copy(cwd: Path, run: RunDir, workload: Workload) -> tuple[CodeCopy, SourceTree]:
    """Return the description that `copy_code` would return, and the files to copy; write nothing.

    Raises UsageError for the same reasons as `copy_code`.
    """
    folder, run_dir = os.path.realpath(cwd), os.path.realpath(run.path)
    tree = find_tree(folder, run_dir)
    tree.subfolder = below(tree.root, folder)
    if workload.is_command:
        add_links(tree, folder, run_dir)
    num_bytes = sum(found.st_size for found in tree.files.values() if not S_ISLNK(found.st_mode))
    if num_bytes > MAX_BYTES or len(tree.files) > MAX_FILES:
        largest = sorted(tree.files, key=lambda path: tree.files[path].st_size, reverse=True)[:5]
        named = ", ".join(f"{printable(path)} ({_size(tree.files[path].st_size)})" for path in largest)
        raise UsageError(
            f"the code in {tree.root} has {len(tree.files):,} files, {_size(num_bytes)} in total; the limit "
            f"is {MAX_FILES:,} files and {_size(MAX_BYTES)}; the largest: {named}",
            hint="add data to .gitignore or move it, or use the files in place with --no-snapshot",
        )
    missing = list(_missing_paths(workload.argv, tree)) if workload.is_command else []
    import_path, notes = find_import_path(tree, str(run.code_dir), os.environ.get("PYTHONPATH", ""))
    by_reason: dict[str, list[str]] = {}
    for path, reason in tree.left_out:
        by_reason.setdefault(reason, []).append(path)
    left_out = [
        f"not in the copy of the code: {_listed(paths)} ({reason})" for reason, paths in by_reason.items()
    ]
    linked = [f"symlinked instead of copied: {_listed(tree.links)}"] if tree.links else []
    source, subfolder = printable(tree.root), printable(tree.subfolder)
    code = CodeCopy(
        source=source,
        code=printable(str(run.code_dir)),
        subfolder=subfolder,
        kind=tree.kind,
        num_files=len(tree.files),
        num_bytes=num_bytes,
        left_out=[{"path": printable(path), "reason": reason} for path, reason in tree.left_out[:MAX_LISTED]],
        links=[printable(path) for path in tree.links[:MAX_LISTED]],
        import_path=import_path,
        notes=[*left_out, *linked, *missing, *notes],
        workdir=str(run.code_dir / tree.subfolder),
        has_repository=bool(tree.repositories),
    )
    if tree.kind == "pattern" and any((parent / GIT).exists() for parent in (cwd, *cwd.absolute().parents)):
        code.notes.append(f"{NO_REPOSITORY}: git ignores {shown_path(cwd)}, or is not installed here")
    if workload.is_command:
        code.notes.append(WORK_FOLDER_NOTE)
    for word in workload.argv:
        # If the command names a script in the source by its absolute path, Python would import the
        # neighbouring modules from the source, not from the copy.
        if Path(word).is_relative_to(source) and Path(word).is_file():
            how = f"to run the copy, specify the path relative to {source}"
            code.notes.append(f"{word} is run from the original folder, where it may change; {how}")
    return code, tree


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(map(printable, paths[:3])) + more


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _missing_paths(command: Sequence[str], tree: SourceTree) -> Iterator[str]:
    """Yield a note for each relative path in a command or its script that is missing in the code copy.

    Paths that are also missing in the source are ignored. Raises UsageError if an argument or option value
    is a path outside of the copied folder.
    """
    in_place = "or use the files in place with --no-snapshot"
    for word in command:
        for part in (word, word.partition("=")[2]):
            path = os.path.normpath(Path(tree.root, tree.subfolder, part))
            is_outside = path != tree.root and not below(tree.root, path)
            if ".." in part.split("/") and not part.startswith("/") and is_outside and os.path.lexists(path):
                raise UsageError(
                    f"{part} in the command is outside of {tree.root}, the folder that is copied for the run",
                    hint=f"specify its absolute path, {path}, {in_place}",
                )
    scripts = [word for word in command if word.endswith((".py", ".sh")) and not word.startswith("/")]
    quoted = [(script, match[1]) for script in scripts for match in _PATH_ABOVE.finditer(_text(tree, script))]
    words = [("the command", part) for word in command for part in _WORDS.split(word)]
    for where, part in dict.fromkeys(words + quoted):
        known = re.split(r"[{}$*?%]", part)[0]  # The path may contain placeholders, as in f"../data/{name}".
        known = known if known == part else known.rpartition("/")[0]
        path = os.path.normpath(Path(tree.root, tree.subfolder, known))
        if known and not known.startswith("/") and os.path.lexists(path) and not _has_path(tree, path):
            hint = f"specify its absolute path, {path}, {in_place}"
            yield f"{part} in {where} is not in the copy of the code: {hint}"


def _has_path(tree: SourceTree, path: str) -> bool:
    """Return whether the code copy will contain a path from the source.

    A folder is always considered present, because programs create their output folders.
    """
    inside = below(tree.root, path)
    if inside and Path(path).is_dir():
        return True
    around = (inside, *parents(inside)) if inside else ()
    return path == tree.root or inside in tree.files or any(place in tree.links for place in around)


def _text(tree: SourceTree, script: str) -> str:
    """Return the text of a script in the project; "" if it is missing or too large."""
    inside = below(tree.root, os.path.normpath(Path(tree.root, tree.subfolder, script)))
    if inside not in tree.files or tree.files[inside].st_size > MAX_SCRIPT_BYTES:
        return ""
    try:
        return Path(tree.root, inside).read_text(errors="replace")
    except OSError:
        return ""  # Ignore the error, because copying will fail with a more useful error.


def _make_folders(tree: SourceTree, target: str) -> set[str]:
    folders = tree.folders | {parent for path in tree.links for parent in parents(path)}
    for folder in sorted(folders - {""}):  # Sort, so that parents are created first.
        Path(target, folder).mkdir(mode=0o700)
    return folders


def _copy_files(tree: SourceTree, folders: set[str], target: str) -> None:
    plain = []
    for path, found in tree.files.items():
        if S_ISLNK(found.st_mode):
            Path(target, path).symlink_to(_link_target(tree, folders, path))
        else:
            plain.append(path)

    def copy(path: str) -> None:
        """Copy a file with its mode and modification time.

        The copy is not a hard link, because an editor may modify the source file in place.
        """
        # opening fails if a symlink or pipe has just replaced the file
        with suppress(FileNotFoundError):  # The file may have been deleted since it was listed.
            reading = os.open(f"{tree.root}/{path}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(reading, "rb", 0) as old, open(f"{target}/{path}", "xb") as new:
                # Make the copy read-only, because the trials of a sweep share it; outputs should go to a
                # run's working directory.
                os.fchmod(new.fileno(), S_IMODE(tree.files[path].st_mode) & 0o555 | 0o400)
                found = os.fstat(reading)
                shutil.copyfileobj(old, new)
                new.flush()  # Flush now, because a later flush would change the modification time.
                os.utime(new.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(copy, plain))


def _link_target(tree: SourceTree, folders: set[str], path: str) -> str:
    """Return the target for a copied symlink: a path in the copy if possible, else the original target."""
    text = str(Path(tree.root, path).readlink())
    parent = path.rpartition("/")[0]
    target = os.path.normpath(text if text.startswith("/") else f"{tree.root}/{parent}/{text}")
    inside = below(tree.root, target)
    if target != tree.root and inside not in tree.files and inside not in folders - {""}:
        return target
    return os.path.relpath(inside or ".", parent or ".") if text.startswith("/") else text


def find_import_path(tree: SourceTree, code: str, inherited: str) -> tuple[list[str], list[str]]:
    """Return folders in the copy to add to PYTHONPATH, and notes about folders that cannot be added.

    Without these folders in PYTHONPATH, a project installed with ``pip install -e`` would be imported from
    its source, which may change after submission. PYTHONPATH takes precedence over the installation. The
    folders are the working directory, the package folder of each project that contains it, and the copies of
    those folders of `inherited` (PYTHONPATH) that are below the source.
    """
    folders = tree.folders | {tree.subfolder}
    wanted = [tree.subfolder]
    for folder in dict.fromkeys((tree.subfolder, *parents(tree.subfolder), "")):
        if any(_join(folder, name) in tree.files for name in ("pyproject.toml", "setup.py", "setup.cfg")):
            sources = _join(folder, "src")
            wanted.append(sources if sources in folders else folder)
    absolute = (os.path.realpath(entry) for entry in inherited.split(os.pathsep) if entry.startswith("/"))
    wanted += filter(None, (below(tree.root, entry) for entry in absolute))
    taken: list[str] = []
    notes: list[str] = []
    for inside in dict.fromkeys(wanted):
        folder = str(Path(code, inside))
        modules = (
            f"{name}{end}" for name in sorted(sys.stdlib_module_names) for end in (".py", "/__init__.py")
        )
        if inside not in folders:
            continue
        if shadowing := next((name for name in modules if _join(inside, name) in tree.files), None):
            module = re.split("[./]", shadowing)[0]
            problem = f": its {module} would shadow the module of the standard library; rename it"
            notes.append(f"{folder} is not on PYTHONPATH{problem}")
        elif os.pathsep in folder:
            notes.append(f"{folder} is not on PYTHONPATH, which cannot contain a folder with a colon")
        else:
            taken.append(folder)
    return taken, notes


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def collect_provenance(cwd: Path) -> dict[str, object]:
    """Return the versions, host, user and git state for a run's provenance."""
    return {
        "time": utc_now(),
        "trainkit": __version__,
        "python": platform.python_version(),
        "torch": own_packages("torch").torch.version or None,
        "platform": platform.platform(),
        "executable": sys.executable,
        "cwd": str(cwd),
        "host": os.uname().nodename,
        "user": user_name(),
        "git": git_state(cwd),
    }


def git_state(cwd: Path) -> dict[str, object] | None:
    """Return the commit, branch and uncommitted changes of a folder's repository; None if it has none.

    Values in the diff that look like secrets are masked.
    """
    commit = _git(cwd, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    if commit is None:
        return None
    sha, branch = commit.split()
    diff = _git(cwd, "diff", *DIFF_OPTIONS, "HEAD")
    if diff is not None and diff and not diff.startswith("diff --git "):
        diff = None  # Secrets cannot be found in a diff that has a different format.
    shown = None if diff is None else mask_diff(diff[:MAX_DIFF_CHARS])
    status = _git(cwd, "status", "--porcelain")
    return {
        "sha": sha,
        "branch": branch,
        "dirty": None if status is None else bool(status.strip()),
        "diff": shown,
        "diff_masked": diff is not None and shown != diff[:MAX_DIFF_CHARS],
        "diff_cut_off": diff is not None and len(diff) > MAX_DIFF_CHARS,
    }


def _git(cwd: Path, *args: str) -> str | None:
    """Return the output of a git command, or None if the command fails or times out."""
    try:
        done = run_git(str(cwd), *args, timeout_s=GIT_TIMEOUT_S)
    except (OSError, UsageError):
        return None
    return None if done.returncode else done.stdout.decode("utf-8", errors="replace")
