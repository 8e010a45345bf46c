"""Formats tables, times, amounts of memory, versions and suggestions for users and for Slurm.

None of the functions in this module have side effects.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from trainkit.terminal import Styled, cut, cut_in_the_middle, painted, plain, text_width, wrapped

JsonObject = dict[str, Any]
"""A JSON object whose schema is defined outside of trainkit, such as a config.json, a JSON schema, a YAML
file or a row of data. Objects whose schema trainkit defines are represented by dataclasses."""
GAP = "  "
RESERVED_NAME = re.compile(r"last|local-\d+|\d+(_\d+)?")
"""Matches names that a run cannot have, because commands interpret them as job ids or as the newest run."""


MIN_COLUMN = 12
"""Minimum width, in characters, to which a column may be narrowed to fit a table to a terminal."""


def table(
    rows: Sequence[Sequence[str]],
    right: Container[int] = (),
    max_width: int | None = None,
    *,
    fit: int | None = None,
    num_keys: int = 1,
    cuts: bool = False,
) -> str:
    """Format rows as aligned columns, one line per row; the first row can be a heading.

    Columns whose index is in `right` are right-aligned. A cell longer than `max_width` characters overflows
    its column instead of widening the column.

    If the table would be wider than `fit` characters, the widest columns are narrowed and their cells are
    wrapped. With `cuts`, cells are truncated instead of wrapped; in the first `num_keys` columns, cells are
    truncated in the middle. If the table is still too wide, its last columns are moved to a second table,
    which repeats the first `num_keys` columns.

    Styled cells contain escape sequences; `click.echo` removes these if the output is not a terminal.
    """
    widths = [max(text_width(plain(cell)) for cell in column) for column in zip(*rows, strict=True)]
    if fit is None:
        if max_width is not None:
            widths = [min(width, max_width) for width in widths[:-1]] + widths[-1:]
        return "\n".join(_line(row, widths, right) for row in rows)
    first = 0 if cuts else num_keys  # index of the first column to narrow; key columns are narrowed last
    least = [width if index < first else min(width, MIN_COLUMN) for index, width in enumerate(widths)]
    here = len(widths)
    while _width(least[:here]) > fit and here > num_keys + 1:
        here -= 1
    for columns in (range(first, here), range(here)):
        while columns and _width(widths[:here]) > fit and max(widths[at] for at in columns) > MIN_COLUMN:
            widths[max(columns, key=lambda index: widths[index])] -= 1
    lines = []
    for row in rows:
        cells = [
            _fitted(cell, width, (cut_in_the_middle if index < num_keys else cut) if cuts else None)
            for index, (cell, width) in enumerate(zip(row[:here], widths, strict=False))
        ]
        lines += [_line(line, widths, right) for line in zip_longest(*cells, fillvalue="")]
    if here < len(widths):
        rest = [*range(num_keys), *range(here, len(widths))]
        below = [[row[index] for index in rest] for row in rows]
        own = {place for place, index in enumerate(rest) if index in right}
        lines += ["", table(below, own, fit=fit, num_keys=num_keys, cuts=cuts)]
    return "\n".join(lines)


def _fitted(cell: str, width: int, shorten: Callable[[str, int], str] | None) -> list[str]:
    """Return the lines of a cell in the cell's style: wrapped to a width, or truncated to one line."""
    text = plain(cell)
    lines = wrapped(text, width) if shorten is None else [shorten(text, width)]
    return [Styled(line, cell.style) for line in lines] if isinstance(cell, Styled) else lines


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _line(cells: Sequence[str], widths: Sequence[int], right: Container[int]) -> str:
    aligned = []
    for index, (cell, width) in enumerate(zip(cells, widths, strict=False)):
        space = " " * (width - text_width(plain(cell)))
        aligned.append(space + painted(cell) if index in right else painted(cell) + space)
    return GAP.join(aligned).rstrip()


