"""Tests which ranks block the others in a hang, with hand-made flight records."""

from collections.abc import Iterable, Mapping, Sequence

import pytest

from tests.support.said import said
from trainkit.job.blame import Blame, find_blame
from trainkit.job.flight_records import Flight, parse_flight

GROUPS = {"0": range(8), "tp0": (0, 1), "tp1": (2, 3), "left": range(4), "right": range(4, 8)}
FRAMES = [
    {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 3},
    {"name": "step", "filename": "/home/me/train.py", "line": 88},
]


def flight(
    rank: int,
    *calls: str,
    world: int = 8,
    backend: str = "nccl",
    first_id: int = 0,
    groups: Mapping[str, Sequence[int]] = GROUPS,
) -> Flight:
    """Return a rank's flight record. Each call is ``GROUP NUMBER OP [SIZES [STATE]]``, as torch writes it."""
    entries = []
    for index, call in enumerate(calls):
        group, number, op, sizes, state = [*call.split(), *("4", "done")[len(call.split()) - 3 :]]
        op, _, peers = op.partition(":")
        is_p2p = op in ("send", "recv", "coalesced")
        shape = [[int(size) for size in sizes.split("x")]]
        entry = {"record_id": first_id + index, "is_p2p": is_p2p, "time_created_ns": index, "frames": FRAMES}
        entry |= {"process_group": (group, "default_pg" if group == "0" else f"mesh_{group}")}
        entry |= {"collective_seq_id": 0 if is_p2p else int(number)}
        entry |= {"p2p_seq_id": int(number) if is_p2p else 0}
        entry |= {"profiling_name": f"{backend}:{op}{peers and f' {peers}'}"}
        entry |= {"input_sizes": shape, "output_sizes": shape}
        entry |= {"input_dtypes": ["Float"], "output_dtypes": ["Float"], "retired": state in ("done", "gone")}
        entries.append({**entry, "state": {"done": "completed", "gone": "scheduled"}.get(state, state)})
    members = {**groups, "0": range(world)}
    config = {name: {"name": name, "desc": "", "ranks": str([*ranks])} for name, ranks in members.items()}
    return parse_flight(rank, {"version": "2.10", "entries": entries, "pg_config": config}, world)


def all_ranks(*calls: str, but: int | None = None) -> dict[int, Flight]:
    """Return the flight records of eight ranks with the same calls, excluding rank `but`."""
    return {rank: flight(rank, *calls) for rank in range(8) if rank != but}


def flights(*records: Flight) -> dict[int, Flight]:
    return {record.rank: record for record in records}


def check(found: Blame | None, *ranks: int, differs: bool = False) -> None:
    assert found is not None
    assert found == Blame(ranks, found.text, differs=differs)
    said(found.text)


def ranks_of(blame: Blame | None) -> tuple[int, ...] | None:
    return None if blame is None else blame.ranks


IN_812 = "0 812 all_reduce 1024 scheduled"
WAITS = ["all_reduce (/x/torch/distributed/distributed_c10d.py:3)"]


def test_the_rank_that_has_not_called_what_the_others_wait_in():
    records = all_ranks("0 811 all_reduce", IN_812, but=5) | {5: flight(5, "0 811 all_reduce")}
    stacks = {5: ["load (/home/me/data.py:12)"], 0: WAITS}
    check(find_blame(records, stacks=stacks), 5)


def test_all_of_them_are_named_and_those_that_wait_elsewhere_are_not():
    """Rank 1 waits for rank 0 in another group. Ranks 0 and 6 wait for no rank."""
    records = flights(*(flight(rank, IN_812) for rank in (2, 3, 4, 5, 7)))
    records |= flights(flight(0), flight(1, "tp0 7 all_gather 4x1024 started"), flight(6))
    check(find_blame(records), 0, 6)


