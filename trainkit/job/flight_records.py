"""torch's flight records, which list the collectives, sends and receives that each rank has called.

If a rank of the built-in trainer hangs, it writes its flight record itself (`trainer/progress.py`). For a
script, torch writes the flight record when a collective times out or the agent requests a record. The module
`blame` uses flight records to find the ranks that block the others.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from trainkit.folders import ensure_folder
from trainkit.formats import JsonObject
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import refresh_listing
from trainkit.run.rundir import AttemptDir
from trainkit.run.tracebacks import is_of_user

FLIGHT_VARIABLE = "TRAINKIT_JOB_FLIGHT_RECORDS"
"""The environment variable for the path prefix of flight records, to which torch appends the rank."""
DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The environment variables for the path prefix of torch's flight records: the current and the older name."""
DUMP_S = 8.0
"""Seconds to wait for torch to write a requested record. torch checks for requests once per second, and
resolving the stacks takes time."""
DUMP_POLL_S = 0.1
MAX_BYTES = 32 << 20
"""Maximum size, in bytes, of a flight record that is read; 1000 collectives with stacks take 0.2 MB."""
MAX_TENSORS = 8
"""Maximum number of tensors per call that are compared and shown."""
Group = tuple[str, str, tuple[int, ...]]
"""The backend, name and ranks of a process group. Groups created by splitting another group have the same
name as that group."""


@dataclass(frozen=True)
class Call:
    """A collective, send or receive that a rank has called."""

    group: Group
    number: int
    """The index of the call among the group's collectives or, for a send or receive, among the rank's sends
    and receives in the group."""
    op: str
    label: str = ""
    """The name given to the group by its creator, such as ``mesh_dp``."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the tensors, which must be the same on all ranks."""
    dtypes: tuple[str, ...] = ()
    peer: int | None = None
    """The other rank in a send or receive; None for a collective."""
    is_done: bool = False
    is_p2p: bool = False
    has_started: bool = False
    """True if the rank's device has started the call. Only NCCL reports whether a device has started a call,
    and only if call timing is enabled."""
    place: str = ""
    """The line of user code that made the call."""

    @property
    def signature(self) -> tuple[object, ...]:
        """Return the values that must match on all ranks that make this call."""
        return self.op, tuple(map(prod, self.sizes)), self.dtypes

    @property
    def shown(self) -> str:
        """Return the operation and its tensor shapes, such as ``all_gather [4, 1024]``."""
        dtypes = [*self.dtypes, *[""] * len(self.sizes)]
        return " ".join(
            [
                self.op,
                *(f"{list(size)} {dtype}".strip() for size, dtype in zip(self.sizes, dtypes, strict=False)),
            ]
        )

    @property
    def position(self) -> str:
        """Return the call's number and group, such as ``collective 812 of group dp``."""
        kind = "send or receive" if self.is_p2p else "collective"
        return f"{kind} {self.number} of {self.label if self.label == 'all ranks' else f'group {self.label}'}"

    @property
    def shown_in_group(self) -> str:
        to = "" if self.peer is None else f" {'to' if self.op == 'send' else 'from'} rank {self.peer}"
        return f"{self.shown}{to} ({self.position})"


