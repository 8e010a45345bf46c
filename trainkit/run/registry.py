"""Find the run for the command-line argument RUN: a job id, a run name, a run folder or `last`.

Commands that change a run accept a run name only for runs that belong to the current folder; other commands
accept the name of any run. A run in a group can also be specified as `GROUP/INDEX`, or by its array task id,
such as `123_4`. A job id may include the cluster, as in `123;east`.

Every start of a run appends a line to ``$XDG_STATE_HOME/trainkit/runs.jsonl``, so that commands find the run
from any working directory. Runs in ./runs are found even if they are not listed in runs.jsonl.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import TypeVar

from trainkit.errors import UsageError, print_note
from trainkit.folders import ensure_folder, state_folder, typed_path
from trainkit.formats import did_you_mean, there_are
from trainkit.run.files import append_jsonl, read_jsonl, utc_now
from trainkit.run.group import RunGroup, create_task_run, group_of, is_index
from trainkit.run.record import HasCluster, read_job
from trainkit.run.rundir import RUNS_FOLDER, AttemptDir, RunDir
from trainkit.scheduler import base_id, is_job_id, split_job

LIST_HINT = "`trainkit status` lists the runs"
Known = TypeVar("Known", bound=RunDir | RunGroup)


def index_file() -> Path:
    """Return the path of the index: the file that lists all started runs."""
    return state_folder() / "runs.jsonl"


def register(run: RunDir, name: str) -> None:
    """Add a started run to the index; print a note if the index cannot be written."""
    path = index_file()
    try:
        ensure_folder(path.parent, parents=True)
        append_jsonl(path, {"time": utc_now(), "name": name, "path": str(run.path)})
    except OSError as error:
        print_note(f"note: cannot write {path} ({error.strerror}): use the run's folder to refer to the run")


@dataclass(frozen=True)
class Start:
    """The newest start of a run or group; its folder may no longer exist."""

    folder: Path
    name: str | None
    """The run name in the index; None for a run in ./runs that the index does not list."""
    time: str
    """Time of the start, as ISO 8601 in UTC."""
    is_over: bool = False
    """True if a call of `record_over` has recorded that the run is over."""

    @property
    def config_name(self) -> str:
        """Return the config name of the run."""
        return self.name or read_job(RunDir(self.folder)).name

    def read(self) -> RunDir | RunGroup | None:
        """Return the run or group in the folder; None if the folder has none or cannot be read."""
        run, group = RunDir(self.folder), RunGroup(self.folder)
        try:
            return group if group.exists() else run if run.exists() else None
        except OSError:
            return None  # Another user's run or an unavailable disk must not hide other runs.


def starts() -> list[Start]:
    """Return the starts in the index and in ./runs, newest first; does not read the folders in the index."""
    found: dict[str, Start] = {}
    index, records = index_file(), []
    try:
        records = [*read_jsonl(index)]
    except OSError as error:  # The index may be unreadable because it was created by a command run with sudo.
        print_note(f"note: cannot read {index} ({error.strerror}): only runs in ./runs are found by name")
    for record in records:
        path, name, time = record.get("path"), record.get("name"), record.get("time")
        if not (isinstance(path, str) and isinstance(name, str) and isinstance(time, str)) or "\0" in path:
            continue
        key, is_over = os.path.normpath(path), record.get("over") is True
        # Ignore the record that a run is over if the run was started again after this record was written.
        if not is_over or (key in found and found[key].time == time):
            found.pop(key, None)
            found[key] = Start(Path(path), name, time, is_over)
    for folder in sorted((Path.cwd() / RUNS_FOLDER).glob("*/")):
        key = str(folder)
        here = None if key in found else Start(folder, None, "").read()
        if here is not None:
            file = here.sweep_file if isinstance(here, RunGroup) else here.attempts_dir
            with suppress(OSError):  # The folder may have been deleted since it was listed.
                time = datetime.fromtimestamp(file.stat().st_mtime, timezone.utc).isoformat()
                found[key] = Start(folder, None, time)
    # Sort, then reverse: if two lines have the same time, the later line must come first.
    return sorted(found.values(), key=lambda start: start.time)[::-1]


def record_over(over: Iterable[Start]) -> None:
    """Record in the index that runs are over, so that `status` does not have to read their folders again."""
    path = index_file()
    try:
        for start in over:
            if start.name is not None:
                record = {"time": start.time, "name": start.name, "path": str(start.folder), "over": True}
                append_jsonl(path, record)
    except OSError:
        pass  # Without this record, the next `status` is only slower.


def iter_known_runs(found: Iterable[Start] | None = None) -> Iterator[RunDir | RunGroup]:
    """Yield all known runs and groups that still exist, newest start first.

    Folders are read lazily during the iteration. `found` contains the starts to consider; defaults to all
    `starts`.
    """
    seen = set()
    for start in starts() if found is None else found:
        known = start.read()
        place = os.path.realpath(start.folder)
        if known is not None and place not in seen:
            seen.add(place)
            yield known


def find_run(text: str, *, to_change: bool = False, acts: bool = False) -> RunDir:
    """Return the run that RUN refers to; for a trial that has not started, create its folder.

    Raises UsageError if RUN refers to a whole group, and for the same reasons as `find_run_or_group`.
    """
    return one_run(find_run_or_group(text, to_change=to_change, acts=acts), text)


def one_run(found: RunDir | RunGroup, text: str) -> RunDir:
    """Return `found` if it is a single run; raise UsageError if it is a whole group."""
    if isinstance(found, RunDir):
        return found
    indices = sorted(found.trials)
    first = next(iter(indices), None)
    hint = "its sweep.json lists no runs, so restore that file"
    if first is not None:
        hint = f"choose one run, for example {found.run(first).quoted}"
    raise UsageError(f"{text} is a group of {len(indices):,} runs", hint=hint)


def find_attempt(run: RunDir, number: int | None) -> AttemptDir:
    """Return an attempt of a run, by default its newest; raise UsageError if the attempt does not exist."""
    numbers = run.attempt_numbers()
    if not numbers:
        hint = f"`trainkit resume {run.quoted}` starts the run"
        raise UsageError(f"{run.shown} was never started", hint=hint)
    if number is not None and number not in numbers:
        raise UsageError(f"{run.shown} has no attempt {number}", hint=there_are(numbers))
    return run.attempt(number or numbers[-1])


def find_run_or_group(text: str, *, to_change: bool = False, acts: bool = False) -> RunDir | RunGroup:
    """Return the result of `find_to_read`; for a trial that has not started, create its folder.

    Raises UsageError for the same reasons as `find_to_read` and `create_task_run`.
    """
    found = find_to_read(text, to_change=to_change, acts=acts)
    return create_task_run(found) if isinstance(found, RunDir) else found


def find_to_read(text: str, *, to_change: bool = False, acts: bool = False) -> RunDir | RunGroup:
    """Return the run or group that RUN refers to.

    A name refers to the run with this name in ./runs, or otherwise to the newest run with this name. The
    folder of a trial may not exist yet. Raises UsageError if no run or group matches. With `to_change`, also
    raises UsageError if several runs have the name, or if jobs on several clusters have the job id.

    Set `acts` for a command that acts on the run: a name or `last` then matches only runs in ./runs and runs
    submitted from the current folder. If the only match belongs to another folder, the error shows this
    folder, and the user must type its path to confirm.
    """
    if not text.strip():
        raise UsageError("RUN is empty", hint="specify a run name, a run folder, a job id or `last`")
    run, group = RunDir(text), RunGroup(text)
    to_change = to_change or acts
    try:
        if group.exists():
            return group
        if run.exists():
            return run
        trial = group_of(run)
    except OSError as error:
        raise UsageError(
            f"{text} cannot be read: {error.strerror}", hint="only the owner of a run can read the run"
        ) from None
    if trial is not None:
        return _run_of(*trial)
    head, separator, tail = text.rpartition(os.sep)
    if separator:
        typed_path(text, Path(), is_literal=True)
    if separator and (os.sep in head or not is_index(tail)):
        raise UnknownRun(f"{text} does not contain a run", hint=_path_hint(Path(text)))
    if separator:
        groups = [item for item in _matching_name(head, acts) if isinstance(item, RunGroup)]
        return _run_of(_newest(head, groups, to_change), int(tail))
    job_id, cluster = split_job(text)
    if text == "last":
        known = iter_known_runs()
        matches = list(islice(filter(_is_of_this_folder, known) if acts else known, 1))
    elif text.startswith("local-") or is_job_id(job_id):
        matches = _matching_job(job_id, cluster, on_all_clusters=to_change and is_job_id(text))
    else:
        matches = _matching_name(text, acts)
    if acts and not matches:
        _refuse_other_folder(text)
    newest = _newest(text, matches, to_change)
    if len(matches) == 1 and not to_change and not is_job_id(job_id) and not _is_of_this_folder(newest):
        print_note(f"note: {text} refers to a run that was submitted from another folder: {newest.shown}")
    if isinstance(newest, RunGroup) and is_job_id(job_id) and "_" in job_id:
        return _run_of(newest, int(job_id.partition("_")[2]))
    return newest


def _run_of(group: RunGroup, index: int) -> RunDir:
    """Return the run of a trial; raise UsageError if the group does not have this trial."""
    return group.run(group.trial(index).index)


def _matching_job(job_id: str, cluster: str, *, on_all_clusters: bool) -> list[RunDir | RunGroup]:
    """Return the newest run or group with a job id; with `on_all_clusters`, the newest for each cluster.

    An empty `cluster` matches any cluster.
    """
    matches, seen = list[RunDir | RunGroup](), set[str | None]()
    # A trial that was restarted individually also has its own line in the index, after its group's line.
    for item in iter_known_runs():
        clusters = _clusters_of_job(item, job_id, cluster)
        if clusters - seen:
            matches.append(item)
            if not on_all_clusters:
                break
        seen |= clusters
    return matches


def _matching_name(name: str, acts: bool = False) -> list[RunDir | RunGroup]:
    """Return the run or group in ./runs whose folder has a given name.

    If there is none in ./runs, returns all runs whose folder has this name or, if there are none, all runs
    whose config has this name. With `acts`, returns only runs that belong to the current folder.
    """
    # Include runs that have no name in the index, because their config may have this name.
    found = [start for start in starts() if name in (start.folder.name, start.name) or start.name is None]
    called = [item for item in iter_known_runs(found) if item.path.name == name]
    here = Path(RUNS_FOLDER).absolute()
    named = (start for start in found if start.config_name == name)
    if own := [item for item in called if item.path.parent == here]:
        return own
    kinds = (called, iter_known_runs(named))
    chosen = ([item for item in kind if not acts or _is_of_this_folder(item)] for kind in kinds)
    return next(filter(None, chosen), [])


def _is_of_this_folder(known: RunDir | RunGroup) -> bool:
    """Return whether a run or group is in ./runs, or was submitted from the current folder."""
    if os.path.realpath(known.path.parent) == os.path.realpath(RUNS_FOLDER):
        return True
    with suppress(UsageError):  # A damaged group raises UsageError.
        cwd = known.record.cwd if isinstance(known, RunGroup) else read_job(known).cwd
        return cwd is not None and os.path.realpath(cwd) == str(Path.cwd())
    return False


def _refuse_other_folder(text: str) -> None:
    """Raise RunInOtherFolder if a run name or `last` refers to a run that belongs to another folder.

    Without this check, a typo could stop a run of another project.
    """
    found = list(islice(iter_known_runs(), 1)) if text == "last" else _matching_name(text)
    if not found:
        return
    raise RunInOtherFolder(text, found)


class RunInOtherFolder(UsageError):
    """Raised if a run name or `last` matches only a run that belongs to another folder."""

    def __init__(self, typed: str, found: Sequence[RunDir | RunGroup]) -> None:
        what = "the newest run" if typed == "last" else typed
        super().__init__(
            f"{what} is not a run of this folder: it is {', '.join(item.shown for item in found)}",
            hint=f"to select such a run, specify its folder: {', '.join(item.quoted for item in found)}",
        )
        self.typed, self.only = typed, found[0].path if len(found) == 1 else None


class UnknownRun(UsageError):
    """Raised if no run matches RUN."""


def _path_hint(path: Path) -> str:
    """Return a hint that names the run that contains a path, or a run with a similar name."""
    inside = next((one for one in path.parents if RunDir(one).exists() or RunGroup(one).exists()), None)
    if inside is not None:
        return f"did you mean {RunDir(inside).shown}?"
    return _name_hint(path.name, [item.path.name for item in iter_known_runs()])


def _name_hint(text: str, known: Sequence[str]) -> str:
    """Return a hint that names the run that the user probably meant.

    ``sweep_1`` and ``sweep[1]`` are interpreted as trial 1 of the group `sweep`.
    """
    trial = re.fullmatch(r"(.+?)[_:.\[](\d+)\]?", text)
    if trial is not None and trial[1] in known:
        return f"did you mean {trial[1]}/{trial[2]}? {LIST_HINT}"
    return f"{did_you_mean(text.lower(), ['last', *known])}{LIST_HINT}"


def _newest(text: str, matches: Sequence[Known], to_change: bool) -> Known:
    if not matches:
        folder = Path(RUNS_FOLDER, text)
        if folder.is_dir() and text not in (".", ".."):
            raise UnknownRun(
                f"{folder} does not contain a run: the command that made the folder has not started it",
                hint=f"if that command was interrupted, remove {folder} and run the command again",
            )
        known = [item.path.name for item in iter_known_runs()]
        hint = "no runs yet: `trainkit submit` starts one"
        if known:
            hint = _name_hint(text, known)
        raise UnknownRun(f"unknown run {text!r}", hint=hint)
    if len(matches) > 1:
        newest, *others = (item.shown for item in matches)
        count = f"{len(matches)} runs are called {text}"
        if to_change:
            raise UsageError(
                f"{count}: {', '.join([newest, *others])}", hint="specify the folder of one of these runs"
            )
        print_note(f"note: {count}; this is the newest, {newest}, not {', '.join(others)}")
    return matches[0]


def _clusters_of_job(known: RunDir | RunGroup, job_id: str, cluster: str) -> set[str | None]:
    """Return the clusters where a run or group has a job with a given id.

    None represents the cluster of this host, or a job whose cluster is unknown.
    """
    found: list[HasCluster]
    if isinstance(known, RunGroup):
        has_job = (base_id(job_id) if is_job_id(job_id) else job_id) in known.job_ids
        found = [known.record] if has_job else []
    else:
        job = read_job(known)
        found = [entry for entry in job.attempts if entry.job_id == job_id]
        found += [job.newest] if job.newest and job_id in (job.follow_ups or []) else []
    return {record.other_cluster for record in found if cluster in ("", record.cluster)}


STATE_VARIABLE = "XDG_STATE_HOME"


@contextmanager
def isolated_state(folder: Path) -> Iterator[None]:
    """Store trainkit's user state in `folder` within the block, so that runs started there are not indexed.

    As a result, `last` does not change, and a node that a drill kills is not recorded as bad. Existing
    records of bad nodes are copied to `folder`, so that these nodes are still avoided.
    """
    before, own = os.environ.get(STATE_VARIABLE), folder / ".state"
    known = state_folder() / "bad_nodes"
    own.mkdir()
    if known.is_dir():
        shutil.copytree(known, own / "trainkit" / "bad_nodes")
    os.environ[STATE_VARIABLE] = str(own)
    try:
        yield
    finally:
        if before is None:
            del os.environ[STATE_VARIABLE]
        else:
            os.environ[STATE_VARIABLE] = before
