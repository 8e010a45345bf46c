"""Reject secrets in files that a run needs, and mask secrets in files that are only informational."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import translate
from itertools import pairwise
from pathlib import PurePosixPath
from urllib.parse import quote as url_quote

from trainkit.config.validation import LOOKS_SECRET, MIN_SECRET_CHARS, written_secrets
from trainkit.errors import UsageError
from trainkit.formats import KEY_FORMATS, MASK, mask_secrets
from trainkit.quoting import quote

_ASSIGNMENT = re.compile(r"(?P<name>[\w.-]+)=(?P<value>.*)", re.DOTALL)
_INNER_OPTION = re.compile(r"(?<!\S)(?P<option>-[\w-]+)(?P<gap>=|[ \t]+)(?P<value>[^\s$-]\S*)")
"""Matches an option within a single argument, as in ``sh -c 'train --token VALUE'``."""
CONTEXT_CHARS = 400
"""Number of characters before an argument that are passed to `mask_secrets` as context."""
_NUMBER = re.compile(r"[\d.,_e+-]+")
_COUNT = re.compile(r"(?:token|key)s?$", re.IGNORECASE)
_NAME = r"(?P<name>[A-Za-z_][\w.-]*)"
_SHELL_VALUE = re.compile(rf"(?<![\w.-]){_NAME}=(?P<value>[^\s\"'$`(,)\[\]{{}};]{{{MIN_SECRET_CHARS},}})")
_QUOTED_VALUE = re.compile(
    rf"(?<![\w.-]){_NAME}[\"']?\s*[=:]\s*(?P<quote>[\"'])(?P<value>[^\"'\s]{{{MIN_SECRET_CHARS},}})(?P=quote)"
)
_SECTION = re.compile(r"^diff --git ", re.MULTILINE)
_FILES = (
    ".env .env.* *.env .netrc _netrc .pypirc .git-credentials .htpasswd kaggle.json"
    " *.pem *.key *.p12 *.pfx *.jks id_rsa* id_dsa* id_ecdsa* id_ed25519*"
)
_SECRET_FILE = re.compile("|".join(map(translate, _FILES.split())))
_HARMLESS_FILE = re.compile(r"\.pub$|example|sample|template|\.dist$", re.IGNORECASE)


def looks_secret(name: str) -> bool:
    """Return whether files with this name usually contain a key or password."""
    return _SECRET_FILE.match(name) is not None and not _HARMLESS_FILE.search(name)


def without_secrets(argv: Sequence[str], secrets: Sequence[str]) -> list[str]:
    """Return a command line, masking values that look like secrets or have a secret's name with `***`.

    `secrets` contains the variable names in `launch.secrets`.
    """
    masked: list[str] = []
    line = ""
    for before, word in pairwise(["", *argv]):
        if _is_secret_option(before) and not word.startswith(("-", "$")) and not _is_count(before, word):
            found = MASK
        else:
            found = mask_secrets(line + _masked_word(word, secrets))
            found = found.removeprefix(line) if found.startswith(line) else MASK
        masked.append(MASK if found.startswith(MASK) else found)
        # Keep the preceding words as context, because the meaning of `-p` depends on the program.
        line = f"{line}{masked[-1]} "[-CONTEXT_CHARS:]
    return masked


def secret_options(command: Sequence[str]) -> Iterator[str]:
    """Yield the options in a command whose values look like secrets, such as `--api-key`.

    A reference to an environment variable is not considered a secret.
    """
    masked = without_secrets(command, ())
    for index, (word, following) in enumerate(pairwise([*command, ""])):
        if len(inner := word.split()) > 1:  # The argument of `sh -c` is itself a command line.
            yield from secret_options(inner)
            continue
        option, separator, value = word.partition("=")
        value = value if separator else following
        if (
            _is_secret_option(option)
            and len(value) >= MIN_SECRET_CHARS
            and not value.startswith(("-", "$"))
            and not _is_count(option, value)
        ):
            yield option
        elif masked[index] not in (word, MASK) or re.search(KEY_FORMATS, word):
            yield (
                option
                if separator and mask_secrets(option) == option and option[:1] == "-"
                else "an argument"
            )


def _is_secret_option(word: str) -> bool:
    return word.startswith("-") and LOOKS_SECRET.search(word) is not None


def _is_count(name: str, value: str) -> bool:
    """Return whether an option's value is a harmless number, as in ``--max-tokens 4096``."""
    return _NUMBER.fullmatch(value) is not None and _COUNT.search(name) is not None


