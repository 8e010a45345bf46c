"""Implements ``trainkit status``, which prints the state of runs in a terminal or as JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from shlex import join, quote
from textwrap import wrap
from typing import TYPE_CHECKING

import click

from trainkit.backends.jobs import query_jobs_or_warn
from trainkit.cli.help import as_command, complete_run, option, terminal_width, warn
from trainkit.cli.options import json_option
from trainkit.cli.output import echo_json, echo_result
from trainkit.errors import UsageError
from trainkit.folders import relative_path, shown_path
from trainkit.formats import GAP, cell, duration, result_text, short_keys, table
from trainkit.observe.current import look_at, query_group, read_all
from trainkit.observe.group import (
    FIGURES,
    GroupJson,
    GroupStatus,
    TrialStatus,
    column_of,
    count_states,
    most_relevant,
    sorted_trials,
    state_counts,
)
from trainkit.observe.ranking import Mode, UnknownMetricError, asked_metric, config_ranking, rank
from trainkit.observe.status import (
    Place,
    Progress,
    RunStatus,
    capability_rows,
    failure_lines,
    flat_config,
    loss_text,
    reading_of,
)
from trainkit.observe.values import is_call
from trainkit.run.end import Best
from trainkit.run.events import with_divergence
from trainkit.run.files import INLINE, OPTIONAL, to_json
from trainkit.run.group import RunGroup
from trainkit.run.history import Restart
from trainkit.run.registry import find_to_read
from trainkit.run.rundir import RUNS_FOLDER, RunDir
from trainkit.scheduler import JobInfo
from trainkit.shipped import SHIPPED, placed, restart_cause
from trainkit.terminal import (
    BAD,
    GOOD,
    TITLE,
    WATCH,
    Styled,
    cut,
    cut_in_the_middle,
    painted,
    plain,
    state_style,
    text_width,
)

if TYPE_CHECKING:
    from trainkit.cli.choose_runs import Choice

HEADING = ("RUN", "STATE", "ATTEMPT", "WORKERS", "STEP", "LOSS", "TOKENS/S", "AGE")
MAX_ENDED_RUNS = 15
MAX_READ = 200
"""Maximum number of ended runs to read if many of them are calls of the same Python function."""
MIN_CALLS = 3
"""Minimum number of runs of one Python function that the list shows as a single line."""
MAX_TRIALS = 20
MAX_REASON = 60
MIN_NAME = 24
"""Minimum width of text columns such as names; if the terminal is too narrow, whole columns are omitted."""
LABEL = 12
"""The width of the labels in a run's details."""
WRAPPED = ("state", "used", "restarts", "failure", "hint", "diagnosis")
"""Details that are wrapped to several lines in a terminal if they are long."""
SHORTENED = {"best": cut_in_the_middle, "last event": cut}
"""Details that are shortened to one line in a terminal. `--json` prints the shortened details in full."""
MINOR = (HEADING.index("ATTEMPT"), HEADING.index("WORKERS"), HEADING.index("TOKENS/S"))
"""The columns that are omitted in a narrow terminal, least important column first."""


@dataclass(frozen=True)
class RunJson:
    """The state of a run, and its result for `--metric`."""

    status: RunStatus = field(metadata=INLINE)
    rows: dict[str, dict[str, str]] = field(metadata=OPTIONAL)
    """Maps the name of each third-party capability to the lines that it adds, keyed by label."""
    metric: str = field(metadata=OPTIONAL)
    """The name of the metric in `result`; `metric`, `mode` and `result` are present only with `--metric`."""
    mode: Mode = field(metadata=OPTIONAL)
    result: Best | None = field(metadata=OPTIONAL)


StatusJson = RunJson | GroupJson | list[RunStatus | GroupJson]


