"""``trainkit diagnose``: the first failing rank of a run, its cause, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.observe.diagnose import Diagnosis
    from trainkit.observe.run_text import Evidence


@click.command(
    cls=Command,
    epilog=examples(
        "trainkit diagnose last", "trainkit diagnose last --attempt 1", "trainkit diagnose last --json"
    ),
)
@run_argument
@click.option(
    "--attempt",
    "number",
    type=click.IntRange(min=1),
    metavar="A",
    help="Attempt to diagnose; default: the newest.",
)
@json_option
def command(run_name: str, number: int | None, as_json: bool) -> int:
    """Name the first failing rank of RUN, the cause with its evidence, and what to do.

    Says `unknown`, with the last lines of that rank, where no known cause explains the failure. Your own
    causes go into ./signatures.yaml or ~/.config/trainkit/signatures.yaml.
    """
    from trainkit.control.jobs import query_job_status
    from trainkit.control.run_registry import find_run
    from trainkit.observe.diagnose import diagnose
    from trainkit.observe.signatures import load_signatures, user_files

    run = find_run(run_name)
    signatures = load_signatures(user_files(Path.cwd()))
    numbers = run.attempt_numbers()
    if not numbers:
        raise UsageError(
            f"{run.path} was never started", hint=f"`trainkit resume {quote(str(run.path))}` starts it"
        )
    if number is not None and number not in numbers:
        raise UsageError(f"{run.path} has no attempt {number}", hint=f"its attempts are 1 to {numbers[-1]}")
    attempt = run.attempt(number or numbers[-1])
    if attempt.number == numbers[-1]:
        status = query_job_status([run], _warn)[0]
        found = diagnose(attempt, signatures, status.alive, status.job)
    else:
        found = diagnose(attempt, signatures)  # the job's state is that of the newest attempt
    click.echo(json.dumps(found.to_dict(), ensure_ascii=False) if as_json else diagnosis_text(found))
    return EXIT_OK


def diagnosis_text(found: Diagnosis) -> str:
    """A diagnosis for a terminal."""
    if found.state == "nothing failed":
        lines = [f"nothing failed in attempt {found.attempt}: {found.cause}"]
    else:
        sure = "" if found.confidence == "certain" else f"  ({found.confidence})" if found.name else ""
        where = "" if found.rank is None else f"rank {found.rank}"
        where += f" on {found.host}" if found.host and where else found.host or ""
        where += "" if found.step is None else f" at step {found.step}"
        lines = [f"attempt {found.attempt} {found.state}: {found.title}{sure}", found.cause]
        lines += [f"first:  {where}"] if where else []
    lines += _section("evidence", [_line(item) for item in found.evidence])
    lines += _section("what to do", [f"- {item}" for item in found.advice])
    lines += _section(
        "last lines of that rank" if found.rank is not None else "last lines", map(_line, found.tail)
    )
    lines += _section("earlier failures, which --attempt explains", found.earlier)
    return "\n".join(lines)


def _section(title: str, lines: object) -> list[str]:
    listed = list(lines)  # type: ignore[call-overload]
    return ["", f"{title}:", *(f"  {line}" for line in listed)] if listed else []


def _line(item: Evidence) -> str:
    return f"{item.place}: {item.text}"


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)
