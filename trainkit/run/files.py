"""Read and write the files of a run: JSON, JSON Lines and times.

A file is either replaced atomically or grows by complete lines. So a reader never sees a partial file or
line, except for a line that a crash truncated, which readers skip.
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
    """Return the current time in the format that the files of a run use."""
    return as_utc(datetime.now(timezone.utc))


def as_utc(time: datetime, timespec: str = "milliseconds") -> str:
    """Format a timezone-aware time as ISO 8601 in UTC, as in the files of a run."""
    return time.astimezone(timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def parse_time(text: object) -> datetime | None:
    """Parse a time from a file of a run and convert it to UTC; return None if the text is not a time.

    A time without a zone is read as UTC.
    """
    if not isinstance(text, str):
        return None
    try:
        time = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    # In UTC, a time near year 1 or 9999 may be outside the supported range of years.
    except (ValueError, OverflowError):
        return None


def seconds_between(start: object, end: datetime | None) -> float | None:
    """Return the seconds from the time in the text `start` to `end`; None if either time is unknown."""
    started = parse_time(start)
    return None if started is None or end is None else (end - started).total_seconds()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file atomically, so that a reader sees either the old or the new content.

    Only the owner can read the new file.
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
            error.filename = str(path)  # When a write fails, the error does not contain the name of the file.
        os.unlink(name)
        raise


def open_private(path: Path) -> BinaryIO:
    """Open a file for reading; raise UsageError if another user could have written it."""
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
    r"""Encode JSON as UTF-8; invalid bytes of a file name become escapes such as ``\udcff``."""
    return text.encode("utf-8", errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value atomically, with indentation and with keys in their given order."""
    write_atomic(path, _encoded(json.dumps(value, indent=2, ensure_ascii=False) + "\n"))


def open_file(path: str | Path) -> BinaryIO:
    """Open a file of a run for reading; raise OSError for a pipe or device, which may never end."""
    return open_regular(path)


MAX_JSON_BYTES = 2**26


def read_json(path: str | Path, *, executes: bool = False) -> Any:
    """Return the JSON value in a file.

    Raises OSError if the file cannot be read, and ValueError if its content is not JSON. `executes` is for a
    file that decides what a run executes: the file must then pass the checks of `open_trusted`, which raises
    UsageError.
    """
    with (open_trusted if executes else open_file)(path) as stream:
        # Check the size first, because `read(MAX_JSON_BYTES)` would allocate that much memory even for a
        # small file.
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
    """Replace unpaired surrogates in a JSON value, because they cannot be printed or written to a file."""
    if not _SURROGATE.search(text):
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", errors="replace"))


def read_object(path: str | Path) -> dict[str, object]:
    """Return the JSON object in a file; return {} if the file is missing, unreadable or not an object."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json_in_place(path: Path, value: Any) -> None:
    """Write one JSON value into a file that other hosts poll with `wait_for_json`.

    Keeps the inode of an existing file, because the other hosts may have opened the file already. A reader
    may see a partial write, but that is not valid JSON.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


WAIT_POLL_S = 0.05


LONGEST_POLL_S = 1.0
"""Maximum pause between two polls in seconds, because all nodes of a job may poll one file server."""


def wait_for_json(
    path: Path,
    timeout_s: float,
    *,
    accept: Callable[[Any], bool] = lambda value: True,
    pause: Callable[[float], object] = time.sleep,
    creates: bool = False,
) -> Any:
    """Wait until a file that another host writes is visible, and return the JSON value in the file.

    The wait ends when `accept` returns True for the value. `pause` sleeps between two polls and may raise to
    stop the wait. Raises TimeoutError, with an explanation, if no accepted value appears in time.

    With `creates`, a missing file is created empty, and the other host then writes into the existing file.
    Creating the file avoids a delay: an NFS client caches for up to a minute that a file is missing, but
    revalidates an existing file each time it is opened.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, WAIT_POLL_S
    while True:
        try:
            value = read_json(path) if not creates else _read_or_create(path)
            if accept(value):
                return value
            reason = "another start of the job wrote it"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error)
        if time.monotonic() > deadline_s:
            raise TimeoutError(reason)
        pause(pause_s)
        pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)


def _read_or_create(path: Path) -> Any:
    """Return the JSON value in a file; if the file is missing, create it empty."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), encoding="utf-8") as stream:
        return _parsed_json(stream.read())


def refresh_listing(folder: Path) -> None:
    """Make the NFS client fetch a fresh listing of a folder from the server.

    A cached listing may be up to a minute old unless this client itself has changed the folder.
    """
    # Continue without a refresh if the disk is full or read-only, or if the folder is missing.
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(prefix=".refresh.", dir=folder)
        os.close(handle)
        os.unlink(name)