@as_command(
    "trainkit status",
    "trainkit status --all",
    "trainkit status last --json",
    "trainkit status lr-sweep --metric val_accuracy",
)
@click.argument("run_name", metavar="[RUN]", required=False, shell_complete=complete_run)
@option("--all", "Show all runs, not only the newest ones.", name="show_all")
@option("--here", "Show only the runs in ./runs.", name="only_here")
@option(
    "--where KEY=VALUE", "Show only runs whose config key KEY has the value VALUE; repeatable.", multiple=True
)
@option("--tag TAG", "Show only runs with the tag TAG; repeatable.", name="tags", multiple=True)
@option(
    "--sort KEY",
    "Sort the list of runs by loss, val_loss, tokens_per_s or a config key. If RUN is a group, sort its runs "
    "by any metric or column.",
    name="sort_key",
)
@option(
    "--metric NAME", "Metric to report as the result of RUN; in a group, the runs are ranked by this metric."
)
@json_option("trainkit.cli.status:StatusJson")
def command(
    run_name: str | None,
    show_all: bool,
    only_here: bool,
    where: tuple[str, ...],
    tags: tuple[str, ...],
    sort_key: str | None,
    metric: str | None,
    as_json: bool,
) -> None:
    """Show all active runs and the 15 newest other runs, or show RUN in detail.

    RUN is a job id, a run name, a run folder or `last`. The list combines each group, and three or more runs
    of the same Python function, into one line. If RUN is a group or a bench, its runs are counted and listed,
    failures first. With --json, all runs are printed, newest first.
    """
    if run_name is None and metric is not None:
        raise UsageError(f"--metric {metric} requires the name of a run or group", hint="specify RUN")
    if run_name is not None and (where or tags or only_here):
        text = f"--where, --tag and --here filter the list of all runs, but you specified {run_name}"
        raise UsageError(text, hint="omit either the options or RUN")
    below = Path(RUNS_FOLDER) if only_here else None
    if where or tags or (sort_key is not None and run_name is None):
        # imported here because loading the config schema is slow
        from trainkit.cli.choose_runs import parse_choice

        _show_chosen(parse_choice(where, tags, sort_key), below, as_json)
        return
    found = None if run_name is None else find_to_read(run_name)
    if isinstance(found, RunDir):
        if sort_key is not None:
            raise UsageError(
                f"--sort {sort_key}: {found.shown} is a single run, not a list or a group", hint="omit --sort"
            )
        history, status, _ = look_at(found, warn)
        rows = capability_rows(reading_of(history, status))
        # The status already contains the values of built-in capabilities, so add only the rows of external
        # capabilities.
        others = {name: own for name, own in rows.items() if name not in SHIPPED}
        value = {**status.to_dict(), **({"rows": others} if others else {})}
        if metric is not None:
            ranking, (measured,) = rank([found], metric, config_ranking([flat_config(found)]))
            since, result = measured.diverged_since, measured.result
            value |= {"metric": ranking.metric, "mode": ranking.mode, "result": to_json(result)}
            shown = "" if result is None else f"{result_text(result.value)} at step {cell(result.step)}"
            rows = {**rows, "": {ranking.label: with_divergence(None, since) or shown}}
        echo_result(value, run_details(status, rows), as_json)
    else:
        show_runs(found, show_all, as_json, metric, sort_key, below)