MASK = "***"
KEY_FORMATS = (
    r"()\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|sk-[\w-]{16,}|[rs]k_(?:live|test)_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{50,}|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|hvs\.[\w-]{20,}|dapi[0-9a-f]{32}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*){1,3})"
)
"""Matches well-known formats of API keys, and JSON Web Tokens."""
_TOKENIZER = ("eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "audio", "video")
NO_TOKENIZER = "".join(rf"(?<!{name}[_-])" for name in _TOKENIZER)
"""A prefix for ``token`` in a regular expression, which excludes a tokenizer's special tokens such as
``eos_token``."""
_QUOTE = r"""(?:\\?["']|&#3[49];|&quot;)?"""
"""Matches a quote, including an escaped quote in nested JSON or in HTML."""
_VALUE = r"""(?:(?<=["'])(?:(?!&#3|&quot;)[^"'\n<>\\])+|[^\s"'`<>;,|&\\]+)"""
_NO_NUMBER = r"(?![\d.,]+(?![\w.,]))"
_KEY = (
    r"[a-z]{0,8}(?:password|passwd|passphrase)|mysql_pwd|sshpass|secret(?:[_-]?key)?"
    r"|(?:api|account|(?:shared[_-]?)?access)[_-]?key"
)
_KEY_WORDS = "passw passphrase pwd sshpass secret api_key api-key apikey access account"
_TOKEN = (
    rf"\w{{1,30}}_{NO_TOKENIZER}token|(?:x-[\w-]{{1,30}}|private|auth|access|refresh|api|job|deploy)-token"
    r"|authtoken"
)
_ASSIGNS = rf"{_QUOTE}\s{{0,3}}[:=]\s{{0,3}}{_QUOTE}"
_AUTHORIZATION = rf"\b(?:proxy-)?authorization{_ASSIGNS}"
_IN_QUERY = r"(?:[?&]|&amp;|\\u0026)"
_OPTION = r"(?<![\w-])--?(?:[\w-]{1,30}[_-])?"
_BY_PROGRAM = (
    ("mysql mariadb 7z", r"mysql\w*|mariadb[\w-]*|7z\w?", r"-p"),
    ("sshpass mongo", r"sshpass|mongo\w*", r"-p\s*"),
    ("login", r"(?:docker|podman|helm|apptainer|singularity|oras)\s(?:[^\n;|&]*?\s)?login", r"-p\s*=?"),
    ("curl wget http", r"curl|wget|https?", r"(?:-u|-U|-a|--user|--proxy-user)[\s=]*[\"']?[^\s:\"']{1,100}:"),
    ("redis-cli", r"redis-cli", r"-a\s+"),
    ("ldap", r"ldap\w+", r"-w\s*"),
    ("sqlcmd zip", r"sqlcmd|zip|unzip", r"-P\s*"),
    ("smbclient rpcclient", r"smbclient|rpcclient", r"-U\s*[^\s%]{1,100}%"),
    ("openssl", r"openssl", r"(?:-\w+\s+)?pass:"),
)
"""Options that precede a password in some programs, but have another meaning in other programs."""
_SECRETS = (
    ("", KEY_FORMATS),
    (
        "-----begin",
        r"(-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)"
        r"(?:[\w+/=\\:,.()\s-]+?(?=-----END )|[\w+/=\\:,.()\s-]+)",
    ),
    # The password in a URL, or an API key in place of the user name. In an Oracle URL, the password follows a
    # slash.
    ("@", r"(?i)(\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@<>\"]{0,100}:)[^\s/<>\"]{1,200}(?=@)"),
    ("@", r"(\b[a-z][a-z0-9+.-]{1,20}://)(?=[\w-]*\d)[\w-]{20,}(?=@)"),
    ("jdbc:oracle", r"(?i)(\bjdbc:oracle:\w+:[^\s/@]{1,100}/)[^\s/@]{1,100}(?=@)"),
    (
        "hooks .org/bot",
        r"(hooks\.slack\.com/\w+/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/bot"
        r"|\.webhook\.office\.com/\w+/)[\w/:@.-]+",
    ),
    # Signed URLs, and keys in a query string.
    (
        "signature security-token credential",
        r"(?i)(\b(?:x-[a-z]{2,4}-(?:signature|security-token|credential)|sharedaccesssignature)=)" + _VALUE,
    ),
    ("sig= signature= token= auth=", rf"(?i)({_IN_QUERY}(?:sig|signature|token|auth)=)(?!\$){_VALUE}"),
    ("key=", rf"(?i)({_IN_QUERY}key=)(?=[\w.-]{{16}}){_VALUE}"),
    ("sig", rf"(?i)(\b(?:sig|signature){_QUOTE}[:=]\s?{_QUOTE})(?=[\w%+/=-]{{20}}){_VALUE}"),
    # Authorization headers of HTTP.
    ("digest", rf"(?i)({_AUTHORIZATION}digest\s)[^\n<]+"),
    (
        "authorization",
        rf"(?i)({_AUTHORIZATION}(?:(?:basic|bearer|token|negotiate|apikey|key)\s{{1,3}})?)"
        rf"(?!digest\s|aws4-|\$|(?:null|none|true|false|required|failed)\b){_VALUE}",
    ),
    ("cookie:", r"(?i)(\b(?:set-)?cookie:\s?)[^\n\"'<]+"),
    ("bearer", r"(?i)\b(bearer\s{1,3})[\w.~+/=-]{8,}"),
    # NAME=VALUE and NAME: VALUE, including in connection strings.
    (_KEY_WORDS, rf"(?i)\b((?:[\w-]{{1,30}}[_-])?(?:{_KEY})\b{_ASSIGNS})(?!\$){_VALUE}"),
    ("token", rf"(?i)\b((?:{_TOKEN})\b{_ASSIGNS})(?!\$){_NO_NUMBER}{_VALUE}"),
    ("token", rf"(?i)(\btoken{_ASSIGNS})(?=[\w.-]*\d)(?=[\w.-]*[a-z])[\w.-]{{16,}}"),
    ("pwd", rf"(?i)(;\s?pwd\s?=\s?){_VALUE}"),
    # A line of .netrc, including in a diff.
    ("password", r"(\b(?:machine\s+\S+|default)(?:[\s+]+(?:login|account)\s+\S+)+[\s+]+password\s+)\S+"),
    ("machine", r"(\bmachine\s+[\w-]+\.[\w.-]+[\s+]+password\s+)\S+"),
    # Command-line options.
    (
        f"{_KEY_WORDS} credential",
        rf"(?i)({_OPTION}(?:{_KEY}|credentials?)(?:\s{{1,3}}|=){_QUOTE})(?![-$]){_VALUE}",
    ),
    (
        "-pass -pwd _pass _pwd token",
        rf"(?i)({_OPTION}(?:pass|pwd|{NO_TOKENIZER}token)(?:\s{{1,3}}|=){_QUOTE})(?![-$]){_NO_NUMBER}{_VALUE}",
    ),
    *(
        (
            words,
            rf"((?<![\w.-])(?:{program})\s(?:[^\n;|&]{{0,300}}?\s)??[\"']?{option}[\"']?)(?![\s$]){_VALUE}",
        )
        for words, program, option in _BY_PROGRAM
    ),
    # After -p, mask only values with upper-case and lower-case letters and digits. Any other value is
    # probably a number, a partition name, or part of a longer option such as -pix_fmt.
    ("-p", rf"((?<![\w-])-p)(?![/.~])(?=[^\s\d]*\d)(?=[^\sA-Z]*[A-Z])(?=[^\sa-z]*[a-z])(?=\S{{8}}){_VALUE}"),
)
"""Each entry consists of lowercase words, separated by spaces, and a pattern that matches a secret. A text is
searched for a pattern only if it contains one of the pattern's words."""
_PATTERNS_BY_WORD = {
    word: [index for index, (words, _) in enumerate(_SECRETS) if word in words.split(" ")]
    for word in sorted({word for words, _ in _SECRETS for word in words.split(" ")})
}
"""Maps each word to the indices of its entries in ``_SECRETS``. Each word is searched for only once per text,
to make masking fast."""


def mask_secrets(text: str) -> str:
    """Replace everything that looks like a key or a password in a text with `***`.

    The masked text can be shown to others or stored in a file.
    """
    lowered = text.lower()
    found = {index for word, patterns in _PATTERNS_BY_WORD.items() if word in lowered for index in patterns}
    for index in sorted(found):
        _, pattern = _SECRETS[index]  # Compile the pattern on first use, because most processes mask nothing.
        text = re.sub(pattern, rf"\1{MASK}", text)
    return text


def masked_value(value: object, key: str) -> str:
    """Return a key's value as a user would type it, with `***` for everything that looks like a secret."""
    before = f"{key}: "
    return mask_secrets(before + shown_value(value)).removeprefix(before)


def cell(value: object, spec: str = "") -> str:
    """Format a value for a table; ``-`` for None."""
    return "-" if value is None else format(value, spec)


def duration(seconds: float | None) -> str:
    """Format a duration with at most two units: ``42s``, ``3m10s``, ``5h02m``, ``2d03h``; ``-`` for None."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < _DAY_S:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // _DAY_S}d{whole % _DAY_S // 3600:02d}h"


def _time_of_workers(hours: float) -> tuple[str, str]:
    """Return the total time of all workers as an amount and a unit: hours, minutes or seconds."""
    for unit, amount in (("hour", hours), ("minute", 60 * hours)):
        if amount >= (0.1 if unit == "hour" else 1):
            return (number(round(amount, 2)) if unit == "hour" else f"{amount:.1f}"), unit
    return f"{3600 * hours:.1f}", "second"


def hours_text(hours: float | None) -> str:
    """Format hours for a column headed "hours": ``12.5``, but ``4.2 min`` or ``1.7 s`` below 0.1 hours."""
    if hours is None:
        return "-"
    amount, unit = _time_of_workers(hours)
    return amount if unit == "hour" else f"{amount} {'min' if unit == 'minute' else 's'}"


def worker_time(hours: float, worker: str) -> str:
    """Format the total time of all workers: ``12.5 GPU-hours``, ``4.2 GPU-minutes``, ``1.7 GPU-seconds``."""
    amount, unit = _time_of_workers(hours)
    return f"{amount} {worker}-{unit}s"


def plural(count: int | None, noun: str) -> str:
    """Format a number with its noun: ``1 node``, ``2 nodes``, ``1,200 processes``."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{cell(count, ',')} {noun}{ending}"


def shown(values: Mapping[str, object]) -> str:
    """Format a mapping as ``optimizer.lr=0.1, seed=1``."""
    return ", ".join(f"{key}={shown_value(value)}" for key, value in values.items())


def shown_value(value: object) -> str:
    """Return a value as a user would type it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the last part of each dotted key, or the full key if another key has the same last part."""
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(part) > 1 else part for key, part in zip(keys, last, strict=True)]


