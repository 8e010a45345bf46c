"""Finds the ranks that block all other ranks during a hang, using the flight records of all ranks.

A rank that has made a call waits for the members of the process group that have not made the call. Ranks that
wait for no other rank are blocking the waiting ranks. If ranks call the same collective with different
arguments, the minority is at fault. If the records show no rank at fault, the result names no rank. This
module reads no files of the run; callers pass in the records.
"""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainkit.formats import rank_list
from trainkit.job.flight_records import Call, Flight, Group, short_frame, users_frame

COMMUNICATES = re.compile(
    r"/torch/distributed/(?:distributed_c10d|_functional_collectives|pipelining/\w+)\.py:"
)
"""Matches stack frames of calls that wait for other ranks. The stacks are needed because flight records lack
some calls, such as gloo's receive."""
UNKNOWN = "the flight records do not show which rank is at fault"
_ANSWER = {"send": "recv", "recv": "send"}
MAX_SHOWN = 3
"""Maximum number of unfinished collectives to describe if no rank can be blamed."""


@dataclass(frozen=True)
class Blame:
    """The ranks that block the other ranks, and a description of the fault."""

    ranks: tuple[int, ...]
    """All ranks at fault; empty if the ranks at fault cannot be determined."""
    text: str
    """A description of the fault. If exactly one rank is at fault, the description lacks a subject, and the
    caller prepends the rank."""
    differs: bool = False
    """True if ranks made different calls, which is a bug in the program and not the fault of a host."""


@dataclass(frozen=True)
class _Wait:
    """An unfinished call, and the ranks for which it is waiting."""

    call: Call
    waiting: tuple[int, ...]
    """The ranks on which the call has not completed."""
    inside: tuple[int, ...]
    """The ranks that have made the call, including ranks on which it has completed."""
    absent: tuple[int, ...]
    """The ranks that, according to the records, have not made the call."""


def find_blame(
    flights: Mapping[int, Flight],
    silent: Collection[int] = (),
    stacks: Mapping[int, Sequence[str]] | None = None,
) -> Blame | None:
    """Find the ranks that block the other ranks; return None if no flight record shows a waiting rank.

    `silent` contains the ranks that do not respond. `stacks` maps each responding rank to its frames,
    innermost first.
    """
    stacks = stacks or {}
    calls = _align(flights)
    failed = _failed_devices(calls)
    waits = _find_waits(calls, flights, silent, failed)
    if not waits:
        return None
    recorded = {rank for wait in waits for rank in wait.waiting}
    elsewhere = {rank for rank, stack in stacks.items() if stack and COMMUNICATES.search(stack[0])} - recorded
    waiting = recorded | elsewhere
    stalled = _stalled_devices(calls) - {rank for wait in waits if wait.absent for rank in wait.waiting}
    culprits = {rank for wait in waits for rank in wait.absent if rank in silent or rank not in waiting}
    mismatch = _find_mismatch(calls, flights)
    differs = mismatch is not None
    texts = [] if mismatch is None else [mismatch.text]
    if culprits:
        if named := sorted(culprits & failed):
            what = "has not completed collectives that completed on other ranks"
            texts.append(f"the device of {rank_list(named)} {what}")
        if others := culprits - failed:
            texts.append(_describe_absent(waits, others, silent, stacks))
    elif stalled:
        culprits, wait = stalled, next(wait for wait in waits if stalled & {*wait.waiting})
        whose = f"the device of {rank_list(sorted(stalled))} has not started"
        texts.append(f"the other ranks wait in {wait.call.shown_in_group}, which {whose}")
    elif mismatch is None:
        outliers, outlier_text = _out_of_step(calls) if not elsewhere else (set[int](), "")
        culprits = outliers or (_out_of_order(waits) if not elsewhere else set())
        differs = bool(culprits)
        texts += [*filter(None, [outlier_text]), *(_describe(wait) for wait in waits[:MAX_SHOWN])]
    culprits |= {*(() if mismatch is None else mismatch.ranks)}
    text = "; ".join([*texts, *([] if culprits else [UNKNOWN])])
    return Blame(tuple(sorted(culprits)), text, differs)


