"""Generates seeded damage to the files of a run, for `benchmarks.mutated_runs`.

Each function in `MUTATIONS` changes one entry of a run folder and returns a description of the change. There
are four kinds of mutations:

- other bytes of a file;
- another value in a JSON or YAML file;
- a file or folder that is replaced with an entry of another type;
- attempts and files that are replaced with the attempts and files of another run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainkit.run.manifest import SEAL, seal
from trainkit.run.rundir import MANIFEST_NAME

DEEP, LONG = "@DEEP@", "@LONG@"
"""Placeholders for a value of 100,000 nested brackets, and for a number with 5,000 digits."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1e308, 2**63, 1.5, "", "x", "\0", "../../x", "\x1b[31m", "\ud800", "1e9"),
    *([], [[]], {}, {"a": [1]}, [None], ["x", 1], {"": None}, DEEP, LONG, float("nan"), float("-inf")),
    *(-(10**30), 10**4000, "1970-01-01T00:00:00Z", "9999-12-31T23:59:59.999Z", "0001-01-01T00:00:00+14:00"),
    *("2026-01-01T12:00:00", "2026-13-45", "x" * 100_000, "~nobody/x", "s3://a/b", "/", ".", "-rf", "a\nb"),
)
Place = tuple[str | int, ...]
"""The keys and indices that lead to a value in its document; an empty place stands for the whole document."""
JSON_FILES = (".json", ".jsonl", ".yaml")


@dataclass(frozen=True)
class Change:
    """A value in a file that is to be replaced."""

    file: Path
    """Path of the file, relative to the run folder."""
    line: int | None
    """Line in a .jsonl file, counted from 0."""
    place: Place

    def __str__(self) -> str:
        where = "" if self.line is None else f":{self.line + 1}"
        return f"{self.file}{where} {'.'.join(map(str, self.place)) or 'whole'}"


def own_places(run: Path) -> list[Path]:
    """Return the files and folders of a run, except files written by the user."""
    found = (path for path in run.rglob("*") if not {"code", "work"} & set(path.relative_to(run).parts))
    return sorted(path for path in found if path.name != "mine.txt")


def own_files(run: Path) -> list[Path]:
    """Return the regular files of a run, except files written by the user."""
    return [path for path in own_places(run) if path.is_file() and not path.is_symlink()]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of every value in a document."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*place, key))


def document_of(name: str, text: str) -> Any:
    """Parse the content of a JSON or YAML file."""
    return yaml.load(text, yaml.CSafeLoader) if name.endswith(".yaml") else json.loads(text)


def value_at(document: Any, place: Place) -> Any:
    """Return the value at a place in a document."""
    for key in place:
        document = document[key]
    return document


def changed(text: str, change: Change, new: Callable[[Any, str | int], None]) -> str:
    """Return the text of a file after calling `new` with the parent and the key of the value to change."""
    if change.line is not None:
        lines = text.splitlines(keepends=True)
        own = Change(change.file.with_suffix(".json"), None, change.place)
        lines[change.line] = changed(lines[change.line], own, new) + "\n"
        return "".join(lines)
    document = {"": document_of(change.file.name, text)}
    path = ("", *change.place)
    new(value_at(document, path[:-1]), path[-1])
    whole = document.get("", {})
    is_yaml = change.file.suffix == ".yaml"
    written = yaml.safe_dump(whole) if is_yaml else json.dumps(whole, default=str)
    return written.replace(f'"{DEEP}"', DEEP).replace(DEEP, "[" * 100_000).replace(f'"{LONG}"', "9" * 5_000)


def replace_value(run: Path, change: Change, value: object) -> None:
    """Write another value to a place in a file."""
    _rewrite(run / change.file, change, lambda parent, key: parent.__setitem__(key, value))


def _rewrite(file: Path, change: Change, new: Callable[[Any, str | int], None]) -> None:
    text = changed(file.read_text(), change, new)
    if file.name == MANIFEST_NAME:  # otherwise the checksum in the manifest would be wrong
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            sealed = json.loads(text)
            text = json.dumps({**sealed, SEAL: seal(sealed)})
    file.write_text(text, errors="surrogatepass")


def make_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


IN_PLACE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to its folder": lambda path: path.symlink_to("."),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file of the user": lambda path: path.symlink_to(outside(path) / "mine.txt"),
    "a link to a folder of the user": lambda path: path.symlink_to(outside(path)),
    "unreadable": lambda path: (path.write_text("{}"), path.chmod(0)),
    "zeros": lambda path: path.write_bytes(bytes(100_000)),
    "a file": lambda path: path.write_text("x\n"),
    "an empty file": Path.touch,
}
"""Maps a description to a function that creates a replacement for a file or folder."""


def outside(path: Path) -> Path:
    """Return a folder of the user that is outside any run, and whose content must not change."""
    return next(parent for parent in path.parents if parent.name == "project").parent / "outside"


