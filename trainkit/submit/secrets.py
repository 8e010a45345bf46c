"""Secrets reach a job through its environment and stand in no file: this is what proves it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote as url_quote

from trainkit.config.validation import MIN_SECRET_CHARS, written_secrets
from trainkit.errors import UsageError
from trainkit.submit.quoting import quote


def present_secrets(names: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those of the named variables that are set, which the job will inherit."""
    return tuple(name for name in names if environ.get(name))


def refuse_leaks(text: str, where: str, names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise UsageError when the value of a named variable occurs in a text that is going to be written.

    `where` says which text, for example ``submit.sbatch``. The value is looked for as it is and as scripts,
    JSON and addresses spell it; the error names the variable only.
    """
    for name in present_secrets(names, environ):
        # Of a key of several lines the longest stands for all: the text may spread the lines.
        line = max(environ[name].strip().splitlines() or [""], key=len)
        if len(line) >= MIN_SECRET_CHARS and any(spelling in text for spelling in _spellings(line)):
            raise UsageError(
                f"the value of {name} would be written into {where}",
                hint=f"take it out of config and command line: the job inherits {name} from this shell",
            )


def refuse_secrets(command: Sequence[str], names: Sequence[str]) -> None:
    """Raise UsageError when a command sets a secret to a value of its own: it is written into plan.json."""
    found = [name for word in command for name in written_secrets(word, names)]
    if found:
        raise UsageError(
            f"the command sets {found[0]}, which looks like a secret, and its plan is written down",
            hint=f"export {found[0]} in the shell instead: the job inherits it",
        )


def _spellings(value: str) -> Iterator[str]:
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield value.replace("'", "'\"'\"'")  # within a quoted word of bash
    yield quote(value + "\n").removeprefix("$'").removesuffix("\\n'")  # within one with escapes
    yield url_quote(value, safe="")