def blame_for_unlike_data(flights: Mapping[int, Flight], ended: int) -> tuple[int, ...]:
    """Return the ranks whose collective differs from the majority's; empty if there is no clear majority.

    gloo raised an error in rank `ended` because the rank received unexpected data, so the rank left no flight
    record. If all other ranks agree on their last common collective, rank `ended` must have made the
    differing call.
    """
    calls = {rank: own for rank, own in _align(flights).items() if rank != ended}
    for group in {call.group for own in calls.values() for call in own if ended in call.group[2]}:
        own = {rank: {one.number: one for one in calls[rank] if one.group == group} for rank in calls}
        if len(own) < 2 or not all(own.values()):
            continue
        last = min(max(numbers) for numbers in own.values())
        ranks_of: dict[object, list[int]] = {}
        for rank, numbers in own.items():
            ranks_of.setdefault(numbers[last].signature if last in numbers else None, []).append(rank)
        *few, most = sorted(ranks_of.values(), key=len)
        if 2 * len(most) > len(own):
            return tuple(sorted(rank for ranks in few for rank in ranks)) or (ended,)
    return ()


def blame_by_stacks(stacks: Mapping[int, Sequence[str]], silent: Collection[int] = ()) -> Blame | None:
    """Find the ranks whose innermost frames show no wait while all other ranks wait.

    Returns None if the frames are inconclusive. This search requires no flight records, but only works on
    CPUs: a rank on a GPU may block on its device in any frame.
    """
    waiting = sorted(rank for rank, stack in stacks.items() if stack and _waits(stack[0]))
    others = sorted({*silent, *(rank for rank, stack in stacks.items() if stack)} - {*waiting})
    places: dict[str, list[int]] = {}
    for rank in waiting:
        places.setdefault(_call_and_place(stacks[rank]), []).append(rank)
    waits = [f"{rank_list(ranks)} {_verb(ranks, 'wait')} in {place}" for place, ranks in places.items()]
    if not others and len(waits) > 1:
        return Blame((), "; ".join([*waits, UNKNOWN]))
    if not others or len(others) > len(waiting) or not all(stacks.values()):
        return None
    subject = f"{rank_list(others)} " if len(others) > 1 else ""
    what = "not respond" if {*others} <= {*silent} else "not take part"
    text = f"{subject}{_verb(others, 'do')} {what}, and {', '.join(waits)}"
    return Blame(tuple(others), "; ".join([text, *_places(others, stacks)]))


def _call_and_place(stack: Sequence[str]) -> str:
    """Return the innermost function and line of user code, such as ``all_reduce at step (train.py:12)``."""
    name, place = stack[0].partition(" (")[0], users_frame(stack)
    return place if place == short_frame(stack[0]) else f"{name} at {place}"


def _waits(frame: str) -> bool:
    """Return whether a rank's innermost frame shows that the rank is waiting for other ranks."""
    file, _, line = frame.rpartition(" (")[2].rstrip(")").rpartition(":")
    in_torch = COMMUNICATES.search(frame) or "/torch/autograd/graph.py:" in frame
    return bool(in_torch) or (line.isdigit() and ".wait(" in linecache.getline(file, int(line)))


