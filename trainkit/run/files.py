"""The formats of a run's files: JSON, JSON Lines and times; files are replaced whole or grow by whole lines.

A reader never sees a partial file or line, except for a line cut off by a crash, which is skipped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from datetime import datetime, timezone
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from trainkit.errors import UsageError
from trainkit.folders import open_regular
from trainkit.trust import open_trusted


def utc_now() -> str:
    """The current time in the format of the run's files."""
    return as_utc(datetime.now(timezone.utc))


def as_utc(time: datetime, timespec: str = "milliseconds") -> str:
    """A timezone-aware time in the format of the run's files: ISO-8601, UTC."""
    return time.astimezone(timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def parse_time(text: object) -> datetime | None:
    """Parse a time from a run's file as one in UTC, also without a zone; None if it is not a time."""
    if not isinstance(text, str):
        return None
    try:
        time = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (ValueError, OverflowError):  # in UTC, the first and last hours have no year
        return None


def seconds_between(start: object, end: datetime | None) -> float | None:
    """Seconds from `start`, in the format of the run's files, to `end`; None if either is unknown."""
    started = parse_time(start)
    return None if started is None or end is None else (end - started).total_seconds()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: a reader sees either the old or the new content; only its owner reads it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # a write does not name its file
        os.unlink(name)
        raise


def open_private(path: Path) -> BinaryIO:
    """Open a file to read it; raises UsageError if another user could have written it."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise UsageError(
        f"{path} is not loaded: it must be a regular file that only you can read and write",
        hint="a pickle of somebody else can execute anything",
    )


def _encoded(text: str) -> bytes:
    r"""JSON in UTF-8; the bytes of a name that are no text become escapes such as ``\udcff``."""
    return text.encode("utf-8", errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value atomically, indented, with keys in their given order."""
    write_atomic(path, _encoded(json.dumps(value, indent=2, ensure_ascii=False) + "\n"))


def open_file(path: str | Path) -> BinaryIO:
    """Open a file of a run to read it; raises OSError for a pipe or device, which may never end."""
    return open_regular(path)


MAX_JSON_BYTES = 2**26


def read_json(path: str | Path, *, executes: bool = False) -> Any:
    """The JSON value in a file; raises OSError if it cannot be read, ValueError if it is not JSON.

    Of what a run `executes`, UsageError is raised as by `open_trusted`.
    """
    with (open_trusted if executes else open_file)(path) as stream:
        # Not read(MAX_JSON_BYTES), which would allocate as much for every small file.
        if os.fstat(stream.fileno()).st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES:,} bytes")
        content = stream.read()
    return _parsed_json(content.decode())


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _parsed_json(text: str) -> Any:
    try:
        return _encodable(json.loads(text), text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _encodable(value: Any, text: str) -> Any:
    """The JSON value of a text without halves of surrogate pairs, which no terminal or file takes."""
    if not _SURROGATE.search(text):
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", errors="replace"))


def read_object(path: str | Path) -> dict[str, object]:
    """The JSON object in a file; empty if it is missing, cannot be read or has something else in it."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json_in_place(path: Path, value: Any) -> None:
    """Write one JSON value into a file for which other hosts wait with `wait_for_json`; creates it if needed.

    The file stays the one that they have opened before. A reader may see a part of it: it is then not JSON.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


WAIT_POLL_S = 0.05


LONGEST_POLL_S = 1.0
"""Every node of a job may wait for the same file, on one file server."""


def wait_for_json(
    path: Path,
    timeout_s: float,
    *,
    accept: Callable[[Any], bool] = lambda value: True,
    pause: Callable[[float], object] = time.sleep,
    creates: bool = False,
) -> Any:
    """Wait until a file that another host writes is visible and `accept` is true; returns its JSON value.

    An NFS client remembers for up to a minute that a name is missing, but asks the server about a file that
    exists each time it is opened. With `creates`, the file is created empty if it is missing, for the other
    host to write it in place. Raises TimeoutError, with the reason, if the value does not appear in time.
    `pause` may raise to stop.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, WAIT_POLL_S
    while True:
        try:
            value = read_json(path) if not creates else _read_or_create(path)
            if accept(value):
                return value
            reason = "it is from another start"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error)
        if time.monotonic() > deadline_s:
            raise TimeoutError(reason)
        pause(pause_s)
        pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)


def _read_or_create(path: Path) -> Any:
    """The JSON value in a file, which is created empty if it is missing."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), encoding="utf-8") as stream:
        return _parsed_json(stream.read())


def refresh_listing(folder: Path) -> None:
    """Have the next listing of a folder come from the server.

    An NFS client may list a folder as it was up to a minute ago, unless it has changed the folder itself.
    """
    # On a full or unwritable disk, or without the folder, the listing is as good as it was.
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(prefix=".refresh.", dir=folder)
        os.close(handle)
        os.unlink(name)


def append_jsonl(path: Path, *records: dict[str, object]) -> None:
    """Append each record as one line, with a single write.

    Terminates a line that a crash cut off first, so that the new records start on their own lines.
    Raises OSError when they do not fit on the disk; the file is then unchanged.
    """
    texts = (json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records)
    line = _encoded("".join(f"{text}\n" for text in texts))
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written != len(line):
            try:  # a second write says whether the disk is full, or the user's quota
                written += os.write(descriptor, line[written:])
            finally:
                if written != len(line):
                    os.ftruncate(descriptor, size)
        if written != len(line):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
    finally:
        os.close(descriptor)


def read_jsonl(path: Path, words: Sequence[str] = (), every: int = 1) -> Iterator[dict[str, object]]:
    """The records of a file; skips lines cut off by a crash. A missing file has no records.

    With `words`, only the records whose lines contain one of them as a JSON string, as a key or value: most
    of the time goes into parsing lines. With `every`, only the lines 1, 1 + `every`, and so on.
    """
    with opened(path) as stream:
        if stream is not None:
            yield from _parsed(islice(forward_lines(stream), 0, None, every), words)


READ_BYTES = 16_384
MAX_LINE_BYTES = 2**20
"""A longer line is read in parts: one of gigabytes does not fit into the memory."""
MAX_RECORD_BYTES = 2**24
"""A record in a longer line is skipped."""
SEARCHED_BYTES = 2**26
"""How much of the end of a file is searched for its last records."""
MAX_SAMPLE_BYTES = 2**16


def read_jsonl_reversed(path: str | Path, words: Sequence[str] = ()) -> Iterator[dict[str, object]]:
    """Like `read_jsonl`, but the last record first, of the last `SEARCHED_BYTES`; reads only what is used."""
    with opened(path) as stream:
        if stream is not None:
            lines = reversed_lines(stream, stream.seek(0, os.SEEK_END), MAX_RECORD_BYTES)
            yield from _parsed(_first_bytes(lines), words)


def _first_bytes(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines until they have `SEARCHED_BYTES`, without the parts of those that are too long."""
    num_bytes = 0
    for line in lines:
        if len(line) < MAX_RECORD_BYTES:
            yield line
            num_bytes += len(line) if line.endswith(b"\n") else 0
        if num_bytes > SEARCHED_BYTES:
            return


def forward_lines(stream: BinaryIO, longest: int = MAX_RECORD_BYTES) -> Iterator[bytes]:
    """The lines from the position of a stream on; one longer than `longest` comes in parts."""
    return iter(partial(stream.readline, longest), b"")


def reversed_lines(stream: BinaryIO, position: int, longest: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The lines before a position with their ends, the last one first.

    The first one is what follows the last end of a line, often nothing. A line of at least `longest` bytes
    comes in parts, the last one first.
    """
    rest: list[bytes] = []  # the blocks, last first, of a line whose start is not read yet
    num_bytes, was_cut = 0, False
    while position > 0:
        size = min(max(READ_BYTES, num_bytes), position)
        position -= size
        stream.seek(position)
        first, *lines = stream.read(size).split(b"\n")
        if lines:
            lines[-1] = b"".join([lines[-1], *reversed(rest)])
            if lines[-1] or not was_cut:
                yield lines[-1]
            yield from (line + b"\n" for line in reversed(lines[:-1]))
            rest, num_bytes, was_cut = [b"\n"], 0, False
        rest.append(first)
        num_bytes += len(first)
        if num_bytes >= longest:
            yield b"".join(reversed(rest))
            rest, num_bytes, was_cut = [], 0, True
    if rest or not was_cut:
        yield b"".join(reversed(rest))


def sampled_lines(stream: BinaryIO, begin: int, end: int, count: int) -> list[bytes]:
    """The lines after `count` evenly spaced positions of a file."""
    lines = []
    for index in range(count):
        stream.seek(begin + (end - begin) * index // count)
        if stream.tell():
            stream.readline(MAX_SAMPLE_BYTES)
        lines.append(stream.readline(MAX_SAMPLE_BYTES))
    return lines


class Tail:
    """Reads what is appended to a file, which may not exist yet. Raises OSError."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path, self.position = path, position

    def size(self) -> int:
        """The size of the file; 0 without one."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def lines(self, *, unfinished: bool = False) -> Iterator[bytes]:
        """The lines since the last call; an unterminated last one only with `unfinished`.

        One longer than `MAX_RECORD_BYTES` comes in parts.
        """
        with opened(self.path) as stream:
            if stream is None:
                return
            stream.seek(self.position)
            for line in forward_lines(stream):
                if not (unfinished or line.endswith(b"\n") or len(line) == MAX_RECORD_BYTES):
                    return
                self.position += len(line)
                yield line

    def texts(self, *, unfinished: bool = False) -> Iterator[str]:
        """`lines` without their ends; `unfinished` is for a file that no longer grows."""
        for line in self.lines(unfinished=unfinished):
            yield line.removesuffix(b"\n").decode(errors="replace")

    def records(self, words: Sequence[str] = ()) -> Iterator[dict[str, object]]:
        """The records since the last call; `words` as in `read_jsonl`."""
        return _parsed(self.lines(), words)


_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO)


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO | None]:
    """A regular file; None for anything else, since reading a pipe or a device might never end."""
    stream = None
    try:
        stream = open_file(path)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
    with stream or contextlib.nullcontext():
        yield stream


def _parsed(lines: Iterable[bytes], words: Sequence[str]) -> Iterator[dict[str, object]]:
    wanted = re.compile(b'"(?:' + b"|".join(re.escape(word.encode()) for word in words) + b')"')
    return parse_records(line for line in lines if not words or wanted.search(line))


def parse_records(lines: Iterable[bytes]) -> Iterator[dict[str, object]]:
    """The records in some lines; skips what is none."""
    return (record for record in map(parse_record, lines) if record is not None)


DECODER = json.JSONDecoder(parse_constant=lambda name: None)
"""Reads NaN and Infinity, which are not JSON, as null."""


def parse_record(line: bytes) -> dict[str, object] | None:
    """The record in a line; None if it is not one."""
    text = line.decode("utf-8", errors="replace").strip()
    try:
        record, end = DECODER.raw_decode(text)  # twice as fast as `decode`
        record = _encodable(record, text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and end == len(text) else None


LARGEST = sys.float_info.max


def _is_finite(value: object) -> bool:
    """Whether a value is no number, or one that a float can be: a whole number in JSON may be larger."""
    return type(value) not in (int, float) or abs(cast(float, value)) <= LARGEST


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object of a run; a value of another type than asked for counts as missing, as does Infinity."""

    values: Mapping[str, object]

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> float | None:
        value: Any = self.values.get(key)
        # Not by `_is_finite`: of a large run, a screen asks for thousands.
        return value if type(value) in (int, float) and abs(value) <= LARGEST else None

    def count(self, key: str) -> int | None:
        value = self.values.get(key)
        return value if type(value) is int and _is_finite(value) else None

    def texts(self, key: str) -> list[str]:
        """The texts in the list of a key; none without it."""
        value = self.values.get(key)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def record(self, key: str) -> Record:
        """The object of a key; an empty one without it."""
        value = self.values.get(key)
        return Record(value if isinstance(value, dict) else {})

    def records(self, key: str) -> list[Record]:
        """The objects in the list of a key; none without it."""
        value = self.values.get(key)
        return [Record(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def numbers(records: Iterable[Record], key: str) -> list[float]:
    """The values of a key in those records that have a number."""
    return [value for record in records if (value := record.number(key)) is not None]


def mean(records: Iterable[Record], key: str) -> float | None:
    """The mean of `numbers`; None without any."""
    values = numbers(records, key)
    return sum(values) / len(values) if values else None


T = TypeVar("T")
LEFT_OUT: Mapping[str, str] = {"json": "left out"}
"""The metadata of a field that is not written."""
OPTIONAL: Mapping[str, str] = {"json": "optional"}
"""The metadata of a field that is not written while it has its default."""
UNLIMITED: Mapping[str, str] = {"json": "unlimited"}
"""The metadata of a field whose infinity is null."""
_ANYTHING = (Any, object)
_ANY = frozenset[type]([str, int, float, bool, dict, list, type(None)])


@dataclass(frozen=True, slots=True)
class _Shape:
    """The values in JSON that the type of a field accepts."""

    types: frozenset[type]
    plain: frozenset[type]
    """The `types` whose values are complete as they are."""
    choices: tuple[str, ...] = ()
    """The texts of a Literal."""
    record: type | None = None
    """The dataclass of an object."""
    values: _Shape | None = None
    """The shape of the values of any other object."""
    items: _Shape | None = None
    """The shape of the items of a list."""
    sequence: type = list
    """The type that a list is converted to."""


def read_record(kind: type[T], value: Mapping[str, object], *, strict: bool = False) -> T:
    """A JSON object as a dataclass; a list becomes a tuple where the type of the field is one.

    A file may be damaged, edited by hand or of another version: a value that does not have the type of its
    field counts as missing, and is kept in the field `more` if there is one, as are keys that are no fields;
    of a list of records, what is no object is left out. If `strict`, such a value raises TypeError, which
    names it, and other keys are left out. A field without a default that is missing raises TypeError.
    """
    if strict and not isinstance(value, dict):
        raise TypeError(f"{kind.__name__} is {str(value)[:100]!r}")
    shapes = _shapes(cast(Any, kind))
    known: dict[str, object] = {}
    more: dict[str, object] = {}
    for name, item in value.items():
        if (shape := shapes.get(name)) is None:
            more[name] = item
        elif type(item) in shape.plain and (type(item) not in (int, float) or _is_finite(item)):
            known[name] = item
        else:
            try:
                known[name] = _converted(shape, item, name, strict)
            except TypeError:
                if strict:
                    raise
                more[name] = item
    if more and "more" in cast(Any, kind).__dataclass_fields__:
        known["more"] = more
    return kind(**known)


def _converted(shape: _Shape, value: Any, name: str, strict: bool) -> Any:
    """A value as its shape asks for it; raises TypeError with the name of what is none."""
    kind = type(value)
    if kind is dict and shape.record is not None:
        return read_record(shape.record, value, strict=strict)
    if kind is dict and (inner := shape.values) is not None:
        return {key: _converted(inner, item, f"{name}.{key}", strict) for key, item in value.items()}
    if kind in (list, tuple) and (inner := shape.items) is not None:
        if inner.record is not None and not strict:
            value = [item for item in value if isinstance(item, dict)]
        return shape.sequence(_converted(inner, item, name, strict) for item in value)
    is_choice = not shape.choices or not strict or kind is not str or value in shape.choices
    if kind in shape.types and is_choice and (shape.types is _ANY or _is_finite(value)):
        return value
    raise TypeError(f"{name} is {str(value)[:100]!r}")


@cache
def _shapes(kind: type) -> dict[str, _Shape]:
    """The shape of each field of a dataclass, but for `more`."""
    hints = get_type_hints(kind)
    return {item.name: _shape(hints[item.name]) for item in fields(cast(Any, kind)) if item.name != "more"}


def _shape(hint: Any) -> _Shape:
    if hint in _ANYTHING:
        return _Shape(_ANY, _ANY)
    types, plain = set[type](), set[type]()
    found: dict[str, Any] = {}
    for member in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        origin, parts = get_origin(member) or member, get_args(member)
        if is_dataclass(origin):
            found["record"] = origin
            types.add(dict)
        elif origin is Literal:
            found["choices"] = parts
            types.add(str)
        elif origin in (list, tuple, Sequence):
            found |= {
                "items": _shape(parts[0] if parts else Any),
                "sequence": tuple if origin is tuple else list,
            }
            types.add(list)
        elif origin in (dict, Mapping) and parts and parts[1] not in _ANYTHING:
            found["values"] = _shape(parts[1])
            types.add(dict)
        else:
            plain |= {int, float} if origin is float else {origin}
    return _Shape(frozenset(types | plain), frozenset(plain), **found)


def to_json(value: Any) -> Any:
    """A value for a file or ``--json``: objects of dataclasses and records, times in ISO 8601.

    The metadata of a field may be `LEFT_OUT`, `OPTIONAL` or `UNLIMITED`. What is in the field `more`, of
    another version or damaged, is written unless a field has a value for it.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Record):
        return dict(value.values)
    if is_dataclass(value):
        own, known = dict[str, Any](), set()
        for name, make_default, is_optional, is_unlimited in _written_fields(cast(Any, type(value))):
            found = getattr(value, name)
            if found != make_default():
                known.add(name)
            elif is_optional:
                continue
            own[name] = None if is_unlimited and found == math.inf else to_json(found)
        if "more" not in own:
            return own
        return own | {key: found for key, found in own.pop("more").items() if key not in known - {"more"}}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(to_json, value))
    return value.isoformat() if isinstance(value, datetime) else value


