"""What `submit`, `run` and `resume` share: from a config to a started run, and following it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from trainkit.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STOPPED,
    ConfigError,
    Problem,
    UsageError,
)
from trainkit.job.record import newest_entry, run_lock
from trainkit.observe.follow import follow
from trainkit.observe.tail import LogTail, last_lines
from trainkit.observe.words import event_line, verdict_line
from trainkit.rundir import AttemptDir, RunDir, read_end
from trainkit.submit.create import check_name, create_run
from trainkit.submit.local import LEAVING_S
from trainkit.submit.start import start_attempt

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig, RunConfig
    from trainkit.config.training import DataConfig
    from trainkit.plan.check import DataLook
    from trainkit.plan.cluster import Target
    from trainkit.plan.launch import LaunchPlan


END_S = 3.0


def plan_for(
    loaded: LoadedConfig,
    command: Sequence[str] | None = None,
    launcher: str = "python",
    target: Target | None = None,
    look: Callable[[DataConfig], DataLook] | None = None,
    code_dir: Path | None = None,
) -> LaunchPlan:
    """What would run, on this machine or on the cluster; ConfigError lists everything that is wrong.

    `look` takes the place of a look at the data for who has looked already; `code_dir` is where a command
    is started, if not here.
    """
    from trainkit.plan.check import check_config, look_at_data
    from trainkit.plan.machine import detect_machine
    from trainkit.submit.target import make_target

    check_name(loaded.config.name)
    target = target or make_target(loaded)
    problems: list[Problem] = []
    if target.backend in ("sbatch", "submitit"):
        from trainkit.submit.troubles import find_troubles

        launch = loaded.config.launch
        containers = () if target.cluster is None else target.cluster.containers
        problems = [loaded.problem(*trouble) for trouble in find_troubles(launch, Path.cwd(), containers)]
    try:
        plan = check_config(loaded, detect_machine(), target, command, launcher, look or look_at_data)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    if problems:
        raise ConfigError(problems)
    if loaded.config.launch.container is not None and target.cluster is not None:
        from trainkit.submit.containers import container_program

        program = container_program(loaded.config.launch, target.cluster.containers)
        plan = dataclasses.replace(plan, container_program=program)
    if command is None:
        return plan
    from trainkit.submit.secrets import refuse_secrets
    from trainkit.submit.troubles import command_python, refuse_missing

    refuse_missing(command, loaded.config.launch, launcher, code_dir or Path.cwd())
    refuse_secrets(command, loaded.config.launch.secrets)
    return dataclasses.replace(plan, python=command_python(loaded.config.launch, Path.cwd()))


def look_once() -> Callable[[DataConfig], DataLook]:
    """A look at the data that is taken once for all configs with the same data."""
    looks: dict[str, DataLook] = {}

    def look(data: DataConfig) -> DataLook:
        from trainkit.plan.check import look_at_data

        key = data.model_dump_json()
        if key not in looks:
            looks[key] = look_at_data(data)
        return looks[key]

    return look


def start_new_run(
    loaded: LoadedConfig, plan: LaunchPlan, run_dir: str | None, reason: str, quiet: bool = False
) -> tuple[RunDir, dict[str, Any]]:
    """Make the run folder and start its first attempt; `reason` is ``submit`` or ``run``.

    `quiet` does not tell which code is copied, for who starts the same again.
    """
    run, name = create_run(
        loaded,
        None if run_dir is None else named_folder(run_dir),
        ["trainkit", *sys.argv[1:]],
        plan.backend,
        code_copier(loaded.config, plan, quiet),
    )
    try:
        with run_lock(run):
            entry = start_attempt(run, loaded.config, plan, reason, foreground=reason == "run")
    except BaseException:
        if not run.attempt_numbers():
            shutil.rmtree(run.path, ignore_errors=True)  # made a moment ago; a refusal leaves no trace
        raise
    return run, {"run_dir": str(run.path), "name": name, **started(entry, plan.backend)}


def code_copier(
    config: RunConfig, plan: LaunchPlan, quiet: bool = False
) -> Callable[[RunDir], dict[str, Any] | None]:
    """What puts a copy of the code into a new run, and says what a person should know about it."""

    def copy(run: RunDir) -> dict[str, Any] | None:
        from trainkit.submit.code import copy_code, wants_copy

        if not wants_copy(config, plan):
            return None
        code = copy_code(run, config, plan, Path.cwd())
        if code is not None and not quiet:
            click.echo(
                f"  code                {code['num_files']:,} files of {code['source']} copied", err=True
            )
            for note in code["notes"]:
                click.echo(f"  note: {note}", err=True)
        return code

    return copy


def named_folder(text: str) -> Path:
    """The folder of --run-dir; UsageError when it is empty, as an unset variable of the shell is."""
    if not text.strip():
        raise UsageError("--run-dir is empty", hint="name a folder, or leave --run-dir out for runs/NAME")
    return Path(text)


def started(entry: dict[str, Any], backend: str) -> dict[str, Any]:
    """What a command that started an attempt tells about it."""
    return {"job_id": entry["job_id"], "attempt": entry["attempt"], "backend": backend}


def print_started(value: dict[str, Any], as_json: bool) -> None:
    """The run folder and the job id on stdout."""
    if as_json:
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo(value["run_dir"])
        click.echo(value["job_id"])


def follow_run(run: RunDir, attempt: int, to_stderr: bool, on_poll: Callable[[], None] = lambda: None) -> int:
    """Print rank 0's log and the run's events until it ends, then how it ended; the exit code of that.

    `on_poll` is called several times a second. KeyboardInterrupt passes through.
    """
    from trainkit.submit.steer import life_watch, wait_until_gone

    events = LogTail(run.events_file)
    is_alive = life_watch(run, lambda text: click.echo(text, err=True))

    def poll() -> bool | None:
        on_poll()
        _tell_events(events, attempt)
        return is_alive()

    for line in follow(run, attempt, _first_rank, poll):
        click.echo(line.text, err=to_stderr)
    entry = newest_entry(run)
    if entry is not None:
        # So that what is typed next, `resume` for example, does not meet a supervisor on its way out.
        wait_until_gone(run, entry, LEAVING_S)
    _tell_events(events, attempt)
    return tell_end(run)


def follow_detachable(run: RunDir, attempt: int, to_stderr: bool) -> int:
    """`follow_run`, which Ctrl-C leaves while the job goes on (130)."""
    try:
        return follow_run(run, attempt, to_stderr)
    except KeyboardInterrupt:
        click.echo(
            f"\ndetached: the job goes on; `trainkit logs {quote(str(run.path))} -f` shows it, "
            f"`trainkit cancel {quote(str(run.path))}` ends it",
            err=True,
        )
        return EXIT_INTERRUPTED


def _first_rank(attempt: AttemptDir) -> list[Path]:
    return [attempt.rank_log(0)]


LOGGED_EVENTS = {
    "rendezvous",
    "training",
    "resumed",
    "first_step",
    "evaluated",
    "checkpoint_begin",
    "checkpoint_commit",
    "checkpoint_rejected",
    "checkpoint_failed",
}
"""Events of the trainer, which rank 0's log tells of as well."""