@dataclass(frozen=True)
class Flight:
    """The flight record of one rank."""

    rank: int
    calls: tuple[Call, ...]
    """The calls in chronological order; the oldest calls may be missing."""
    is_whole: bool = False
    """True if the record starts with the rank's first call."""
    is_idle: bool = False
    """True if all calls of the rank have completed."""


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that only allows numbers, strings, lists and dicts, so that a record cannot run code."""

    def find_class(self, module_name: str, global_name: str) -> object:
        raise pickle.UnpicklingError(f"it contains {module_name}.{global_name}")


def read_dump(path: Path) -> dict[str, object]:
    """Read a flight record written by torch.

    Raises ValueError if the file is not a flight record, and OSError if it cannot be read.
    """
    with path.open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"the file is larger than {MAX_BYTES >> 20} MiB")
    try:
        dump = json.loads(content) if content[:1] == b"{" else _PlainUnpickler(io.BytesIO(content)).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        TypeError,
        KeyError,
        IndexError,
        RecursionError,
    ) as error:
        raise ValueError(f"not a flight record: {error}") from error
    if not isinstance(dump, dict):
        raise ValueError("not a flight record: it contains no dictionary")
    return dump


def read_flights(attempt: AttemptDir, world_size: int) -> dict[int, Flight]:
    """Read the flight records of an attempt's ranks; log and skip damaged records."""
    found = {}
    for folder in (attempt.stacks_dir, attempt.flight_dir):
        refresh_listing(folder)
    for rank in range(world_size):
        for path in (attempt.rank_collectives(rank), attempt.flight_dir / f"rank-{rank}"):
            try:
                found[rank] = parse_flight(rank, read_dump(path), world_size)
                break
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                log_line(f"cannot read the flight record {path} ({error})")
    return found


def flight_environ(attempt: AttemptDir, plan: LaunchPlan) -> dict[str, str]:
    """Return the environment variables that make torch write flight records; create the records' folder.

    Returns an empty dict if the user has set another path. torch aborts a rank that cannot create the pipe
    for requests, so requests are disabled if the filesystem does not support pipes.
    """
    if any(name in plan.environment.variables or name in os.environ for name in DUMP_VARIABLES):
        return {}
    ensure_folder(attempt.flight_dir, 0o700)
    prefix = str(attempt.flight_dir / "rank-")
    probe = attempt.flight_dir / f".{socket.gethostname()}-{os.getpid()}.pipe"
    try:
        os.mkfifo(probe)
        probe.unlink()
    except OSError as error:
        log_line(
            f"flight records on request are disabled: cannot create a pipe in {attempt.flight_dir} ({error})"
        )
        return {DUMP_VARIABLES[0]: prefix}
    return {DUMP_VARIABLES[0]: prefix, FLIGHT_VARIABLE: prefix}


def remove_pipes(attempt: AttemptDir, ranks: Iterable[int]) -> None:
    """Remove the pipes of exited ranks, because opening a pipe without a reader would block forever."""
    for rank in ranks:
        (attempt.flight_dir / f"rank-{rank}.pipe").unlink(missing_ok=True)