def test_a_chain_of_groups_leads_to_its_source():
    records = flights(
        flight(0, "tp0 7 all_reduce 4 scheduled"),
        flight(1, "left 3 all_reduce 4 scheduled"),
        flight(2, "left 3 all_reduce 4 scheduled"),
        flight(3, "0 2 all_reduce 4 scheduled"),
        *(flight(rank, "0 2 all_reduce 4 scheduled") for rank in (4, 5, 6)),
        flight(7, "0 1 all_reduce"),
    )
    # Rank 0 waits for rank 1, ranks 1 and 2 for ranks 0 and 3, and rank 3 for rank 7 and all others.
    assert ranks_of(find_blame(records)) == (7,)


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        (["0 5 all_reduce 1024 scheduled"] * 7 + ["0 5 all_gather 4x1024 scheduled"], (7,)),
        (["0 5 all_reduce 8 scheduled", "0 5 all_reduce 4 scheduled"], ()),
        (["0 5 all_to_all 8 scheduled", "0 5 all_to_all 4 scheduled"], ()),
        (["0 5 all_reduce 2x4 scheduled", "0 5 all_reduce 8 scheduled"], ()),
    ],
)
def test_ranks_that_call_different_things(calls, named):
    blame = find_blame({rank: flight(rank, call, world=len(calls)) for rank, call in enumerate(calls)})
    assert ranks_of(blame) == named
    said(blame.text)


def test_another_order_of_two_groups():
    """Rank 3 calls the collective of its pair first. The three others of its group call the group's first."""
    records = {rank: flight(rank, "left 9 all_reduce 4 scheduled") for rank in (0, 1)}
    records[2] = flight(2, "tp1 3 all_gather", "left 9 all_reduce 4 scheduled")
    records[3] = flight(3, "left 8 all_reduce", "tp1 4 all_gather 4 scheduled")
    assert ranks_of(find_blame(records, stacks=dict.fromkeys(range(4), WAITS))) == (3,)
    # A pair has no majority.
    records = {0: flight(0, "tp0 1 all_reduce 4 scheduled"), 1: flight(1, "left 1 all_reduce 4 scheduled")}
    blame = find_blame(
        records | {2: flight(2, "left 1 all_reduce 4 scheduled"), 3: flight(3, "tp1 1 barrier 4 scheduled")}
    )
    assert ranks_of(blame) == ()


def test_a_rank_that_leaves_out_the_collective_of_its_group():
    """Both others of the smaller group wait for rank 1, which waits with the larger group for these two."""
    before = ("0 1 all_reduce 16 done", "0 2 all_gather 4 done")
    world = "0 3 all_reduce 16 scheduled"
    left = flight_of_halves(before, "left 1 all_reduce 4 scheduled", ranks=(0, 2))
    records = left | flight_of_halves(before, world, ranks=(1,))
    records |= flight_of_halves(before, "right 1 all_reduce 4 done", world, ranks=range(3, 7))
    check(find_blame(records), 1, differs=True)
    # If the ranks have not done the same until then, as in a pipeline, they need not do so afterwards.
    other = (before[0], "0 2 barrier 4 done")
    records |= flight_of_halves(other, "right 1 all_reduce 4 done", world, ranks=(4,))
    assert ranks_of(find_blame(records)) == ()


def flight_of_halves(before: Sequence[str], *calls: str, ranks: Iterable[int]) -> dict[int, Flight]:
    """Return the flight records of seven ranks in groups of three and four."""
    halves = {"left": range(3), "right": range(3, 7)}
    return flights(*(flight(rank, *before, *calls, world=7, groups=halves) for rank in ranks))


def test_ranks_that_do_not_respond():
    records = all_ranks(IN_812, but=2)
    blame = find_blame(records, silent=(2,))
    assert ranks_of(blame) == (2,)
    said(blame.text)
    assert ranks_of(find_blame(records)) == (), "it may have no record for another reason"
    assert find_blame(all_ranks("0 811 all_reduce", but=7), silent=(7,)) is None


def test_a_record_from_which_the_group_has_been_overwritten():
    """A rank without an open call has not called the collective that is open on all others."""
    records, late = all_ranks(IN_812, but=7), flight(7, "tp0 3000 all_reduce", first_id=5000)
    assert ranks_of(find_blame(records | {7: late})) == (7,)
    assert ranks_of(find_blame(records | {7: flight(7, first_id=5000)})) == (7,), "torch writes open calls"
    waits = flight(7, "tp0 3000 all_reduce 4 scheduled", first_id=5000)
    assert ranks_of(find_blame(records | {7: waits})) == (), "it waits itself"
    # A broadcast may end on some ranks before others have called it.
    assert ranks_of(find_blame(all_ranks("0 812 broadcast 4 scheduled", but=7) | {7: late})) == ()