def _tell_events(events: LogTail, attempt: int) -> None:
    for text in events.read():
        try:
            event = json.loads(text)
        except ValueError:
            continue
        if not isinstance(event, dict) or event.get("event") in LOGGED_EVENTS:
            continue
        if event.get("attempt", 0) >= attempt:
            click.echo(event_line(event), err=True)


def _end_soon(run: RunDir) -> dict[str, Any] | None:
    """How the newest attempt ended; `cancel --now` writes that a moment after the supervisor is gone."""
    deadline_s = time.monotonic() + END_S
    while True:
        end = read_end(run.attempt(run.attempt_numbers()[-1]))
        cancelled = "cancelled_at" in (newest_entry(run) or {})
        if end is not None or not cancelled or time.monotonic() > deadline_s:
            return end
        time.sleep(0.05)


def tell_end(run: RunDir) -> int:
    """Say on stderr how a run's newest attempt ended: 0 finished or stopped as asked, 1 anything else."""
    end = _end_soon(run)
    if end is None:
        log = run.attempt(run.attempt_numbers()[-1]).supervisor_log
        last_words = b" ".join(last_lines(log, 1)[0]).decode("utf-8", errors="replace")
        click.echo(f"died: the supervisor is gone without a word; {log} ends with: {last_words}", err=True)
        return EXIT_FAILED
    click.echo(f"{end['state']}: {end['reason']}", err=True)
    if end.get("verdict"):
        click.echo(verdict_line(end["verdict"]), err=True)
        if end["verdict"].get("rank") is not None:
            command = f"trainkit logs {quote(str(run.path))} --rank {end['verdict']['rank']}"
            click.echo(f"`{command}` shows what it printed", err=True)
    if end["state"] == "stopped":
        click.echo(f"`trainkit resume {quote(str(run.path))}` goes on from here", err=True)
    return EXIT_OK if end["exit_code"] in (EXIT_OK, EXIT_STOPPED) else EXIT_FAILED