def append_jsonl(path: Path, *records: dict[str, object]) -> None:
    """Append each record as one line, with a single write.

    If a crash truncated the last line of the file, that line is terminated first, so that the new records
    start on a new line. Raises OSError if the records do not fit on the disk, and leaves the file unchanged.
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
            try:  # The error of a second write distinguishes a full disk from an exceeded quota.
                written += os.write(descriptor, line[written:])
            finally:
                if written != len(line):
                    os.ftruncate(descriptor, size)
        if written != len(line):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
    finally:
        os.close(descriptor)


def read_jsonl(path: Path, words: Sequence[str] = (), every: int = 1) -> Iterator[dict[str, object]]:
    """Yield the records of a file; skip lines that a crash truncated.

    A missing file has no records. With `words`, parses only lines that contain one of the words as a JSON
    string, either as key or as value, because parsing is the slowest part. With `every`, reads only lines 1,
    1 + `every`, 1 + 2 * `every` and so on.
    """
    with opened(path) as stream:
        if stream is not None:
            yield from _parsed(islice(forward_lines(stream), 0, None, every), words)


READ_BYTES = 16_384
MAX_LINE_BYTES = 2**20
"""Lines longer than this are read in chunks, because a line of several gigabytes might not fit in memory."""
MAX_RECORD_BYTES = 2**24
"""A line longer than this is not parsed as a record but skipped."""
SEARCHED_BYTES = 2**26
"""Number of bytes at the end of a file that are searched for the last records."""
MAX_SAMPLE_BYTES = 2**16


def read_jsonl_reversed(path: str | Path, words: Sequence[str] = ()) -> Iterator[dict[str, object]]:
    """Yield the records in the last `SEARCHED_BYTES` of a file, the last record first.

    Reads no further than the caller iterates. `words` selects lines as in `read_jsonl`.
    """
    with opened(path) as stream:
        if stream is not None:
            lines = reversed_lines(stream, stream.seek(0, os.SEEK_END), MAX_RECORD_BYTES)
            yield from _parsed(_first_bytes(lines), words)


def _first_bytes(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines up to `SEARCHED_BYTES` in total, which does not include chunks of overlong lines."""
    num_bytes = 0
    for line in lines:
        if len(line) < MAX_RECORD_BYTES:
            yield line
            num_bytes += len(line) if line.endswith(b"\n") else 0
        if num_bytes > SEARCHED_BYTES:
            return


def forward_lines(stream: BinaryIO, longest: int = MAX_RECORD_BYTES) -> Iterator[bytes]:
    """Yield the lines after the stream's position; a line longer than `longest` is yielded in chunks."""
    return iter(partial(stream.readline, longest), b"")