def show_runs(
    found: RunGroup | None,
    show_all: bool,
    as_json: bool,
    metric: str | None = None,
    sort_key: str | None = None,
    below: Path | None = None,
) -> None:
    """Print the runs of a group; if `found` is None, print all active runs and the newest ended runs.

    `metric` is the metric by which a group's runs are ranked, and `sort_key` is the column or metric by which
    they are sorted. If `below` is given, the list contains only runs in that folder.
    """
    if found is None:
        _show_all_runs(show_all, as_json, below)
        return
    keys = found.record.keys
    column = None if sort_key is None else column_of(sort_key, keys)
    by_metric = sort_key if column is None else None
    columns = (*FIGURES, *keys)
    asked = asked_metric(metric, by_metric, columns)
    try:
        status = query_group(found, warn, asked)
    except UnknownMetricError as error:
        raise error if by_metric is None else error.as_sort_key(columns) from None
    if sort_key is not None:
        status = replace(status, trials=sorted_trials(status, column))
    if as_json:
        echo_json(status.to_dict())
        return
    job = ", ".join(found.job_ids) or "-"
    place = f" on {found.record.other_cluster}" if found.record.other_cluster else ""
    best = status.best
    lines = {
        "group": status.name,
        "folder": status.run_dir,
        "job": status.array and f"{job} [{status.array}]{place}, submitted {duration(status.age_s)} ago",
        "runs": f"{len(status.trials):,}: {state_counts(status.states)}",
        "best": Styled(f"{best}: {_result(best.best)}", TITLE) if best and best.best else "-",
    }
    num_shown = len(status.trials) if show_all else MAX_TRIALS
    shown = most_relevant(status, num_shown) if sort_key is None else status.trials[:num_shown]
    if show_all and sort_key is None:
        shown = status.trials
    width = terminal_width()
    more = [column] if column in ("step", "age") else []
    rows = trial_rows(status, shown, more, max_reason=max(MAX_REASON, width or 0))
    click.echo(f"{_details(lines)}\n\n{table(rows, fit=width, cuts=True)}")
    if len(shown) < len(status.trials):
        click.echo(_not_shown(len(status.trials) - len(shown)))


@dataclass(frozen=True)
class Calls:
    """Runs of the same Python function that have the same name and are in the same folder."""

    runs: Sequence[RunStatus]

    @property
    def is_active(self) -> bool:
        """Return whether any of the runs can still make progress."""
        return any(run.is_active for run in self.runs)

    @property
    def states(self) -> dict[str, int]:
        """Map each state to the number of runs in that state, ordered from most to least urgent."""
        return count_states(run.state for run in self.runs)

    def row(self, cwd: Path) -> Sequence[str]:
        """Return the table row for the function's runs, with the folder and age of the newest run."""
        newest = self.runs[0]
        folder = Path(newest.run_dir).with_name(newest.name)
        state = Styled(state_counts(self.states), state_style(next(iter(self.states))))
        place = f"{relative_path(str(folder), cwd)} ({len(self.runs)} runs)"
        return place, state, "-", workers_text(newest.place), "-", "-", "-", duration(newest.age_s)


def with_calls(statuses: Sequence[RunStatus | GroupStatus]) -> list[RunStatus | GroupStatus | Calls]:
    """Replace the runs of a function by a single `Calls` object if there are at least `MIN_CALLS` runs."""
    calls: dict[tuple[Path, str], list[RunStatus]] = {}
    for one in statuses:
        if isinstance(one, RunStatus) and is_call(one.command):
            calls.setdefault((Path(one.run_dir).parent, one.name), []).append(one)
    lines = {id(run): runs for runs in calls.values() if len(runs) >= MIN_CALLS for run in runs}
    found: list[RunStatus | GroupStatus | Calls] = []
    for one in statuses:
        runs = lines.get(id(one), [])
        if not runs:
            found.append(one)
        elif one is runs[0]:
            found.append(Calls(runs))
    return found


def _show_all_runs(show_all: bool, as_json: bool, below: Path | None) -> None:
    # Although the runs may be read twice, query Slurm and print each warning only once.
    warn_once = cache(warn)

    @cache
    def ask_slurm(*ids: str) -> Mapping[str, JobInfo] | None:
        return query_jobs_or_warn(ids, warn_once)

    def query(ids: Sequence[str]) -> Mapping[str, JobInfo] | None:
        return ask_slurm(*ids)

    max_ended = None if show_all or as_json else MAX_ENDED_RUNS
    statuses, num_hidden = read_all(max_ended, query, {}, warn_once, below)
    if as_json:
        _echo_json_of(statuses)
        return
    if not statuses:
        where = "" if below is None else f" in {below}"
        click.echo(f"no runs yet{where}: `trainkit submit` starts one", err=True)
        return
    if show_all:
        shown: list[RunStatus | GroupStatus | Calls] = [*statuses]
    else:
        shown = with_calls(statuses)
        # The runs of one function share a line, which leaves room in the table, so read more runs.
        if num_hidden and len(shown) < len(statuses):
            statuses, num_hidden = read_all(MAX_READ, query, {}, warn_once, below)
            shown = with_calls(statuses)
    shown.sort(key=lambda status: not status.is_active)
    num_shown = len(shown)
    if not show_all:
        num_shown = min(num_shown, MAX_ENDED_RUNS + sum(status.is_active for status in shown))
    click.echo(_runs_table(runs_rows(shown[:num_shown], Path.cwd()), terminal_width()))
    num_hidden += sum(len(one.runs) if isinstance(one, Calls) else 1 for one in shown[num_shown:])
    if num_hidden:
        click.echo(_not_shown(num_hidden))
    elif any(isinstance(one, Calls) for one in shown):
        click.echo("--all shows each run of a function on its own line")