def _align(flights: Mapping[int, Flight]) -> dict[int, list[Call]]:
    """Return each rank's calls, with each group's ranks filled in and call numbers comparable across ranks.

    gloo's flight records lack the ranks of a group, and gloo's call numbers include sends and receives, which
    are not recorded. If unrecorded sends and receives have shifted gloo's call numbers, only unfinished calls
    are kept, all with the same number.
    """
    members: dict[tuple[str, str], set[int]] = {}
    for rank, flight in flights.items():
        for call in flight.calls:
            members.setdefault(call.group[:2], set()).add(rank)
    are_whole = all(flight.is_whole for flight in flights.values())
    found: dict[int, list[Call]] = {rank: [] for rank in flights}
    numbers: dict[Group, dict[int, list[int]]] = {}
    for rank, flight in flights.items():
        for call in flight.calls:
            group = (*call.group[:2], call.group[2] or tuple(sorted(members[call.group[:2]])))
            own = numbers.setdefault(group, {}).setdefault(rank, [])
            own.append(call.number)
            number = len(own) if group[0] == "gloo" and are_whole else call.number
            found[rank].append(replace(call, group=group, number=number))
    shifted = {
        group
        for group, ranks in numbers.items()
        if group[0] == "gloo" and not are_whole and not all(map(_are_consecutive, ranks.values()))
    }
    for rank, calls in found.items():
        found[rank] = [
            replace(call, number=0) if call.group in shifted else call
            for call in calls
            if call.group not in shifted or not call.is_done
        ]
    return found


def _are_consecutive(numbers: Sequence[int]) -> bool:
    return len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))


def _find_waits(
    calls: Mapping[int, Sequence[Call]],
    flights: Mapping[int, Flight],
    silent: Collection[int],
    failed: Collection[int],
) -> list[_Wait]:
    """Return the unfinished calls; collectives with the most waiting ranks come first."""
    newest = {
        (call.group, rank): call.number for rank, own in calls.items() for call in own if not call.is_p2p
    }
    pending = [
        (rank, call) for rank, own in calls.items() for call in own if not call.is_done and rank not in failed
    ]
    ended = {(call.group, call.number) for own in calls.values() for call in own if call.is_done}
    peers = Counter((rank, call.peer, call.op) for rank, call in pending if call.is_p2p)
    found: dict[tuple[Any, ...], _Wait] = {}
    for rank, call in pending:
        key = (call.group, call.number, *((rank, call.op) if call.is_p2p else ()))
        inside: tuple[int, ...]
        absent: tuple[int, ...]
        if call.is_p2p and call.peer is not None and call.op in _ANSWER:
            is_there = peers[call.peer, rank, _ANSWER[call.op]] >= peers[rank, call.peer, call.op]
            inside, absent = ((rank, call.peer), ()) if is_there else ((rank,), (call.peer,))
            absent = absent if call.peer in flights or call.peer in silent else ()
            found[key] = _Wait(call, inside, inside, absent)
        elif not call.is_p2p and key not in found:
            # A collective that is open on one rank has usually not completed on any other rank, so an idle
            # rank has not called it.
            is_open = bool(SYMMETRIC.search(call.op)) and (call.group, call.number) not in ended
            unrecorded = {
                rank: -1 if flight.is_whole or (is_open and flight.is_idle) else None
                for rank, flight in flights.items()
            }
            last = {one: newest.get((call.group, one), unrecorded.get(one)) for one in call.group[2]}
            inside = tuple(
                one for one, number in last.items() if number is not None and number >= call.number
            )
            absent = tuple(
                one
                for one, number in last.items()
                if one in silent or (number is not None and number < call.number)
            )
            waiting = tuple(
                one
                for one, other in pending
                if other.group == call.group and other.number == call.number and not other.is_p2p
            )
            found[key] = _Wait(call, waiting, inside, absent)
    return sorted(found.values(), key=lambda wait: (wait.call.is_p2p, -len(wait.waiting), wait.call.number))


SYMMETRIC = re.compile("all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier")
"""Matches the names of collectives that complete on a rank only after all ranks have taken part."""