def put_in_place(path: Path, kind: str) -> None:
    """Replace a file or folder with an entry of another kind."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    IN_PLACE[kind](path)


def _cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _flip_bits(draw: random.Random, content: bytes) -> bytes:
    new = bytearray(content or b"\0")
    for _ in range(draw.choice((1, 2, 8, 64))):
        new[draw.randrange(len(new))] ^= 1 << draw.randrange(8)
    return bytes(new)


def _insert(*pieces: bytes) -> Callable[[random.Random, bytes], bytes]:
    def insert(draw: random.Random, content: bytes) -> bytes:
        at = draw.randrange(len(content) + 1)
        return content[:at] + draw.choice(pieces) + content[at:]

    return insert


def _of_lines(
    change: Callable[[random.Random, list[bytes]], object],
) -> Callable[[random.Random, bytes], bytes]:
    def of_lines(draw: random.Random, content: bytes) -> bytes:
        lines = content.splitlines(keepends=True) or [b"\n"]
        change(draw, lines)
        return b"".join(lines)

    return of_lines


def _scale(draw: random.Random, content: bytes) -> bytes:
    """Change the size or sign of some numbers in a text."""
    factor = draw.choice((b"-", b"9" * 30, b"0", b"1e", b"0x", b"-0."))
    return re.sub(rb"(?<![\w.-])(?=\d)", lambda match: factor if draw.random() < 0.05 else b"", content)


BYTES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "cut off": _cut,
    "without its start": lambda draw, content: content[draw.randrange(len(content) + 1) :],
    "with flipped bits": _flip_bits,
    "with a NUL": _insert(b"\0", bytes(4096)),
    "with invalid UTF-8": _insert(b"\xff\xfe", b"\xed\xa0\x80", b"\x80", b"\xf5\x80"),
    "with controls": _insert(b"\x1b]0;x\x07", b"\r", "\u2028\u202e\x85".encode(), b"\x0c", b"\x1a"),
    "with a long line": _insert(b"x" * 2_000_000, b'{"a": "' + b"x" * 2_000_000, b"[" * 200_000),
    "with other lines": _insert(
        b'\n{"event": "started"}\n', b"\nnull\n[]\n1\n", b"\n\n\n", b'\n{"attempt": 1}\n'
    ),
    "with a line twice": _of_lines(lambda draw, lines: lines.append(draw.choice(lines))),
    "without a line": _of_lines(lambda draw, lines: lines.remove(draw.choice(lines))),
    "with its lines in another order": _of_lines(lambda draw, lines: draw.shuffle(lines)),
    "with its lines reversed": _of_lines(lambda draw, lines: lines.reverse()),
    "with other numbers": _scale,
    "with Windows line ends": lambda draw, content: content.replace(b"\n", b"\r\n"),
    "with a byte order mark": lambda draw, content: b"\xef\xbb\xbf" + content,
    "in UTF-16": lambda draw, content: content.decode(errors="replace").encode("utf-16"),
    "random": lambda draw, content: draw.randbytes(len(content)),
    "twice": lambda draw, content: content + content,
    "empty": lambda draw, content: b"",
}
"""Maps a description to a function that returns other bytes for a file."""


def _other_bytes(draw: random.Random, run: Path, others: list[Path]) -> str:
    kind, file = draw.choice(list(BYTES)), draw.choice(own_files(run))
    file.write_bytes(BYTES[kind](draw, file.read_bytes()))
    return f"{file.relative_to(run)} is {kind}"


def _is_place(draw: random.Random, run: Path, others: list[Path]) -> str:
    kind, path = draw.choice(list(IN_PLACE)), draw.choice(own_places(run))
    put_in_place(path, kind)
    return f"{path.relative_to(run)} is {kind}"


def drawn_change(draw: random.Random, run: Path) -> Change:
    """Return a random value to change in a JSON or YAML file of a run."""
    file = draw.choice([path for path in own_files(run) if path.suffix in JSON_FILES])
    text, line = file.read_text(), None
    if file.suffix == ".jsonl":
        line = draw.randrange(len(text.splitlines()))
        text = text.splitlines()[line]
    found = list(places(document_of(file.name.removesuffix("l"), text)))
    return Change(file.relative_to(run), line, draw.choice(found))


def _other_value(draw: random.Random, run: Path, others: list[Path]) -> str:
    change, value = drawn_change(draw, run), draw.choice(VALUES)
    replace_value(run, change, value)
    return f"{change} = {str(value)[:40]!r}"


def _no_key(draw: random.Random, run: Path, others: list[Path]) -> str:
    change = drawn_change(draw, run)
    _rewrite(run / change.file, change, lambda parent, key: parent.pop(key))
    return f"{change} is left out"


def _other_key(draw: random.Random, run: Path, others: list[Path]) -> str:
    change, name = drawn_change(draw, run), draw.choice(("", "x", "\0", "more", "__class__", "version"))

    def rename(parent: Any, key: str | int) -> None:
        value = parent.pop(key)
        if isinstance(parent, dict):
            parent[name] = value

    _rewrite(run / change.file, change, rename)
    return f"{change} is called {name!r}"


def _text_of_number(draw: random.Random, run: Path, others: list[Path]) -> str:
    """Replace a value with a value of another type that has similar content."""
    change = drawn_change(draw, run)

    def convert(parent: Any, key: str | int) -> None:
        value = parent[key]
        parent[key] = draw.choice(
            (
                *([value], {"a": value}, str(value), {"": value} if isinstance(value, list) else [value] * 3),
                list(value) if isinstance(value, dict | str) else -value if isinstance(value, int) else [],
            )
        )

    _rewrite(run / change.file, change, convert)
    return f"{change} is of another type"


def _key_twice(draw: random.Random, run: Path, others: list[Path]) -> str:
    file = draw.choice([path for path in own_files(run) if path.suffix in JSON_FILES])
    keys = re.findall(r'"\w+": ', text := file.read_text()) or ['"x": ']
    value = draw.choice(("null", "[]", "1", '"x"', "{}"))
    key = draw.choice(keys)
    file.write_text(
        text.replace("{", f"{{{key}{value}, ", 1)
        if draw.random() < 0.5
        else text.replace("}", f", {key}{value}}}")
    )
    return f"{file.relative_to(run)} has {key}{value} twice"


OTHER_DATES = (
    *("9999-12-31T23:59:59.999Z", "0001-01-01T00:00:00.000Z", "2026-01-01T12:00:00", "", "yesterday"),
    *("2026-02-30T00:00:00Z", "2031-01-01T00:00:00.000+14:00", "1969-12-31T23:59:59Z", "2026-01-01", "12:00"),
)
OTHER_NAMES = (
    *("1", "999", "0001", "-1", "000", "002", "003", "4", "1" * 30, "latest", "x", "001 ", "٣"),
    *("step-00000099", "step--1", "step-x", "step-3", "\udcff", "1e3", ".hidden", "9" * 200),
)
"""Other names for attempts, checkpoints and trials."""
DATES = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")


def _other_dates(draw: random.Random, run: Path, others: list[Path]) -> str:
    file = draw.choice([path for path in own_files(run) if path.suffix in JSON_FILES])
    new = draw.choice(OTHER_DATES)
    share = draw.choice((0.05, 0.5, 1.0))
    text = DATES.sub(lambda match: new if draw.random() < share else match[0], file.read_text())
    file.write_text(text)
    return f"{file.relative_to(run)} has the date {new!r}"


def _swapped(draw: random.Random, run: Path, others: list[Path]) -> str:
    first, second = draw.sample(own_files(run), 2)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    return f"{first.relative_to(run)} and {second.relative_to(run)} are swapped"


def _of_another_run(draw: random.Random, run: Path, others: list[Path]) -> str:
    other = draw.choice(others)
    names = [path.relative_to(other) for path in own_files(other)]
    name = draw.choice(names)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(other / name, run / name)
    return f"{name} is replaced by the one of {other.name}"


def _attempt_folder(draw: random.Random, run: Path, others: list[Path]) -> str:
    """Remove, rename or duplicate an attempt, checkpoint or trial."""
    numbered = [path for path in own_places(run) if path.is_dir() and re.search(r"\d$", path.name)]
    path = draw.choice(numbered)
    name = draw.choice(OTHER_NAMES)
    target = path.with_name(name)
    how = draw.choice(("renamed to", "copied to", "moved into itself as", "linked as", "removed, not"))
    if how == "renamed to":
        path.rename(target)
    elif how == "copied to":
        shutil.copytree(path, target, symlinks=True)
    elif how == "linked as":
        target.symlink_to(path.name)
    elif how == "removed, not":
        shutil.rmtree(path)
    else:
        shutil.copytree(path, draw.choice(numbered) / name, symlinks=True)
    return f"{path.relative_to(run)} is {how} {name!r}"


MUTATIONS: tuple[Callable[[random.Random, Path, list[Path]], str], ...] = (
    *(_other_bytes, _other_bytes, _is_place, _other_value, _other_value, _other_value, _no_key, _other_key),
    *(_text_of_number, _text_of_number, _key_twice, _other_dates, _swapped, _of_another_run, _attempt_folder),
)
"""All mutations; mutations with many variants are listed more than once."""


def mutate(draw: random.Random, run: Path, others: list[Path]) -> str:
    """Apply one to three mutations to a run folder, and describe them; `others` are folders of other runs."""
    done: list[str] = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        try:
            done.append(draw.choice(MUTATIONS)(draw, run, others))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
            continue  # an earlier mutation, or the selected file, leaves nothing for this mutation to change
    return "; ".join(done)
