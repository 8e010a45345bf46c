"""What must be the same on all nodes: packages, code, and the time."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainkit.doctor.check import Check, plural
from trainkit.doctor.disk import CLOCK_HINT
from trainkit.job.preflight import MAX_CLOCK_OFFSET_S

FILE_SERVER = "the run folder's file server"


def compare_versions(results: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """The checks of the packages and the code of all nodes."""
    names = {name for result in results for name in result["facts"]["versions"]}
    differ: list[tuple[str | None, str]] = []
    for name in sorted(names):
        values = {
            result["facts"]["host"]: result["facts"]["versions"].get(name, "missing") for result in results
        }
        differ += _differences(name, values)
    hint = "use one environment on a shared filesystem, or install the same versions there"
    yield from (Check("packages", "failure", text, hint, host) for host, text in differ)
    if not differ:
        yield Check("packages", "ok", f"the same on {plural(len(results), 'node')}")


def _differences(name: str, values: Mapping[str, str]) -> Iterator[tuple[str | None, str]]:
    """(host, sentence) for each host whose value is not that of the majority; without one, for no host."""
    counts = Counter(values.values()).most_common()
    if len(counts) == 1:
        return
    (usual, count), (_, second), *_ = counts
    if count == second:
        shown = "; ".join(f"{value} on {_names(values, value)}" for value, _ in counts)
        yield None, f"{name} is {shown}"
        return
    for host, value in values.items():
        if value != usual:
            yield host, f"{name} is {value}, but {usual} on {count} of {len(values)} nodes"


def _names(values: Mapping[str, object], value: object, most: int = 3) -> str:
    """The hosts with a value."""
    hosts = sorted(host for host, found in values.items() if found == value)
    more = f" and {len(hosts) - most} more" if len(hosts) > most else ""
    return f"{', '.join(hosts[:most])}{more}"


def compare_clocks(results: Sequence[Mapping[str, Any]], caller: str) -> Iterator[Check]:
    """The checks of the clocks of all nodes, of this host (the `caller`), and of the file server.

    Each clock has one vote; those that differ from the largest group that agrees are off.
    """
    offsets_s = {item["facts"]["host"]: item["time_s"] - item["arrived_s"] for item in results}
    nodes = set(offsets_s)
    offsets_s.setdefault(caller, 0.0)
    server_s = _server_offset_s(results)
    if server_s is not None:
        offsets_s[FILE_SERVER] = server_s
    groups = _agreeing(offsets_s)
    if len(groups) == 1:
        spread_s = max(offsets_s[host] for host in nodes) - min(offsets_s[host] for host in nodes)
        yield Check("clock", "ok", f"of {plural(len(nodes), 'node')} within {spread_s:.1f} s")
        return
    if len(groups[0]) == len(groups[1]):
        first, second = (statistics.median(offsets_s[name] for name in group) for group in groups[:2])
        ahead, behind = (groups[0], groups[1]) if first > second else (groups[1], groups[0])
        text = f"that of {' and '.join(ahead)} is {abs(first - second):.0f} s ahead of {' and '.join(behind)}"
        yield Check("clock", "failure", text, CLOCK_HINT)
        return
    time_s = statistics.median(offsets_s[name] for name in groups[0])
    for name in (name for group in groups[1:] for name in group):
        apart_s = offsets_s[name] - time_s
        text = f"{abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} the other clocks"
        if name in nodes:
            yield Check("clock", "failure", text, CLOCK_HINT, name)
        elif name == FILE_SERVER:
            yield Check("clock", "failure", f"{name} is {text}", CLOCK_HINT)
        else:  # no rank runs there
            yield Check("clock", "warning", f"this host, {name}, is {text}", CLOCK_HINT)


def _server_offset_s(results: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds by which the file server is ahead of this host; None if the nodes disagree.

    They disagree when the folder is on a disk of each node: its times are then those of the node.
    """
    found: list[float] = [
        item["time_s"] - item["arrived_s"] - item["facts"]["file_server_offset_s"]
        for item in results
        if item["facts"]["file_server_offset_s"] is not None
    ]
    if not found or max(found) - min(found) > MAX_CLOCK_OFFSET_S:
        return None
    return statistics.median(found)


def _agreeing(offsets_s: Mapping[str, float]) -> list[list[str]]:
    """Groups of clocks that agree, the largest first; each clock is in one group."""
    groups: list[list[str]] = []
    for name in sorted(offsets_s, key=lambda item: offsets_s[item]):
        if groups and offsets_s[name] - offsets_s[groups[-1][0]] <= MAX_CLOCK_OFFSET_S:
            groups[-1].append(name)
        else:
            groups.append([name])
    return sorted(groups, key=len, reverse=True)