def _masked_word(word: str, secrets: Sequence[str]) -> str:
    option, separator, assignment = word.partition("--set=")
    prefix = separator if separator and not option else ""
    match = _ASSIGNMENT.fullmatch(assignment if prefix else word)
    if match is None:
        return mask_secrets(_INNER_OPTION.sub(_masked_option, word))
    last = match["name"].rpartition(".")[2]
    is_secret = last in secrets or LOOKS_SECRET.search(last)
    if is_secret and (last.isupper() or not _is_count(last, match["value"].partition(" ")[0])):
        return f"{prefix}{match['name']}={MASK}"
    return mask_secrets(word)


def _masked_option(match: re.Match[str]) -> str:
    option, gap, value = match.groups()
    return match[0] if not _is_secret_option(option) or _is_count(option, value) else f"{option}{gap}{MASK}"


def mask_diff(diff: str) -> str:
    """Mask secrets in a diff, and omit the content of files that usually contain secrets."""
    starts = [match.start() for match in _SECTION.finditer(diff)]
    sections = [
        diff[start:end] for start, end in zip([0, *starts], [*starts, len(diff)], strict=True) if end > start
    ]
    return "".join(map(_masked_section, sections))


def _masked_section(section: str) -> str:
    header, _, _ = section.partition("\n")
    if header.startswith("diff --git "):
        paths = re.split(r" \"?b/", header.removeprefix("diff --git "), maxsplit=1)
        if any(looks_secret(PurePosixPath(path.strip('"')).name) for path in paths):
            return f"{header}\n(omitted: files with this name usually contain secrets)\n"
    for pattern in (_SHELL_VALUE, _QUOTED_VALUE):
        section = pattern.sub(_masked_assignment, section)
    return mask_secrets(section)


def _masked_assignment(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    has_digit_and_letter = re.search(r"\d", value) is not None and re.search(r"[A-Za-z]", value) is not None
    # In code, lowercase names such as `key=` are often harmless, whereas uppercase names are shell variables.
    if (
        not LOOKS_SECRET.search(name)
        or _is_count(name, value)
        or not (name.isupper() or has_digit_and_letter)
    ):
        return match[0]
    start, end = match.span("value")
    return f"{match[0][: start - match.start()]}{MASK}{match[0][end - match.start() :]}"


def refuse_leaks(text: str, where: str, names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise UsageError if `text` contains the value of an environment variable in `names`.

    `where` is the file to which the text will be written, for example ``submit.sbatch``. The error message
    contains the name of the variable, but not its value.
    """
    if (name := leaked(text, names, environ)) is not None:
        raise UsageError(
            f"the value of {name} would be written into {where}",
            hint=f"remove it from the config and the command line: the job inherits {name} from this shell",
        )


def leaked(text: str, names: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the first variable in `names` whose value occurs in a text; None if there is none.

    Finds both the literal value and the value as escaped in scripts, JSON and URLs.
    """
    for name in filter(environ.get, names):
        # The lines of a multi-line key may be indented in the text, so search only for the longest line.
        line = max(environ[name].strip().splitlines() or [""], key=len)
        if len(line) >= MIN_SECRET_CHARS and any(spelling in text for spelling in _spellings(line)):
            return name
    return None


def refuse_secrets(command: Sequence[str], names: Sequence[str]) -> None:
    """Raise UsageError if a command contains a secret, because the command is stored in plan.json."""
    found = [name for word in command for name in written_secrets(word, names)]
    if found:
        raise UsageError(
            f"the command sets {found[0]}, which looks like a secret, and would be written to plan.json",
            hint=f"export {found[0]} in the shell instead; the job inherits it",
        )


def _spellings(value: str) -> Iterator[str]:
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield value.replace("'", "'\"'\"'")  # the value in bash's single quotes
    yield quote(value + "\n").removeprefix("$'").removesuffix("\\n'")  # the value in bash's $'…' quotes
    yield url_quote(value, safe="")