def _show_chosen(choice: Choice, below: Path | None, as_json: bool) -> None:
    """Print the selected runs, with a column for each key used for filtering or sorting."""
    chosen = choice.apply(read_all(None, lambda ids: query_jobs_or_warn(ids, warn), {}, warn, below)[0])
    statuses = [run.status for run in chosen]
    if as_json:
        _echo_json_of(statuses)
    elif not chosen:
        click.echo("no run matches: `trainkit status --all` lists all runs", err=True)
    else:
        more = [choice.headings, *(run.texts(choice.columns) for run in chosen)]
        rows = zip(runs_rows(statuses, Path.cwd()), more, strict=True)
        click.echo(_runs_table([[*row, *own] for row, own in rows], terminal_width()))


def _echo_json_of(statuses: Sequence[RunStatus | GroupStatus]) -> None:
    """Print a list of runs as JSON; groups are printed without their trials."""
    values = [status.to_dict() for status in statuses]
    for value in values:
        value.pop("points", None)
    echo_json(values)


def _runs_table(rows: Sequence[Sequence[str]], fit: int | None) -> str:
    """Return a table with one line per run, at most `fit` characters wide.

    In a narrow terminal, a folder common to all runs is printed above the table, and the least important
    columns are omitted. `trainkit status RUN` shows the omitted values.
    """
    if fit is None:
        return table(rows)
    places = [Path(name) for name, *_ in rows[1:]]
    folders = {place.parent for place in places}
    shared = folders.pop() if len(folders) == 1 else Path()
    if shared.is_absolute():
        rows = [rows[0], *([place.name, *own] for place, (_, *own) in zip(places, rows[1:], strict=True))]
    widths = [min(MIN_NAME, max(map(text_width, cells))) for cells in zip(*rows, strict=True)]
    kept = [index for index in range(len(widths)) if index not in MINOR]
    for index in reversed(MINOR):
        if sum(widths[one] + len(GAP) for one in (*kept, index)) <= fit + len(GAP):
            kept.append(index)
    kept.sort()
    text = table([[row[index] for index in kept] for row in rows], fit=fit, cuts=True)
    return f"in {cut_in_the_middle(str(shared), fit - 4)}:\n{text}" if shared.is_absolute() else text


def runs_rows(statuses: Sequence[RunStatus | GroupStatus | Calls], cwd: Path) -> list[Sequence[str]]:
    """Return a heading row and one row per run or group.

    Each run is identified by its folder, because several runs may have the same name.
    """
    speeds = [speed(one.progress) for one in statuses if isinstance(one, RunStatus)]
    units = {unit for value, unit in speeds if value is not None}
    if units != {"samples"}:
        return [HEADING, *(_row(status, cwd, "tokens") for status in statuses)]
    headings = ["SAMPLES/S" if one == "TOKENS/S" else one for one in HEADING]
    return [headings, *(_row(status, cwd, "samples") for status in statuses)]


def speed(progress: Progress) -> tuple[float | None, str]:
    """Return the number of tokens or samples that a run processes per second, and the unit.

    The unit is ``samples`` if the run does not count tokens, else ``tokens``.
    """
    if progress.samples_per_s is not None:
        return progress.samples_per_s, "samples"
    return progress.tokens_per_s, "tokens"