def _failed_devices(calls: Mapping[int, Sequence[Call]]) -> set[int]:
    """Return the ranks with several open collectives that have already completed on other ranks.

    If a collective that is open on a rank has completed on other ranks, the rank's device took part but no
    longer reports completions. A single open collective does not indicate a failed device, because it may
    still be in progress.
    """
    ended = {(call.group, call.number) for own in calls.values() for call in own if call.is_done}
    newest = {(call.group, rank): call.number for rank, own in calls.items() for call in own}
    opened = {
        (call.group, call.number, rank) for rank, own in calls.items() for call in own if not call.is_done
    }

    def has_ended(call: Call, rank: int) -> bool:
        others = (other for other in call.group[2] if other != rank)
        return (call.group, call.number) in ended or any(
            newest.get((call.group, other), -1) >= call.number
            and (call.group, call.number, other) not in opened
            for other in others
        )

    return {
        rank
        for rank, own in calls.items()
        if sum(
            call.group[0] != "gloo" and bool(SYMMETRIC.search(call.op)) and has_ended(call, rank)
            for call in own
            if not call.is_done and not call.is_p2p
        )
        > 1
    }


def _stalled_devices(calls: Mapping[int, Sequence[Call]]) -> set[int]:
    """Return the ranks whose device has not started a call that other ranks' devices have started."""
    pending = {rank: [call for call in own if not call.is_done] for rank, own in calls.items()}
    begun = {(call.group, call.number) for own in pending.values() for call in own if call.has_started}
    return {
        rank
        for rank, own in pending.items()
        if own and not any(call.has_started for call in own) and (own[0].group, own[0].number) in begun
    }


def _find_mismatch(calls: Mapping[int, Sequence[Call]], flights: Mapping[int, Flight]) -> Blame | None:
    """Find the first unfinished collective that ranks called with different arguments; blame the minority."""
    pending = {
        (call.group, call.number)
        for own in calls.values()
        for call in own
        if not call.is_done and not call.is_p2p
    }
    for group, number in sorted(pending):
        called = {
            rank: [call for call in own if call.group == group and call.number == number and not call.is_p2p]
            for rank, own in calls.items()
        }
        called = {rank: own for rank, own in called.items() if own}
        ranks_of: dict[tuple[Any, ...], list[int]] = {}
        for rank, own in called.items():
            ranks_of.setdefault(tuple(call.signature for call in own), []).append(rank)
        if len(ranks_of) < 2:
            continue
        by_size = sorted(ranks_of.values(), key=len)
        few = sorted(rank for ranks in by_size[:-1] for rank in ranks)
        text = [
            f"{rank_list(ranks)} called {', '.join(call.shown for call in called[ranks[0]])}"
            for ranks in by_size
        ]
        of = called[few[0]][0].position
        # gloo's call numbers may be shifted, because they include sends and receives, which are not recorded.
        is_sure = all(flight.is_whole for flight in flights.values()) or all(
            not called[rank][0].is_done for rank in few
        )
        decided = 2 * len(by_size[-1]) > len(called) and (group[0] != "gloo" or is_sure)
        return Blame(tuple(few) if decided else (), f"the ranks disagree on {of}: {', '.join(text)}")
    return None


def _out_of_step(calls: Mapping[int, Sequence[Call]]) -> tuple[set[int], str]:
    """Find the ranks that made the same calls as the majority but are now waiting in a different call.

    Calls in disjoint groups are considered the same call, because each rank belongs to only one of the
    groups, for example its node's group.
    """
    ended = [
        {
            (call.group, call.number): index
            for index, call in enumerate(own)
            if call.is_done and len(call.group[2]) == len(calls)
        }
        for own in calls.values()
    ]
    first = next((key for key in ended[0] if all(key in indices for indices in ended)), None)
    if first is None:
        return set(), ""
    sequences = [own[indices[first] :] for own, indices in zip(calls.values(), ended, strict=True)]
    for here in zip(*sequences, strict=False):
        same: list[dict[int, Call]] = []
        for rank, call in zip(calls, here, strict=True):
            found = next((one for one in same if all(_are_alike(call, two) for two in one.values())), None)
            if found is None:
                same.append(found := {})
            found[rank] = call
        if len(same) == 1:
            continue
        *few, most = sorted(same, key=len)
        others = {rank: call for one in few for rank, call in one.items()}
        if len(most) <= len(others) or any(call.is_done for call in others.values()):
            break
        subject = f"{rank_list(sorted(others))} " if len(others) > 1 else ""
        own, usual = next(iter(others.values())), next(iter(most.values()))
        text = (
            f"{_verb(others, 'have')} called {own.shown_in_group}, and the other ranks {usual.shown_in_group}"
        )
        return {*others}, f"{subject}{text}"
    return set(), ""


