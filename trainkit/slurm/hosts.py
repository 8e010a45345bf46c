"""Slurm's host lists (`node[18-19,1-2]`) and counts (`2(x3),1`), and the states of hosts."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence

from trainkit.errors import UsageError
from trainkit.slurm.client import FIELD, QUERY_PATIENCE_S, RECORD, query, records, safe_value
from trainkit.slurm.states import checked_job_id

_COUNT = re.compile(r"(?P<count>\d+)(?:\(x(?P<repeat>\d{1,6})\))?", re.ASCII)
_BRACKETS = re.compile(r"(\[[^\[\]]*\])")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?", re.ASCII)
MAX_HOSTS = 1_000_000
"""More than any cluster has; prevents a typo from exhausting memory."""


def expand_hosts(text: str) -> list[str]:
    """Every host of a host list, in Slurm's order; raises UsageError if the text is not a host list.

    By ClusterShell, one range at a time because its sets do not preserve the order. Slurm's own command would
    cost a process, and a container may lack it.
    """
    text = text.strip()
    _check(text)
    return list(itertools.chain.from_iterable(_expand_one(item) for item in _split_outside_brackets(text)))


def _check(text: str) -> None:
    safe_value(text, "a host list")
    depth = 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1) or not character.isprintable() or character.isspace():
            raise _not_a_host_list(text)
    items = _split_outside_brackets(text)
    if depth or "" in items or sum(_count(item, text) for item in items) > MAX_HOSTS:
        raise _not_a_host_list(text)


def _count(item: str, text: str) -> int:
    count = 1
    for part in _BRACKETS.findall(item):
        ranges = [_RANGE.fullmatch(one) for one in part[1:-1].split(",")]
        sizes = [int(one["last"] or one["first"]) - int(one["first"]) + 1 for one in ranges if one]
        if len(sizes) < len(ranges) or min(sizes) < 1:
            raise _not_a_host_list(text)
        count *= sum(sizes)
    return count


def _not_a_host_list(text: str) -> UsageError:
    return UsageError(f"not a Slurm host list: {text!r}", hint="for example node[1-4,7] or gpu-a,gpu-b")


def first_host(text: str) -> str:
    """The first host of a host list, without running scontrol."""
    _check(text)
    item = _split_outside_brackets(text)[0]
    return _BRACKETS.sub(lambda found: re.split(r"[-,]", found[0][1:-1])[0], item)


def _expand_one(item: str) -> list[str]:
    from ClusterShell.RangeSet import RangeSet, RangeSetException

    parts = _BRACKETS.split(item)
    names, brackets = parts[::2], parts[1::2]
    if not brackets:
        return [item]
    try:
        numbers = [
            [number for one in bracket[1:-1].split(",") for number in RangeSet(one).striter()]
            for bracket in brackets
        ]
    except RangeSetException:
        raise _not_a_host_list(item) from None
    hosts = []
    # Slurm's order: the last bracket varies fastest, then the first, the second, …
    for picked in itertools.product(*reversed(numbers[:-1]), numbers[-1]):
        chosen = [*reversed(picked[:-1]), picked[-1], ""]
        hosts.append("".join(itertools.chain.from_iterable(zip(names, chosen, strict=True))))
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    items, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    return [*items, text[start:]]


def tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` as [2, 2, 2, 1], the tasks or CPUs of each node; raises UsageError for any other form."""
    counts: list[int] = []
    for item in text.strip().split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise UsageError(f"not a Slurm list of counts: {text!r}", hint="for example 2(x3),1")
        counts += [int(match["count"])] * int(match["repeat"] or 1)
    return counts


HOSTS_TIMEOUT_S = 10.0
_NOT_RESPONDING = "*"
_DOWN = re.compile(r"down|fail|unk|error", re.IGNORECASE)
"""States in which no step can run. A draining host still runs its current job."""


def node_states(hosts: Sequence[str]) -> dict[str, str]:
    """The state of each host in sinfo's terms, such as ``allocated`` or ``down*``; unknown hosts are omitted.

    Raises SlurmUnreachable.
    """
    argv = [
        *("sinfo", "--all", "--Node", "--noheader", f"--nodes={','.join(hosts)}"),
        f"--format=%N{FIELD}%T{RECORD}",
    ]
    return parse_node_states(query(argv, timeout_s=HOSTS_TIMEOUT_S))


def parse_node_states(text: str) -> dict[str, str]:
    """Parse the output of sinfo, which lists a host once for each of its partitions."""
    return {record[0]: record[1] for record in records(text, 2)}


def is_unavailable(state: str) -> bool:
    """Whether a host in this state is down, failed or not responding."""
    return _NOT_RESPONDING in state or _DOWN.search(state) is not None


def is_down(state: str) -> bool:
    """Whether Slurm considers a host down; one that merely does not respond may be busy or being upgraded."""
    return _DOWN.search(state) is not None


def hosts_of_job(job_id: str) -> list[str]:
    """The current hosts of a job; a --no-kill job permanently loses a host that goes down.

    Raises SlurmUnreachable, and SlurmRefused for a job that Slurm no longer knows.
    """
    argv = ["squeue", "--noheader", "--states=all", "--format=%N", f"--jobs={checked_job_id(job_id)}"]
    answer = query(argv, timeout_s=HOSTS_TIMEOUT_S).strip()
    return expand_hosts(answer) if answer else []


_ALIAS = re.compile(r"(?P<name>[^:,]+):(?:\[(?P<ipv6>[^\]]+)\]|(?P<addr>[^:,]+))(?::[^,]*)?")
"""An element of SLURM_NODE_ALIASES: the name, address and hostname of a node."""
_NODE_ADDR = re.compile(r"(?:^|\s)NodeAddr=(?P<addr>\S+)")


def node_addr(name: str, *, patience_s: float = QUERY_PATIENCE_S) -> str:
    """The NodeAddr of a node: from the job's SLURM_NODE_ALIASES, else from Slurm's controller.

    It is the name itself unless the administrators have set another one.

    Raises SlurmUnreachable, and SlurmRefused for a node that Slurm does not know.
    """
    for alias in _ALIAS.finditer(os.environ.get("SLURM_NODE_ALIASES", "")):
        if alias["name"] == name:
            return alias["ipv6"] or alias["addr"]
    argv = ["scontrol", "--oneliner", "show", "node", safe_value(name, "a node name")]
    answer = query(argv, timeout_s=HOSTS_TIMEOUT_S, patience_s=patience_s)
    found = _NODE_ADDR.search(answer)
    return name if found is None else found["addr"]