def _row(status: RunStatus | GroupStatus | Calls, cwd: Path, usual: str) -> Sequence[str]:
    """Return the table row for a run, a group, or the runs of a Python function.

    The unit of the speed is omitted if it equals `usual`.
    """
    if isinstance(status, Calls):
        return status.row(cwd)
    place, age = relative_path(status.run_dir, cwd), duration(status.age_s)
    state = styled_state(status)
    if isinstance(status, GroupStatus):
        workers = f"{cell(status.num_nodes)} x {cell(status.workers_per_node)}"
        best = "-" if status.best is None else _best(status.best)
        if status.best is not None and status.ranking.metric != "loss":
            best = f"{status.ranking.metric} {best}"
        return place, state, "-", workers, "-", best, "-", age
    loss, (value, unit) = loss_text(status, cell(status.progress.loss, ".4f")), speed(status.progress)
    shown = cell(value, ",.0f") if unit == usual or value is None else f"{value:,.0f} {unit}"
    workers = workers_text(status.place)
    done = _steps(status.progress)
    return place, state, cell(status.attempt), workers, done, loss, shown, age


def workers_text(place: Place) -> str:
    """Return the number of nodes and of workers per node, such as ``2 x 8``."""
    return f"{cell(place.num_nodes)} x {cell(place.workers_per_node)}"


def styled_state(status: RunStatus | GroupStatus | TrialStatus) -> Styled:
    """Return a run's state, or a group's state counts, styled according to the worst state."""
    if isinstance(status, GroupStatus):
        return Styled(state_counts(status.states), state_style(next(iter(status.states), "")))
    since = status.progress.diverged_since if isinstance(status, RunStatus) else status.diverged_since
    style = state_style(status.state)
    return Styled(status.state, WATCH if since is not None and style == GOOD else style)


def run_details(status: RunStatus, rows: Mapping[str, Mapping[str, str]] = {}) -> str:
    """Return a run's details as text: its failure, followed by one value per line.

    `rows` contains the lines that capabilities add.
    """
    failed, run = status.failure, quote(shown_path(status.run_dir))
    reason = f" - {status.reason}" if status.reason else ""
    place, progress = status.place, status.progress
    workers = f"{workers_text(place)} on {cell(place.device)}"
    workers += f", partition {place.partition}" if place.partition else ""
    workers += f" ({place.gpu_type})" if place.gpu_type else ""
    job = cell(status.job_id) + (f" on {place.cluster}" if place.cluster else "")
    lines = {
        "run": status.name,
        "folder": status.run_dir,
        "command": join(status.command or ()),
        "state": Styled(f"{status.state}{reason}", styled_state(status).style),
        "attempt": f"{cell(status.attempt)} as {job}, started {duration(status.age_s)} ago",
        "workers": workers,
        "used": status.used.text(place.device),
    }
    if not status.is_command or progress.step is not None:
        first = progress.first_val_loss
        lines |= {
            "step": f"{_steps(progress)}, last metrics {duration(progress.metrics_age_s)} ago",
            "loss": loss_text(status, cell(progress.loss, ".4f")),
            "val loss": cell(progress.val_loss, ".4f") + ("" if first is None else f" (first: {first:.4f})"),
        }
        per_s, unit = speed(progress)
        if per_s is not None or not status.is_command:
            lines[f"{unit}/s"] = cell(per_s, ",.0f")
    if not status.is_command or status.checkpoint is not None:
        saved = status.checkpoint
        lines["checkpoint"] = cell(saved and shown_path(saved))
    is_failed = status.state in ("failed", "died")
    lines = placed("rows", lines, {label: text for own in rows.values() for label, text in own.items()}) | {
        "last event": status.last_event.line if status.last_event else "-",
        "restarts": restarts_line(status.restarts) if status.restarts else "",
        "failure": status.verdict.line if status.verdict and failed is None else "",
        "hint": (failed is None and status.verdict and status.verdict.hint) or "",
        "diagnosis": f"`trainkit diagnose {run}` shows the cause" if is_failed and not failed else "",
    }
    text = [] if failed is None else [*failure_lines(failed, run), ""]
    text[:1] = [painted(Styled(line, BAD)) for line in text[:1]]
    text.append(_details(lines))
    text += [painted(Styled(f"warning: {warning}", WATCH)) for warning in status.warnings]
    if status.batch_log:
        text += ["", "last lines of the batch script:", *(f"  {line}" for line in status.batch_log)]
    return "\n".join(text)