MAX_SPANS = 8


def rank_list(ranks: Sequence[int]) -> str:
    """Format rank numbers compactly, such as ``rank 3`` or ``ranks 0-2,4``; see `spans`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {spans(sorted(ranks))}"


def spans(numbers: Sequence[int]) -> str:
    """Format increasing numbers compactly, such as ``0-2,4``.

    After `MAX_SPANS` spans, the text ends with, for example, ``and 504 more``.
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    first, num_more = found[:MAX_SPANS], sum(map(len, found[MAX_SPANS:]))
    shown = ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in first)
    return f"{shown} and {num_more:,} more" if num_more else shown


def size(num_bytes: float) -> str:
    """Format an amount of data with its unit: ``512 bytes``, ``1.5 MiB``."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def number(value: float | None) -> str:
    """Format a number with four significant digits; ``-`` for None and for non-finite values.

    Numbers from 10,000 up to 1e12 keep all integer digits.
    """
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if 10_000 <= abs(float(f"{value:.4g}")) < 1e12 else f"{value:.4g}"


def result_text(value: float | None) -> str:
    """Format a result with four decimals, or with significant digits if it is below 0.001; ``-`` for None."""
    return number(value) if value and abs(value) < 0.001 else cell(value, ".4f")


def near(word: str, words: Iterable[str], similar: float = 0.6) -> str | None:
    """Return the candidate in `words` that is most similar to `word`, or None if none is similar enough.

    `similar` is the minimum similarity, from 0 to 1 (identical words).
    """
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, list(words), n=1, cutoff=similar)), None)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return the start of a hint that suggests the most similar word, or "" if no word is similar."""
    match = near(word, words)
    return f"did you mean {match}? " if match else ""


