"""How long a rank waited for communication with nothing to compute meanwhile, from its profile. Pure.

On a GPU that is the time in which a kernel of NCCL runs and no other: such a kernel waits for the other ranks
too. On a CPU it is the time in which gloo is at work, or the training thread inside an operation of
torch.distributed, while that thread is in no other operation; Python between two operations cannot be told
from waiting there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MICROSECOND = 1e-6
NANOSECOND = 1e-9
KERNEL_OF_NCCL = "nccl"
WORK_OF_GLOO = "gloo:"
NEEDED = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
COMMUNICATING_OPS = ("c10d::", "_c10d_functional::wait_tensor")

Span = tuple[float, float]


def exposed_s(trace: Mapping[str, Any], device: str, since_s: float = 0.0) -> float | None:
    """Seconds of exposed communication in a trace of torch's profiler, from a time (seconds since 1970) on.

    `device` is ``cpu`` or ``cuda``. None when nothing that computes was recorded, as of a GPU whose counters
    may not be read.
    """
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    talking, computing = _of_gpu(events) if device == "cuda" else _of_cpu(events)
    if not computing:
        return None
    begin = since_s / MICROSECOND - float(trace.get("baseTimeNanoseconds") or 0) * NANOSECOND / MICROSECOND
    exposed = without(talking, computing)
    return sum(max(0.0, end - max(start, begin)) for start, end in exposed) * MICROSECOND


def lean(value: dict[str, Any]) -> dict[str, Any]:
    """What `exposed_s` needs of a JSON object of a trace; an ``object_hook`` for large ones."""
    if "ph" not in value:
        return value
    is_needed = value.get("cat") in ("kernel", "cpu_op") or str(value.get("name")).startswith(WORK_OF_GLOO)
    return {key: value[key] for key in NEEDED if key in value} if is_needed else {}


def _of_gpu(events: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Span]]:
    talking: list[Span] = []
    computing: list[Span] = []
    for event in events:
        if event.get("cat") == "kernel":
            talks = KERNEL_OF_NCCL in str(event["name"]).lower()
            (talking if talks else computing).append(_span(event))
    return union(talking), union(computing)


def _of_cpu(events: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Span]]:
    in_flight: list[Span] = []
    inside: list[Span] = []
    ops: list[Span] = []
    for event in events:
        name = str(event.get("name"))
        if name.startswith(WORK_OF_GLOO):
            in_flight.append(_span(event))
        elif event.get("cat") == "cpu_op" and event.get("tid") == event.get("pid"):
            # The training thread is the process's first; what gloo's own threads do is not training.
            (inside if name.startswith(COMMUNICATING_OPS) else ops).append(_span(event))
    talking = union(inside)
    # An operation on a split tensor is recorded around the communication that it needs.
    return union([*in_flight, *talking]), list(without(union(ops), talking))


def _span(event: Mapping[str, Any]) -> Span:
    start = float(event["ts"])
    return start, start + float(event.get("dur") or 0.0)


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap or touch as one, in their order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def without(spans: Iterable[Span], others: list[Span]) -> Iterator[Span]:
    """What of some spans none of the others covers; both as `union` gives them."""
    index = 0
    for begin, end in spans:
        start = begin
        while index < len(others) and others[index][1] <= start:
            index += 1
        position = index
        while position < len(others) and others[position][0] < end:
            if others[position][0] > start:
                yield start, others[position][0]
            start = max(start, others[position][1])
            position += 1
        if start < end:
            yield start, end