def _are_alike(one: Call, other: Call) -> bool:
    members = {*one.group[2]}
    return one.signature == other.signature and (
        one.group == other.group or members.isdisjoint(other.group[2])
    )


def _out_of_order(waits: Sequence[_Wait]) -> set[int]:
    """Return the ranks that call collectives of several groups in a different order than the majority.

    If ranks call the groups' collectives in different orders, all ranks wait for one another. In each group,
    the suspects are the smaller side: either the ranks that have called the collective or the ranks that have
    not. The suspects are blamed if they are the same ranks in all groups.
    """
    blocked = {rank for wait in waits if wait.absent for rank in wait.waiting}
    accused = {
        min(wait.inside, wait.absent, key=len)
        for wait in waits
        if len(wait.inside) + len(wait.absent) == len(wait.call.group[2])
        and wait.absent
        and len(wait.inside) != len(wait.absent)
    }
    found = {*accused.pop()} if len(accused) == 1 else set()
    return found if found <= blocked else set()


def _describe(wait: _Wait) -> str:
    known = "all of its ranks" if {*wait.inside} == {*wait.call.group[2]} else rank_list(wait.inside)
    whom = f" for {rank_list(wait.absent)}" if wait.absent else f", which {known} have called"
    return f"{rank_list(wait.waiting)} {_verb(wait.waiting, 'wait')} in {wait.call.shown_in_group}{whom}"


def _verb(ranks: Collection[int], verb: str) -> str:
    """Return the verb in the form that matches the number of ranks."""
    return verb if len(ranks) > 1 else {"have": "has", "are": "is", "do": "does"}.get(verb, f"{verb}s")


def _describe_absent(
    waits: Sequence[_Wait],
    culprits: Collection[int],
    silent: Collection[int],
    stacks: Mapping[int, Sequence[str]],
) -> str:
    """Describe the call that the culprits have not made, the ranks that wait, and the culprits' stacks."""
    texts = []
    remaining = {*culprits}
    for wait in waits:
        if here := sorted(remaining & {*wait.absent}):
            remaining -= {*here}
            subject = f"{rank_list(here)} " if len(culprits) > 1 else ""
            ended = [rank for rank in here if rank in silent]
            done = "answered" if wait.call.is_p2p else "called"
            what = f"{_verb(here, 'have')} not {done} {wait.call.shown_in_group}"
            if ended == here:
                what = f"{_verb(here, 'do')} not respond, and {what}"
            place = wait.call.place or users_frame(stacks.get(wait.waiting[0], ()))
            at = f" in {place}" if place else ""
            texts.append(
                f"{subject}{what}, for which {rank_list(wait.waiting)} {_verb(wait.waiting, 'wait')}{at}"
            )
    return "; ".join([*texts, *_places(culprits, stacks)])


def _places(ranks: Collection[int], stacks: Mapping[int, Sequence[str]]) -> list[str]:
    """Describe the code location of each rank whose stack is known."""
    subjects = {
        rank: f"rank {rank}" if len(ranks) > 1 else "it" for rank in sorted(ranks) if stacks.get(rank)
    }
    return [f"{subject} is in {short_frame(stacks[rank][0])}" for rank, subject in subjects.items()]