def there_are(numbers: Sequence[int]) -> str:
    """Describe consecutive numbers for use in a hint: ``there is only 1``, or ``there are 1 to 4``."""
    return f"there is only {numbers[0]}" if len(numbers) == 1 else f"there are {numbers[0]} to {numbers[-1]}"


MIB = 2**20
GIB = 2**30
_DAY_S = 86_400
MEMORY = r"^(\d+(?:\.\d+)?) *(?:([KMGTPkmgtp])(?:[iI]?[bB])?n?|([bB]|bytes))?$"
"""Matches an amount of memory: a number with an optional unit. sacct marks amounts per node with an `n`, as
in `28Gn`."""
_SLURM_MEMORY = re.compile(r"\d+[KMGT]?", re.ASCII)


def time_limit_s(text: str) -> int | None:
    """Return a Slurm time limit in seconds, or None for no limit, which is written as 0.

    Accepts Slurm's formats: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` and ``D-H:M:S``.
    """
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0, 0)[:3]
    elif len(parts) == 1:
        hours, minutes, seconds = 0, parts[0], 0
    else:
        hours, minutes, seconds = (0, *parts) if len(parts) == 2 else parts
    return (int(days or 0) * _DAY_S + (hours * 60 + minutes) * 60 + seconds) or None


def time_text(seconds: int) -> str:
    """Format a number of seconds as ``HH:MM:SS`` or ``D-HH:MM:SS``."""
    days, rest = divmod(seconds, _DAY_S)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def memory_mib(text: str) -> int | None:
    """Convert an amount such as ``64G``, ``3.5 GiB`` or ``28gb`` to MiB, rounding up.

    Return None for ``0``, which means all of the node's memory. As in Slurm, every unit is a power of 1024,
    and a number without a unit is in MiB. Raises ValueError if the text is not an amount of memory.
    """
    match = re.fullmatch(MEMORY, text, re.ASCII)
    if match is None or ("." in match[1] and match[2] == match[3] is None):
        raise ValueError(f"{text!r} is not an amount of memory")
    power = 0 if match[3] else " KMGTP".index((match[2] or "M").upper())
    return math.ceil(float(match[1]) * 1024 ** (power - 2)) or None


def slurm_memory(text: str) -> str:
    """Convert an amount of memory to a form that sbatch accepts; raise ValueError if it is not an amount.

    Amounts that sbatch accepts are returned unchanged.
    """
    return text if _SLURM_MEMORY.fullmatch(text) else memory_text(memory_mib(text) or 0)


def memory_text(mib: float) -> str:
    """Format an amount of memory as a whole number with the largest possible unit: M, G or T."""
    number = int(mib)
    for unit in ("M", "G"):
        if number % 1024 or not number:
            return f"{number}{unit}"
        number //= 1024
    return f"{number}T"


def version_text(version: tuple[int, ...]) -> str:
    """Format a Slurm version, for example ``22.05.8``."""
    return ".".join(f"{part:02}" if place == 1 else str(part) for place, part in enumerate(version))
