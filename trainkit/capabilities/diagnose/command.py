"""``trainkit diagnose``: prints the first failed rank of a run, the root cause, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING

from trainkit.backend import JobStatus
from trainkit.backends.jobs import query_jobs_or_warn, read_job_status
from trainkit.cli.help import as_command, option, warn
from trainkit.cli.options import COUNT, json_option, run_argument
from trainkit.cli.output import echo_result
from trainkit.folders import shown_path
from trainkit.run.registry import find_attempt, find_run
from trainkit.terminal import TITLE, Styled, painted, state_style

if TYPE_CHECKING:
    from trainkit.capabilities.diagnose.diagnose import Diagnosis
    from trainkit.capabilities.diagnose.texts import Evidence


COLUMNS = 80
MAX_EVIDENCE_LINES = 4
_UNBROKEN = "\0"
"""Stands for a space at which a line must not break."""


@as_command(
    "trainkit diagnose last",
    "trainkit diagnose last --attempt 1",
    "trainkit diagnose last --json",
)
@run_argument
@option("--attempt A", "Number of the attempt to diagnose; default: the newest.", name="number", type=COUNT)
@json_option("trainkit.capabilities.diagnose.diagnose:Diagnosis")
def command(run_name: str, number: int | None, as_json: bool) -> None:
    """Show which rank of RUN failed first, the cause with its evidence, and what to do about it.

    For an exception in your own code, `diagnose` names the file and the line. If no known cause explains the
    failure, the command prints `unknown` and the last lines of the failed rank's output.
    """
    from trainkit.capabilities.diagnose.diagnose import diagnose

    run = find_run(run_name)
    attempt = find_attempt(run, number)
    is_newest = attempt.number == run.attempt_numbers()[-1]
    job, status = read_job_status(run, lambda ids: query_jobs_or_warn(ids, warn) if is_newest else {})
    if not is_newest:
        status = JobStatus(False)
    found = diagnose(attempt, job, status.alive, status.job)
    echo_result(asdict(found), "\n".join(map(painted, diagnosis_lines(found))), as_json)


def diagnosis_lines(found: Diagnosis) -> list[str]:
    """Return a diagnosis as styled lines for the terminal."""
    if found.state == "nothing failed":
        lines = _wrapped(f"nothing failed in attempt {found.attempt}: {found.cause}")
    else:
        sure = "" if found.confidence == "certain" else f"  ({found.confidence})" if found.name else ""
        title = f"attempt {found.attempt} {found.state}: {found.title}{sure}"
        lines = [Styled(title, state_style(found.state)), *_wrapped(found.cause)]
        if place := _place(found):
            is_only_step = found.rank is None and not found.host
            label = "stopped" if found.state == "stopped" and is_only_step else "where:"
            label = "first failure:" if found.state == "failed" else label
            lines.append(f"{label} {place}")
        if found.code is not None:
            own = Styled(f"in your code: {found.code.place}", TITLE)
            lines += [own, *filter(None, [f"    {found.code.text}".rstrip()])]
    evidence = [line for item in found.evidence for line in _evidence(item)]
    lines += _section(f"evidence, in {shown_path(found.run_dir)}", evidence)
    lines += _section("what to do", [line for item in found.advice for line in _wrapped(item, "- ", "  ")])
    if found.events:
        shown = [f"{item.line}: {item.text}" for item in found.events]
        lines += _section(f"last events in {found.events[0].file}", shown)
    if found.tail:
        whose = "last lines" if found.rank is None else "last lines of the failed rank"
        tail = [item.text if item.line is None else f"{item.line}: {item.text}" for item in found.tail]
        lines += _section(f"{whose}, in {found.tail[0].file}", tail)
    lines += _section("earlier failures (use --attempt to diagnose them)", found.earlier)
    return lines


def _place(found: Diagnosis) -> str:
    """Return the first failed rank with its host and step, as far as they are known."""
    rank = "" if found.rank is None else f"rank {found.rank}"
    parts = [" on ".join(filter(None, (rank, found.host)))]
    parts += [] if found.step is None else [f"at step {found.step}"]
    return " ".join(filter(None, parts))


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", Styled(f"{title}:", TITLE), *(f"  {line}" for line in lines)] if lines else []


def _evidence(item: Evidence) -> list[str]:
    """Return the location of a piece of evidence as FILE:LINE for editors, and its first lines of text."""
    lines = _wrapped(item.text, "  ", "  ")
    more = [*lines[: MAX_EVIDENCE_LINES - 1], "  …"] if len(lines) > MAX_EVIDENCE_LINES else lines
    return [item.place, *more]


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Wrap a sentence to the terminal width, keeping commands in backquotes on one line for copying."""
    whole = re.sub(r"`[^`]*`", lambda match: match[0].replace(" ", _UNBROKEN), text)
    lines = wrap(
        whole,
        COLUMNS - len("  "),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_UNBROKEN, " ") for line in lines]
