"""``trainkit status``: what runs are doing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from trainkit.cli.options import examples, json_option
from trainkit.errors import EXIT_OK

if TYPE_CHECKING:
    from trainkit.observe.group import GroupStatus, PointStatus
    from trainkit.observe.status import RunStatus
    from trainkit.rundir import RunDir
    from trainkit.rungroup import RunGroup


HEADING = ["NAME", "STATE", "ATTEMPT", "WORKERS", "STEP", "LOSS", "TOKENS/S", "AGE", "FOLDER"]


@click.command(epilog=examples("trainkit status", "trainkit status last", "trainkit status last --json"))
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option("--all", "show_all", is_flag=True, help="All runs of a group, not only those that tell most.")
@json_option
def command(run_name: str | None, show_all: bool, as_json: bool) -> int:
    """All known runs, the newest first, or RUN in detail.

    RUN is a job id, a run name, a run folder or `last`. A group of runs is one line in the list of all; in
    detail, its runs are counted and listed, what failed first.
    """
    from trainkit.control.run_registry import find_run_or_group
    from trainkit.rundir import RunDir

    if run_name is None:
        return _show_all_runs(as_json)
    found = find_run_or_group(run_name)
    return _show_run(found, as_json) if isinstance(found, RunDir) else _show_group(found, show_all, as_json)


def _show_run(run: RunDir, as_json: bool) -> int:
    from trainkit.control.jobs import job_status
    from trainkit.observe.status import read_status

    look = job_status([run], _warn)[0]
    status = read_status(run, look.alive, _now(), look.job)
    click.echo(json.dumps(status.to_dict(), ensure_ascii=False) if as_json else _details(status))
    return EXIT_OK


def _show_group(group: RunGroup, show_all: bool, as_json: bool) -> int:
    from trainkit.control.groups import recall_job_id
    from trainkit.control.jobs import ask_slurm
    from trainkit.observe.group import GroupLook

    recall_job_id(group)
    look = GroupLook(group)
    status = look.status(ask_slurm(look.open_ids, _warn), _now())
    if as_json:
        click.echo(json.dumps(status.to_dict(), ensure_ascii=False))
    else:
        click.echo(group_details(status, show_all))
    return EXIT_OK


def _show_all_runs(as_json: bool) -> int:
    from trainkit.control.jobs import ask_slurm, looks, slurm_ids
    from trainkit.control.run_registry import known_runs
    from trainkit.observe.group import GroupLook
    from trainkit.observe.status import read_status
    from trainkit.observe.text import table

    known = known_runs()
    runs = [item.run for item in known if not item.is_group]
    groups = {item.run.path: GroupLook(item.group) for item in known if item.is_group}
    ids = slurm_ids(runs) + [job_id for look in groups.values() for job_id in look.open_ids]
    jobs = ask_slurm(ids, _warn)
    seen = {run.path: look for run, look in zip(runs, looks(runs, jobs), strict=True)}
    rows, values = [], []
    for item in known:
        if item.is_group:
            group = groups[item.run.path].status(jobs, _now())
            rows.append(group_row(group))
            values.append(group.to_dict(with_points=False))
        else:
            look = seen[item.run.path]
            status = read_status(item.run, look.alive, _now(), look.job)
            rows.append(_row(status))
            values.append(status.to_dict())
    if as_json:
        click.echo(json.dumps(values, ensure_ascii=False))
    elif rows:
        click.echo(table([HEADING, *rows]))
    else:
        click.echo("no runs yet: `trainkit submit` starts one", err=True)
    return EXIT_OK


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def _row(status: RunStatus) -> list[str]:
    from trainkit.observe.text import duration

    return [
        status.name,
        status.state,
        _text(status.attempt),
        _workers(status),
        _steps(status),
        _number(status.loss, ".4f"),
        _number(status.tokens_per_s, ",.0f"),
        duration(status.age_s),
        status.run_dir,
    ]


def _details(status: RunStatus) -> str:
    from trainkit.observe.restarts import comebacks_line
    from trainkit.observe.text import duration, event_line, verdict_line

    reason = f" - {status.reason}" if status.reason else ""
    lines = {
        "run": status.name,
        "folder": status.run_dir,
        "state": f"{status.state}{reason}",
        "attempt": f"{_text(status.attempt)} as {_text(status.job_id)}, started {duration(status.age_s)} ago",
        "workers": f"{_workers(status)} on {_text(status.device)}",
        "step": f"{_steps(status)}, last metrics {duration(status.metrics_age_s)} ago",
        "loss": _number(status.loss, ".4f"),
        "val loss": _val_loss(status),
        "tokens/s": _number(status.tokens_per_s, ",.0f"),
        "checkpoint": _text(status.checkpoint),
        "last event": event_line(status.last_event) if status.last_event else "-",
    }
    if status.comebacks:
        lines["comebacks"] = comebacks_line(status.comebacks)
    if status.verdict:
        lines["verdict"] = verdict_line(status.verdict)
    text = [f"{key:<10}  {value}" for key, value in lines.items()]
    return "\n".join(text + [f"warning: {warning}" for warning in status.warnings])


def _val_loss(status: RunStatus) -> str:
    first = f" (the first was {status.first_val_loss:.4f})" if status.first_val_loss is not None else ""
    return _number(status.val_loss, ".4f") + first


def _workers(status: RunStatus) -> str:
    return f"{_text(status.num_nodes)} x {_text(status.workers_per_node)}"


def _steps(status: RunStatus) -> str:
    return f"{_text(status.step)}/{_text(status.total_steps)}"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None, spec: str) -> str:
    return format(value, spec) if isinstance(value, (int, float)) else "-"


SHOWN_POINTS = 20
LONGEST_REASON = 60


def group_row(status: GroupStatus) -> list[str]:
    """The line of a group in the table of all runs."""
    from trainkit.observe.text import duration

    best = status.best
    return [
        status.name,
        states_in_words(status),
        "-",
        f"{_text(status.num_nodes)} x {_text(status.workers_per_node)}",
        "-",
        "-" if best is None else _best(best),
        "-",
        duration(status.age_s),
        status.run_dir,
    ]


def states_in_words(status: GroupStatus) -> str:
    """``3 running, 97 pending``."""
    return ", ".join(f"{count:,} {state}" for state, count in status.states.items())


def group_details(status: GroupStatus, show_all: bool) -> str:
    """A group in detail; unless all are wanted, its most telling points only."""
    from trainkit.observe.group import most_telling
    from trainkit.observe.text import duration, table
    from trainkit.plan.sweep import short_keys

    best = status.best
    lines = {
        "group": status.name,
        "folder": status.run_dir,
        "job": f"{_text(status.job_id)} [{status.array}], submitted {duration(status.age_s)} ago",
        "runs": f"{len(status.points):,}: {states_in_words(status)}",
        "best": "-" if best is None else f"{best}: {_metric(best)} {_best(best)} at step {_step(best)}",
    }
    shown = status.points if show_all else most_telling(status.points, SHOWN_POINTS)
    heading = ["POINT", "STATE", *(key.upper() for key in short_keys(status.keys)), "BEST", "WHY"]
    text = [f"{key:<10}  {value}" for key, value in lines.items()]
    text += ["", table([heading, *(_point_row(point, status.keys) for point in shown)])]
    if len(shown) < len(status.points):
        text.append(f"and {len(status.points) - len(shown):,} more: --all shows them")
    return "\n".join(text)


def _point_row(point: PointStatus, keys: Sequence[str]) -> list[str]:
    from trainkit.plan.sweep import shown_value

    # What runs or has finished has no reason that a reader looks for.
    why = "" if point.state in ("running", "finished") else " ".join((point.reason or "").split())
    cut = why if len(why) <= LONGEST_REASON else why[: LONGEST_REASON - 1] + "…"
    values = (shown_value(point.values[key]) if key in point.values else "-" for key in keys)
    return [str(point.index), point.state, *values, _best(point), cut]


def _best(point: PointStatus) -> str:
    return f"{point.best['value']:.4f}" if point.best else "-"


def _metric(point: PointStatus) -> str:
    return str((point.best or {}).get("metric"))


def _step(point: PointStatus) -> str:
    return _text((point.best or {}).get("step"))