def reversed_lines(stream: BinaryIO, position: int, longest: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines before a position including their line ends, the last line first.

    The first item is the text after the last line end, which is often empty. A line of at least `longest`
    bytes is yielded in chunks, the last chunk first.
    """
    rest: list[bytes] = []  # Blocks of a line whose start has not been read yet, the last block first.
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
    """Return the lines after `count` evenly spaced positions of a file."""
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
        """Return the size of the file in bytes; 0 if the file does not exist."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def lines(self, *, unfinished: bool = False) -> Iterator[bytes]:
        """Yield the lines since the last call; yield an unterminated last line only if `unfinished`.

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
        """Yield `lines` as text without line ends; `unfinished` is for a file that no longer grows."""
        for line in self.lines(unfinished=unfinished):
            yield line.removesuffix(b"\n").decode(errors="replace")

    def records(self, words: Sequence[str] = ()) -> Iterator[dict[str, object]]:
        """Yield the records since the last call; `words` selects lines as in `read_jsonl`."""
        return _parsed(self.lines(), words)


_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO)


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO | None]:
    """Open a regular file; yield None for a pipe or device, because reading it might never end."""
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
    """Parse lines as JSON objects; skip all other lines."""
    return (record for record in map(parse_record, lines) if record is not None)


DECODER = json.JSONDecoder(parse_constant=lambda name: None)
"""Decodes JSON; NaN and Infinity, which are invalid in JSON, become null."""


def parse_record(line: bytes) -> dict[str, object] | None:
    """Parse a line as a JSON object; return None if the line is not one."""
    text = line.decode("utf-8", errors="replace").strip()
    try:
        record, end = DECODER.raw_decode(text)  # `raw_decode` is twice as fast as `decode`.
        record = _encodable(record, text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and end == len(text) else None


LARGEST = sys.float_info.max


def _is_finite(value: object) -> bool:
    """Return False for a number that does not fit in a float, such as a very large integer; else True."""
    return type(value) not in (int, float) or abs(cast(float, value)) <= LARGEST


@dataclass(frozen=True, slots=True)
class Record:
    """Wraps a JSON object of a run and reads its values by type.

    A value whose type differs from the requested one counts as missing; so does Infinity.
    """

    values: Mapping[str, object]

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> float | None:
        value: Any = self.values.get(key)
        # `_is_finite` is inlined here, because a live view reads thousands of numbers of a large run.
        return value if type(value) in (int, float) and abs(value) <= LARGEST else None

    def count(self, key: str) -> int | None:
        value = self.values.get(key)
        return value if type(value) is int and _is_finite(value) else None

    def texts(self, key: str) -> list[str]:
        """Return the strings in the list under a key; an empty list without the key."""
        value = self.values.get(key)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def record(self, key: str) -> Record:
        """Return the object under a key; an empty record without the key."""
        value = self.values.get(key)
        return Record(value if isinstance(value, dict) else {})

    def records(self, key: str) -> list[Record]:
        """Return the objects in the list under a key; an empty list without the key."""
        value = self.values.get(key)
        return [Record(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def numbers(records: Iterable[Record], key: str) -> list[float]:
    """Return the numbers under a key; skip records without a number there."""
    return [value for record in records if (value := record.number(key)) is not None]


def mean(records: Iterable[Record], key: str) -> float | None:
    """Return the mean of `numbers`; None if there are no numbers."""
    values = numbers(records, key)
    return sum(values) / len(values) if values else None


T = TypeVar("T")
LEFT_OUT: Mapping[str, str] = {"json": "left out"}
"""Metadata of a dataclass field that is never written to JSON."""
OPTIONAL: Mapping[str, str] = {"json": "optional"}
"""Metadata of a dataclass field that is omitted from JSON if it has its default value."""
UNLIMITED: Mapping[str, str] = {"json": "unlimited"}
"""Metadata of a dataclass field whose infinity is written as null."""
_ANYTHING = (Any, object)
_ANY = frozenset[type]([str, int, float, bool, dict, list, type(None)])


@dataclass(frozen=True, slots=True)
class _Shape:
    """The JSON values that a dataclass field accepts, derived from its type."""

    types: frozenset[type]
    plain: frozenset[type]
    """The subset of `types` whose values need no conversion."""
    choices: tuple[str, ...] = ()
    """The strings that a Literal type allows."""
    record: type | None = None
    """The dataclass that a JSON object is converted to."""
    values: _Shape | None = None
    """The shape of the values in a JSON object that is not converted to a dataclass."""
    items: _Shape | None = None
    """The shape of the items in a list."""
    sequence: type = list
    """The Python type that a JSON list is converted to."""


def read_record(kind: type[T], value: Mapping[str, object], *, strict: bool = False) -> T:
    """Read a JSON object as a dataclass; a list becomes a tuple if the field's type is a tuple.

    A file may be damaged, edited by hand or written by another version. So a value of the wrong type counts
    as missing, and in a list of records, items that are not objects are skipped. Values of the wrong type and
    unknown keys are kept in the dataclass field `more`, if it exists.

    With `strict`, a value of the wrong type raises a TypeError with the name of the value, and unknown keys
    are ignored. A missing field without a default always raises TypeError.
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
    """Convert a value to a shape; raise a TypeError that contains `name` if the value does not match."""
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
    """Convert a value for a file or ``--json``: dataclasses and records become objects, times ISO 8601 texts.

    Respects the field metadata `LEFT_OUT`, `OPTIONAL` and `UNLIMITED`. The values in the field `more`, which
    are unknown or damaged, are written unless another field with the same name has a value.
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
            else:  # Saves a function call per plain value; a group has 15 such values per trial.
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
    """Return (name, function for the default, is optional, is unlimited) of each field that is written."""
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
    """Read the records that ranks have written into a folder, ordered by rank; skip damaged files."""
    found = []
    for path in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(read_record(kind, read_json(path), strict=True))
    return found


def difference(base: Mapping[str, object], other: Mapping[str, object]) -> dict[str, object]:
    """Return the changes that turn the JSON object `base` into `other`, keyed by dotted path.

    A mapping is replaced as a whole if it lost a key or has a key that contains a dot.
    """
    return dict(_differences(base, other, ()))


def _differences(
    base: Mapping[str, object], other: Mapping[str, object], path: tuple[str, ...]
) -> Iterator[tuple[str, object]]:
    for key, value in other.items():
        before = base.get(key)
        # Compare as JSON, because 1 == True in Python, also inside lists.
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
    """Apply changes returned by `difference` to a copy of `base`, and return the copy."""
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