def restarts_line(restarts: Sequence[Restart]) -> str:
    """Return a one-line summary of all restarts: their number, their causes, and the duration of the last."""
    counts = Counter(restart.cause for restart in restarts)
    shown = [
        f"{count} {'requested' if cause == 'asked' else restart_cause(cause).words}"
        for cause, count in counts.most_common()
    ]
    last = restarts[-1]
    spans = {"save": last.save_s, "end": last.end_s, "queue": last.queue_s, "start": last.start_s}
    parts = [f"{word} {seconds:.1f}" for word, seconds in spans.items() if seconds is not None]
    took = f" in {last.total_s:.1f} s" if last.total_s is not None else ""
    split = f" ({', '.join(parts)})" if parts else ""
    failure = f"; {last.verdict.failure.line}" if last.verdict is not None else ""
    return f"{len(restarts)} ({', '.join(shown)}); last: {last.action}{took}{split}{failure}"


def _details(lines: Mapping[str, str]) -> str:
    """Return one line per non-empty value with its label, fitted to the terminal's width."""
    fit = terminal_width()
    shown = {key: [text] if fit is None else _fitted(key, text, fit - LABEL) for key, text in lines.items()}
    return "\n".join(
        f"{key if index == 0 else '':<10}  {painted(line)}"
        for key, texts in shown.items()
        for index, line in enumerate(texts)
        if line
    )


def _fitted(key: str, value: str, width: int) -> list[str]:
    """Return a value's lines; values whose labels are in `SHORTENED` or `WRAPPED` are fitted to the width."""
    texts = [value]
    if key in SHORTENED:
        texts = [SHORTENED[key](plain(value), width)]
    elif key in WRAPPED:
        texts = wrap(plain(value), max(MIN_NAME, width), break_long_words=False, break_on_hyphens=False)
    return [Styled(text, value.style) for text in texts] if isinstance(value, Styled) else texts


def trial_rows(
    status: GroupStatus,
    trials: Sequence[TrialStatus],
    more: Sequence[str] = (),
    max_reason: int = MAX_REASON,
) -> list[Sequence[str]]:
    """Return a heading row and one row per trial; `more` may add the columns ``step`` and ``age``.

    Reasons longer than `max_reason` characters are truncated.
    """
    keys = [key.upper() for key in short_keys(status.keys)]
    own = [key.upper() for key in more]
    rows: list[Sequence[str]] = [["TRIAL", "STATE", *own, *keys, status.ranking.heading, "REASON"]]
    for trial in trials:
        short = trial.problem
        if len(short) > max_reason:
            short = f"{short[: max_reason - 1]}…"
        name = os.path.relpath(trial.run_dir, status.run_dir)
        figures = {"step": cell(trial.step), "age": duration(trial.age_s)}
        own = [figures[key] for key in more]
        best = Styled(_best(trial), TITLE) if trial is status.best else _best(trial)
        rows.append([name, styled_state(trial), *own, *trial.texts(status.keys), best, short])
    return rows


def _not_shown(count: int) -> str:
    """Return the last line of a list, which states how many runs are omitted."""
    return f"{count:,} more runs are not shown; use --all to show all runs"


def _steps(progress: Progress) -> str:
    """Return the current and the total number of steps, such as ``12/200``.

    The total is omitted if it is unknown, for example for a COMMAND.
    """
    if progress.total_steps is None:
        return cell(progress.step)
    return f"{cell(progress.step)}/{progress.total_steps}"


def _best(trial: TrialStatus) -> str:
    return result_text(trial.score)


def _result(best: Best) -> str:
    return f"{best.metric} {result_text(best.value)} at step {cell(best.step)}"