@cache
def _written_fields(kind: Any) -> list[tuple[str, Callable[[], Any], bool, bool]]:
    """Each field that `to_json` writes: name, maker of its default, is optional, is unlimited."""
    return [
        (item.name, _default_of(item), item.metadata == OPTIONAL, item.metadata == UNLIMITED)
        for item in fields(kind)
        if item.metadata != LEFT_OUT
    ]


def _default_of(item: Field[Any]) -> Callable[[], Any]:
    if item.default_factory is not MISSING:
        return item.default_factory
    default = None if item.default is MISSING else item.default
    return lambda: default


def read_each(kind: type[T], folder: Path) -> list[T]:
    """What ranks have written into a folder, by rank; damaged files are left out."""
    found = []
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(read_record(kind, read_json(path), strict=True))
    return found


def difference(base: Mapping[str, object], other: Mapping[str, object]) -> dict[str, object]:
    """The changes that turn JSON object `base` into `other`, by dotted path.

    A mapping that lost a key, or has a name with a dot, is replaced as a whole.
    """
    return dict(_differences(base, other, ()))


def _differences(
    base: Mapping[str, object], other: Mapping[str, object], path: tuple[str, ...]
) -> Iterator[tuple[str, object]]:
    for key, value in other.items():
        before = base.get(key)
        # As JSON: in Python 1 is True, also inside of lists.
        if key in base and json.dumps(before, sort_keys=True) == json.dumps(value, sort_keys=True):
            continue
        if (
            isinstance(before, dict)
            and isinstance(value, dict)
            and before.keys() <= value.keys()
            and not any("." in name for name in value)
        ):
            yield from _differences(before, value, (*path, key))
        else:
            yield ".".join((*path, key)), value


def changed(base: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """A copy of `base` with the changes that `difference` returned."""
    result = dict(base)
    for path, value in changes.items():
        head, dot, rest = path.partition(".")
        if dot:
            inner = result[head]
            if not isinstance(inner, dict):
                raise TypeError(f"{head} is {str(inner)[:100]!r}")
            value = changed(inner, {rest: value})
        result[head] = value
    return result
