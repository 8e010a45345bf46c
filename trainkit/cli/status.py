"""``trainkit status``: what runs are doing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from trainkit.cli.options import examples, json_option
from trainkit.errors import EXIT_OK

if TYPE_CHECKING:
    from trainkit.observe.status import RunStatus

HEADING = ["NAME", "STATE", "ATTEMPT", "WORKERS", "STEP", "LOSS", "TOKENS/S", "AGE", "FOLDER"]


@click.command(epilog=examples("trainkit status", "trainkit status last", "trainkit status last --json"))
@click.argument("run_name", metavar="[RUN]", required=False)
@json_option
def command(run_name: str | None, as_json: bool) -> int:
    """All known runs, the newest first, or RUN in detail.

    RUN is a job id, a run name, a run folder or `last`.
    """
    from datetime import datetime, timezone

    from trainkit.observe.status import read_status
    from trainkit.observe.words import table
    from trainkit.submit.index import find_run, known_runs
    from trainkit.submit.steer import look_at

    now = datetime.now(timezone.utc)
    if run_name is not None:
        run = find_run(run_name)
        look = look_at([run], _warn)[0]
        status = read_status(run, look.alive, now, look.job)
        click.echo(json.dumps(status.to_dict(), ensure_ascii=False) if as_json else _details(status))
        return EXIT_OK
    runs = [known.run for known in known_runs()]
    looks = look_at(runs, _warn)
    statuses = [read_status(run, look.alive, now, look.job) for run, look in zip(runs, looks, strict=True)]
    if as_json:
        click.echo(json.dumps([status.to_dict() for status in statuses], ensure_ascii=False))
    elif statuses:
        click.echo(table([HEADING, *(_row(status) for status in statuses)]))
    else:
        click.echo("no runs yet: `trainkit submit configs/quickstart.yaml` starts one", err=True)
    return EXIT_OK


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def _row(status: RunStatus) -> list[str]:
    from trainkit.observe.words import duration

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
    from trainkit.observe.words import duration, event_line, verdict_line

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