def request_dumps(attempt: AttemptDir, ranks: Iterable[int]) -> None:
    """Make torch write the flight records of local ranks, and wait up to `DUMP_S` for the records.

    A rank that uses NCCL reads its pipe even while it hangs. Ranks without NCCL have no pipe.
    """
    before = {}
    for rank in ranks:
        path = attempt.flight_dir / f"rank-{rank}"
        try:
            pipe = os.open(f"{path}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue  # no process reads the pipe, because the rank does not use NCCL or has exited
        with contextlib.closing(os.fdopen(pipe, "wb")) as stream:
            before[path] = _changed_ns(path)
            stream.write(b"1")
    deadline_s = time.monotonic() + DUMP_S
    while before and time.monotonic() < deadline_s:
        time.sleep(DUMP_POLL_S)
        before = {
            path: then for path, then in before.items() if _changed_ns(path) == then or not _is_whole(path)
        }


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _is_whole(path: Path) -> bool:
    """Return whether a record is completely written. torch does not write records atomically."""
    try:
        return bool(read_dump(path))
    except ValueError:
        return False


def parse_flight(rank: int, dump: JsonObject, world_size: int) -> Flight:
    """Convert a rank's flight record from torch's format to a `Flight`.

    Raises ValueError if the format of the record is unknown.
    """
    try:
        entries = sorted(dump.get("entries", []), key=lambda entry: entry["time_created_ns"])
        config = {str(name): dict(group) for name, group in dump.get("pg_config", {}).items()}
        ranks = {name: _ranks(group.get("ranks", ())) for name, group in config.items()}
        calls: list[Call] = []
        ids: dict[str, set[int]] = {}
        begins: dict[Group, int] = {}
        for entry in entries:
            backend, _, op = str(entry["profiling_name"]).rpartition(":")
            name, description = map(str, entry["process_group"])
            members = ranks.get(name, ()) or (tuple(range(world_size)) if description == "default_pg" else ())
            ids.setdefault(backend, set()).add(int(entry["record_id"]))
            label = description.replace("default_pg", "all ranks").replace("undefined", "") or name
            calls.append(_parse_call(entry, (backend, name, members), label, op))
            begins.setdefault(calls[-1].group, calls[-1].number)
        last = [f"last_{word}_collective" for word in ("enqueued", "completed")]
        status = [[int(one[name]) for name in last] for one in dump.get("pg_status", {}).values()]
        is_idle = all(enqueued <= completed for enqueued, completed in status)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a flight record: {error!r}") from error
    # torch restarts its call numbers when a program resets the flight recorder.
    is_whole = all(found == {*range(len(found))} for found in ids.values()) and all(
        group[0] == "gloo" or number <= 1 for group, number in begins.items()
    )
    whole = _whole_batches(calls)
    is_idle = is_idle and all(call.is_done for call in whole)
    return Flight(rank, whole, bool(calls) and is_whole, is_idle)


def _ranks(ranks: Any) -> tuple[int, ...]:
    return tuple(map(int, json.loads(ranks) if isinstance(ranks, str) else ranks))


def _parse_call(entry: JsonObject, group: Group, label: str, words: str) -> Call:
    """Convert one entry of torch's flight record to a `Call`.

    NCCL marks a timed-out call as retired, whereas gloo marks a completed call as retired.
    """
    op, *peers = words.split()
    is_p2p = bool(entry.get("is_p2p")) or op in ("send", "recv")
    peer = None
    if peers:
        other = int(peers[0].replace("<-", "->").partition("->")[2])
        peer = group[2][other] if group[2] else other
    part = "output" if op in ("scatter", "recv") or "reduce_scatter" in op else "input"
    compared = (
        not is_p2p and not op.startswith(("all_to_all", "alltoall", "barrier")) and not op.endswith("_v")
    )
    state = entry.get("state")
    return Call(
        group=group,
        label=label,
        number=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        op=op,
        sizes=tuple(tuple(map(int, size[:8])) for size in entry.get(f"{part}_sizes", ())[:MAX_TENSORS])
        if compared or is_p2p
        else (),
        dtypes=tuple(map(str, entry.get(f"{part}_dtypes", ())[:MAX_TENSORS])) if compared or is_p2p else (),
        peer=peer,
        is_p2p=is_p2p,
        is_done=state == "completed" or (group[0] == "gloo" and bool(entry.get("retired"))),
        has_started=state in ("started", "completed"),
        place=_place(entry.get("frames") or ()),
    )


def _place(frames: Sequence[JsonObject]) -> str:
    """Return the innermost line of user code, or else of any code outside torch."""
    return users_frame([f"{frame['name']} ({frame['filename']}:{frame['line']})" for frame in frames])


def users_frame(stack: Sequence[str]) -> str:
    """Return the innermost frame of user code, or else of any code outside torch; empty if there is none."""
    files = {frame: frame.rpartition(" (")[2] for frame in stack}
    own = [frame for frame, file in files.items() if is_of_user(file)]
    own += [frame for frame, file in files.items() if "/torch/" not in file]
    return short_frame(own[0]) if own else ""


def short_frame(frame: str) -> str:
    """Shorten a frame with a full path to ``name (file.py:12)``."""
    name, _, place = frame.rpartition(" (")
    return f"{name} ({place.rpartition('/')[2]}" if name else frame


def _whole_batches(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Copy the state of each batch of calls to all its calls; NCCL records it only for the last call."""
    last = {(call.group, call.is_p2p, call.number): call for call in calls}
    found = []
    for call in calls:
        end = last[call.group, call.is_p2p, call.number]
        if call.op != "coalesced":
            found.append(replace(call, is_done=end.is_done, has_started=end.has_started))
    return tuple(found)