def test_a_send_or_receive_without_a_partner():
    waits = flights(
        flight(2, "left 5 recv:2<-1 4 scheduled"), flight(0, "left 5 all_reduce 4 scheduled"), flight(1)
    )
    waits[3] = flight(3, "left 5 all_reduce 4 scheduled")
    assert ranks_of(find_blame(waits)) == (1,)
    waits[1] = flight(1, "left 9 send:1->2 4 scheduled")
    assert ranks_of(find_blame(waits)) == (), "it is sent, and does not arrive"
    waits[1] = flight(1, "left 9 send:1->2 4 scheduled", "left 9 coalesced 4 done")
    assert ranks_of(find_blame(waits)) == (1,), "sent together with others, which has ended"


def test_a_rank_that_waits_where_no_record_says_so():
    records = all_ranks(IN_812, but=7) | {7: flight(7)}
    waits = ["recv (/x/torch/distributed/distributed_c10d.py:2500)", "step (/home/me/train.py:9)"]
    writes = ["write (/x/torch/distributed/checkpoint/storage.py:3)"]
    found = [ranks_of(find_blame(records, stacks={7: stack})) for stack in (waits, writes)]
    assert found == [(), (7,)]


def test_a_device_that_does_not_come_to_what_was_called():
    records = all_ranks("0 5 all_reduce 4 started", but=6)
    records[6] = flight(6, "0 5 all_reduce 4 scheduled", "0 6 all_reduce 4 scheduled")
    assert ranks_of(find_blame(records)) == (6,)
    never_measured = all_ranks("0 5 all_reduce 4 scheduled")
    assert ranks_of(find_blame(never_measured)) == ()


def test_a_device_that_no_longer_says_what_it_has_done():
    """Two calls of rank 6 have ended on the others, which is impossible without rank 6."""
    records = all_ranks("0 5 all_reduce", "0 6 all_reduce", IN_812)
    records[6] = flight(6, "0 5 all_reduce 4 scheduled", "0 6 all_reduce 4 scheduled")
    check(find_blame(records), 6)
    # One alone may be under way, and gloo ends it at different moments.
    records[6] = flight(6, "0 5 all_reduce", "0 6 all_reduce 4 scheduled")
    assert ranks_of(find_blame(records)) == ()


def test_gloo_counts_sends_that_it_does_not_record_and_knows_no_state():
    """Rank 0 has sent to rank 1 before, so its numbers are higher. A call that has ended is only retired."""
    waits = ["0 1 all_reduce 4 gone", "0 2 all_reduce 4 gone", "0 3 barrier 4 scheduled"]
    calls = {0: ["0 1 all_reduce 4 gone", "0 3 all_reduce 4 gone"], 1: waits, 2: waits}
    records = {rank: flight(rank, *own, world=3, backend="gloo") for rank, own in calls.items()}
    assert ranks_of(find_blame(records)) == (0,)
    ended = {rank: flight(rank, *own[:2], world=3, backend="gloo") for rank, own in calls.items()}
    assert find_blame(ended) is None
    # The oldest calls are overwritten. Ranks 0 and 2 are the ends of a pipeline, and rank 1 sends more.
    end = ["0 47 all_reduce 4 gone", "0 50 all_reduce 4 scheduled"]
    calls = {0: end, 1: ["0 85 all_reduce 4 gone", "0 90 all_reduce 4 scheduled"], 2: end}
    late = {0: calls[0], 1: calls[1][:1], 2: calls[2]}
    for own, named in ((calls, ()), (late, (1,))):
        old = {rank: flight(rank, *one, world=3, backend="gloo", first_id=500) for rank, one in own.items()}
        assert ranks_of(find_blame(old)) == named


def test_groups_of_one_name_differ_by_their_ranks():
    """A group that is split has one name on all ranks."""
    records = {}
    for rank in range(4):
        record = flight(rank, "tp0 1 all_reduce 4 scheduled" if rank != 1 else "tp0 0 all_reduce")
        pair = (0, 1) if rank < 2 else (2, 3)
        calls = [call.__class__(**{**vars(call), "group": ("nccl", "dp", pair)}) for call in record.calls]
        records[rank] = Flight(rank, tuple(calls), True)
    assert ranks_of(find_blame(records)) == (1,)


def test_without_anything_open_the_records_say_nothing():
    assert find_blame({}) is None
    assert find_blame(all_ranks("0 5 all_reduce")) is None
