"""Read and write the files of a run, in JSON and JSON Lines, and format times for them.

Each file is either replaced atomically or only appended to, in complete lines. Readers therefore never see
partial content, except for a line truncated by a crash, which readers skip.
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
    """Return the current time in the format used in a run's files."""
    return as_utc(datetime.now(timezone.utc))


def as_utc(time: datetime, timespec: str = "milliseconds") -> str:
    """Format a timezone-aware time as ISO 8601 in UTC, as used in a run's files."""
    return time.astimezone(timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def parse_time(text: object) -> datetime | None:
    """Parse a time from a run's file and convert it to UTC; return None if the text is not a time.

    A time without a time zone is interpreted as UTC.
    """
    if not isinstance(text, str):
        return None
    try:
        time = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    # Converting a time near year 1 or 9999 to UTC may exceed the range of years that datetime supports.
    except (ValueError, OverflowError):
        return None


def seconds_between(start: object, end: datetime | None) -> float | None:
    """Return the seconds from `start`, a time as text, to `end`; None if either time is unknown."""
    started = parse_time(start)
    return None if started is None or end is None else (end - started).total_seconds()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: readers see either the old or the new content.

    The new file is readable only by its owner.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # The error of a failed write does not contain the file name.
        os.unlink(name)
        raise


def open_private(path: Path) -> BinaryIO:
    """Open a file for reading; raise UsageError if another user could have written the file."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise UsageError(
        f"{path} is not loaded: it must be a regular file that only you can read and write",
        hint="a pickle that another user wrote can execute any code",
    )


def _encoded(text: str) -> bytes:
    r"""Encode JSON text as UTF-8; undecodable bytes of a file name become escapes such as ``\udcff``."""
    return text.encode("utf-8", errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value atomically, indented and with its keys in the given order."""
    write_atomic(path, _encoded(json.dumps(value, indent=2, ensure_ascii=False) + "\n"))


def open_file(path: str | Path) -> BinaryIO:
    """Open a run's file for reading; raise OSError for a pipe or device, which could block forever."""
    return open_regular(path)


MAX_JSON_BYTES = 2**26


def read_json(path: str | Path, *, executes: bool = False) -> Any:
    """Return the JSON value in a file.

    Raises OSError if the file cannot be read, and ValueError if its content is not JSON. Set `executes` for a
    file that determines what a run executes: the file is then opened with `open_trusted`, which raises
    UsageError if another user could have written it.
    """
    with (open_trusted if executes else open_file)(path) as stream:
        # Check the size first, because `read(MAX_JSON_BYTES)` allocates that much memory even for a small
        # file.
        if os.fstat(stream.fileno()).st_size > MAX_JSON_BYTES:
            raise ValueError(f"the file has more than {MAX_JSON_BYTES:,} bytes")
        content = stream.read()
    return _parsed_json(content.decode())


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _parsed_json(text: str) -> Any:
    try:
        return _encodable(json.loads(text), text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _encodable(value: Any, text: str) -> Any:
    """Replace unpaired surrogates in a JSON value, because they cannot be encoded for printing or writing."""
    if not _SURROGATE.search(text):
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", errors="replace"))


def read_object(path: str | Path) -> dict[str, object]:
    """Return the JSON object in a file; {} if the file is missing, unreadable or not an object."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json_in_place(path: Path, value: Any) -> None:
    """Write one JSON value into a file that other hosts are polling with `wait_for_json`.

    Keeps the inode of an existing file, because other hosts may already have opened the file. A reader may
    see a partially written file, but its content is then not valid JSON.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


WAIT_POLL_S = 0.05


LONGEST_POLL_S = 1.0
"""Maximum number of seconds between two polls; limits the load when all nodes of a job poll the same file
server."""


def wait_for_json(
    path: Path,
    timeout_s: float,
    *,
    accept: Callable[[Any], bool] = lambda value: True,
    pause: Callable[[float], object] = time.sleep,
    creates: bool = False,
) -> Any:
    """Wait until a file that another host writes becomes visible, and return its JSON value.

    Continues to wait until `accept` returns True for the value. `pause` is called to sleep between polls, and
    may raise an exception to stop waiting. Raises TimeoutError, with an explanation, if no accepted value
    appears within `timeout_s`.

    With `creates`, creates a missing file as an empty file; the other host then writes into this file.
    Creating the file avoids a delay: an NFS client may cache the absence of a file for up to a minute, but
    revalidates an existing file whenever it is opened.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, WAIT_POLL_S
    while True:
        try:
            value = read_json(path) if not creates else _read_or_create(path)
            if accept(value):
                return value
            reason = "another start of the job wrote the file"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error)
        if time.monotonic() > deadline_s:
            raise TimeoutError(reason)
        pause(pause_s)
        pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)


def _read_or_create(path: Path) -> Any:
    """Return the JSON value in a file; create an empty file if it is missing."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), encoding="utf-8") as stream:
        return _parsed_json(stream.read())


def refresh_listing(folder: Path) -> None:
    """Make the NFS client fetch a fresh listing of a folder from the server.

    A cached listing may be up to a minute old, unless this client has changed the folder itself.
    """
    # If the disk is full or read-only, or the folder is missing, continue without refreshing the listing.
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(prefix=".refresh.", dir=folder)
        os.close(handle)
        os.unlink(name)


def append_jsonl(path: Path, *records: dict[str, object]) -> None:
    """Append each record as one line; all lines are written in a single write.

    If a crash truncated the last line of the file, a newline is written first, so that the new records start
    on a new line. Raises OSError if the disk has no space for the records; the file is then unchanged.
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
            try:  # The error of this write distinguishes a full disk from an exceeded quota.
                written += os.write(descriptor, line[written:])
            finally:
                if written != len(line):
                    os.ftruncate(descriptor, size)
        if written != len(line):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
    finally:
        os.close(descriptor)


def read_jsonl(path: Path, words: Sequence[str] = (), every: int = 1) -> Iterator[dict[str, object]]:
    """Yield the records in a file; skip lines that a crash truncated.

    A missing file is treated as an empty file. With `words`, parses only lines that contain one of the words
    as a JSON key or string value, because most of the time is spent on parsing. With `every`, reads only
    lines 1, 1 + `every`, 1 + 2 * `every` and so on.
    """
    with opened(path) as stream:
        if stream is not None:
            yield from _parsed(islice(forward_lines(stream), 0, None, every), words)


READ_BYTES = 16_384
MAX_LINE_BYTES = 2**20
"""Lines longer than this number of bytes are read in chunks, because a line of several gigabytes might not
fit in memory."""
MAX_RECORD_BYTES = 2**24
"""Lines longer than this number of bytes are skipped instead of being parsed as records."""
SEARCHED_BYTES = 2**26
"""Number of bytes at the end of a file that are searched for its last records."""
MAX_SAMPLE_BYTES = 2**16


def read_jsonl_reversed(path: str | Path, words: Sequence[str] = ()) -> Iterator[dict[str, object]]:
    """Yield the records in the last `SEARCHED_BYTES` of a file, in reverse order.

    The file is read lazily, only as far as the caller iterates. `words` selects lines as in `read_jsonl`.
    """
    with opened(path) as stream:
        if stream is not None:
            lines = reversed_lines(stream, stream.seek(0, os.SEEK_END), MAX_RECORD_BYTES)
            yield from _parsed(_first_bytes(lines), words)


def _first_bytes(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines up to a total of `SEARCHED_BYTES`, not counting chunks of overlong lines."""
    num_bytes = 0
    for line in lines:
        if len(line) < MAX_RECORD_BYTES:
            yield line
            num_bytes += len(line) if line.endswith(b"\n") else 0
        if num_bytes > SEARCHED_BYTES:
            return


def forward_lines(stream: BinaryIO, longest: int = MAX_RECORD_BYTES) -> Iterator[bytes]:
    """Yield the lines after the stream's position; those over `longest` bytes are split into chunks."""
    return iter(partial(stream.readline, longest), b"")


def reversed_lines(stream: BinaryIO, position: int, longest: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines before an offset in reverse order, with their line terminators.

    The first item is the text after the last line terminator; it is empty if the file ends with a complete
    line. A line of at least `longest` bytes is yielded in chunks, the last chunk first.
    """
    rest: list[bytes] = []  # Blocks of a line whose beginning has not been read yet, the last block first.
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
    """Return the lines that follow `count` evenly spaced offsets in a file."""
    lines = []
    for index in range(count):
        stream.seek(begin + (end - begin) * index // count)
        if stream.tell():
            stream.readline(MAX_SAMPLE_BYTES)
        lines.append(stream.readline(MAX_SAMPLE_BYTES))
    return lines


class Tail:
    """Reads new lines of a growing file, which may not exist yet; methods raise OSError on read errors."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path, self.position = path, position

    def size(self) -> int:
        """Return the file size in bytes; 0 if the file does not exist."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def lines(self, *, unfinished: bool = False) -> Iterator[bytes]:
        """Yield the lines added since the last call; yield an unterminated last line only with `unfinished`.

        A line longer than `MAX_RECORD_BYTES` is yielded in chunks.
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
        """Yield `lines` as text without line terminators; set `unfinished` if the file no longer grows."""
        for line in self.lines(unfinished=unfinished):
            yield line.removesuffix(b"\n").decode(errors="replace")

    def records(self, words: Sequence[str] = ()) -> Iterator[dict[str, object]]:
        """Yield the records added since the last call; `words` selects lines as in `read_jsonl`."""
        return _parsed(self.lines(), words)


_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO)


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO | None]:
    """Open a regular file; yield None for a pipe or device, which could block forever."""
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
    """Parse lines as JSON objects; skip lines that are not JSON objects."""
    return (record for record in map(parse_record, lines) if record is not None)


DECODER = json.JSONDecoder(parse_constant=lambda name: None)
"""A JSON decoder that converts NaN and Infinity, which are not valid JSON, to null."""


def parse_record(line: bytes) -> dict[str, object] | None:
    """Parse a line as a JSON object; return None if the line is not a JSON object."""
    text = line.decode("utf-8", errors="replace").strip()
    try:
        record, end = DECODER.raw_decode(text)  # `raw_decode` is twice as fast as `decode`.
        record = _encodable(record, text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and end == len(text) else None


LARGEST = sys.float_info.max


def _is_finite(value: object) -> bool:
    """Return False for NaN, infinity and an integer too large for a float; True for any other value."""
    return type(value) not in (int, float) or abs(cast(float, value)) <= LARGEST


@dataclass(frozen=True, slots=True)
class Record:
    """Wraps a JSON object from a run's file; its methods return values of a requested type.

    A value of a different type, or Infinity, is treated as missing.
    """

    values: Mapping[str, object]

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> float | None:
        value: Any = self.values.get(key)
        # `_is_finite` is inlined here for speed, because `trainkit watch` reads thousands of numbers of a
        # large run.
        return value if type(value) in (int, float) and abs(value) <= LARGEST else None

    def count(self, key: str) -> int | None:
        value = self.values.get(key)
        return value if type(value) is int and _is_finite(value) else None

    def texts(self, key: str) -> list[str]:
        """Return the strings in the list for a key; an empty list if the key is missing."""
        value = self.values.get(key)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def record(self, key: str) -> Record:
        """Return the object for a key; an empty record if the key is missing."""
        value = self.values.get(key)
        return Record(value if isinstance(value, dict) else {})

    def records(self, key: str) -> list[Record]:
        """Return the objects in the list for a key; an empty list if the key is missing."""
        value = self.values.get(key)
        return [Record(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def numbers(records: Iterable[Record], key: str) -> list[float]:
    """Return the number for a key in each record; skip records without a number for the key."""
    return [value for record in records if (value := record.number(key)) is not None]


def mean(records: Iterable[Record], key: str) -> float | None:
    """Return the mean of `numbers`; None if there are none."""
    values = numbers(records, key)
    return sum(values) / len(values) if values else None


T = TypeVar("T")
LEFT_OUT: Mapping[str, str] = {"json": "left out"}
"""Metadata for a dataclass field that is never written to JSON."""
OPTIONAL: Mapping[str, str] = {"json": "optional"}
"""Metadata for a dataclass field that is omitted from JSON if it has its default value."""
INLINE: Mapping[str, str] = {"json": "inline"}
"""Metadata for a dataclass field that `to_json` omits, because its class's `to_dict` writes the keys of the
field's value next to the other keys."""
UNLIMITED: Mapping[str, str] = {"json": "unlimited"}
"""Metadata for a dataclass field whose infinite value is written to JSON as null."""
_ANYTHING = (Any, object)
_ANY = frozenset[type]([str, int, float, bool, dict, list, type(None)])


@dataclass(frozen=True, slots=True)
class _Shape:
    """The JSON values that are valid for a dataclass field, derived from the field's type."""

    types: frozenset[type]
    plain: frozenset[type]
    """The types in `types` whose values need no conversion."""
    choices: tuple[str, ...] = ()
    """The allowed strings of a Literal type."""
    record: type | None = None
    """The dataclass to create from a JSON object."""
    values: _Shape | None = None
    """The shape of the values in a JSON object that is converted to a plain dictionary."""
    items: _Shape | None = None
    """The shape of the items in a list."""
    sequence: type = list
    """The Python type to create from a JSON list: list or tuple."""


def read_record(kind: type[T], value: Mapping[str, object], *, strict: bool = False) -> T:
    """Convert a JSON object to a dataclass; a list becomes a tuple if the field's type is a tuple.

    The object may come from a file that is damaged, edited by hand or written by another trainkit version.
    Therefore, a value of the wrong type is treated as missing, and items that are not objects are skipped in
    a list of records. Values of the wrong type and unknown keys are stored in the dataclass field `more`, if
    it exists.

    With `strict`, a value of the wrong type raises a TypeError that contains the value's name, and unknown
    keys are ignored. A missing field that has no default always raises TypeError.
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
    """Convert a value as `shape` specifies; raise TypeError, with `name`, if the value has the wrong type."""
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
    """Return the shape of each field of a dataclass, except for `more`."""
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


_PLAIN = frozenset((str, int, float, bool, type(None)))
"""The Python types that JSON can represent without conversion."""


def to_json(value: Any) -> Any:
    """Convert a value for JSON: dataclasses and records become objects, and times become ISO 8601 strings.

    Respects the field metadata `LEFT_OUT`, `OPTIONAL`, `INLINE` and `UNLIMITED`. Also writes the unknown or
    damaged values in the field `more`, unless another field has the same name.
    """
    if type(value) in _PLAIN:
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
            if is_unlimited and found == math.inf:
                own[name] = None
            else:  # Inlined to save a function call per plain value: a group has 15 plain values per trial.
                own[name] = found if type(found) in _PLAIN else to_json(found)
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
    """Return (name, default factory, is optional, is unlimited) for each field that is written."""
    return [
        (item.name, _default_of(item), item.metadata == OPTIONAL, item.metadata == UNLIMITED)
        for item in fields(kind)
        if item.metadata not in (LEFT_OUT, INLINE)
    ]


def _default_of(item: Field[Any]) -> Callable[[], Any]:
    if item.default_factory is not MISSING:
        return item.default_factory
    default = None if item.default is MISSING else item.default
    return lambda: default


def read_each(kind: type[T], folder: Path) -> list[T]:
    """Read the records that ranks have written to a folder, ordered by rank; skip damaged files."""
    found = []
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(read_record(kind, read_json(path), strict=True))
    return found


def difference(base: Mapping[str, object], other: Mapping[str, object]) -> dict[str, object]:
    """Return the changes from the JSON object `base` to `other`, as values by dotted path.

    If a key was removed from a mapping or contains a dot, the mapping is replaced as a whole.
    """
    return dict(_differences(base, other, ()))


def _differences(
    base: Mapping[str, object], other: Mapping[str, object], path: tuple[str, ...]
) -> Iterator[tuple[str, object]]:
    for key, value in other.items():
        before = base.get(key)
        # Compare as JSON, because 1 == True in Python, even inside lists.
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
    """Apply changes from `difference` to a copy of `base`, and return the copy."""
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
