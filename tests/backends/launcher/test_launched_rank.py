"""Tests ranks that torchrun or mpirun started: their variables and their rendezvous."""

import socket
import threading

import pytest

from tests.support.runs import launch_plan
from trainkit.backends import launcher as module
from trainkit.backends.launcher import LAUNCHERS, LaunchedRank, find_launched_rank
from trainkit.errors import TrainkitError, UsageError

PLAN = launch_plan(per="gpu")


def environ(*numbers: int, launcher: str = "torchrun") -> dict[str, str]:
    address = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    return {**dict(zip(LAUNCHERS[launcher], map(str, numbers), strict=True)), **address}


def rank_of(rank: int, addr: str = "127.0.0.1", tasks: tuple[int, ...] = (2, 2)) -> LaunchedRank:
    return LaunchedRank("torchrun", rank, rank % 2, tasks, addr, 29500)


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_the_rank_of_a_launcher(launcher):
    found = find_launched_rank(environ(5, 1, 8, 4, launcher=launcher))
    assert found == LaunchedRank(launcher, 5, 1, (4, 4), "host0", 29500)
    assert (found.node_rank, found.num_nodes, found.num_tasks) == (1, 2, 8)
    assert (found.first, found.key) == (f"rank 0 of {launcher} at host0:29500", "host0.29500")


def test_no_rank():
    whole = environ(1, 1, 4, 2)
    assert find_launched_rank({}) is None
    assert find_launched_rank(environ(0, 0, 1, 1)) is None
    assert find_launched_rank({**whole, "TRAINKIT_JOB_RUN_DIR": "/runs/small"}) is None
    for name in whole:
        assert find_launched_rank({key: value for key, value in whole.items() if key != name}) is None


@pytest.mark.parametrize("numbers", [(4, 0, 4, 2), (1, 0, 4, 2), (2, 0, 5, 2), (0, 0, 4, 0)])
def test_ranks_that_are_not_numbered_host_by_host(numbers):
    words = r"^RANK=\d LOCAL_RANK=0 WORLD_SIZE=\d LOCAL_WORLD_SIZE=\d: ranks must be numbered host by host"
    with pytest.raises(UsageError, match=words):
        find_launched_rank(environ(*numbers))


def test_ranks_meet_at_an_address_of_rank_0(attempt):
    found = []
    other = threading.Thread(target=lambda: found.append(rank_of(2).meet(attempt, PLAN)))
    other.start()
    first = rank_of(0).meet(attempt, PLAN)
    other.join(timeout=20)
    [second] = found
    assert (first.node_rank, first.local_ranks, first.has_rank_0) == (0, (0,), True)
    assert (second.node_rank, second.local_ranks, second.has_rank_0) == (1, (0,), False)
    assert first.master_addr == second.master_addr == first.peer == second.peer == "127.0.0.1"
    assert (first.master_port, first.nonce) == (second.master_port, second.nonce)
    assert first.master_port != 29500


def test_rank_0_need_not_be_on_the_host_of_the_launcher(attempt, monkeypatch):
    routes = {"host0": "10.0.0.7"}
    monkeypatch.setattr(module, "address_towards", routes.get)
    found = rank_of(0, "host0").meet(attempt, PLAN)
    assert (found.master_addr, found.peer) == ("10.0.0.7", "host0")
    other = rank_of(3, "host0").meet(attempt, PLAN)
    assert (other.master_addr, other.peer) == ("10.0.0.7", "10.0.0.7")
    routes["host0"] = "127.0.1.1"
    here = socket.gethostname()
    with pytest.raises(UsageError, match=f"^MASTER_ADDR=host0 is 127.0.1.1 on {here}, an address that"):
        rank_of(0, "host0").meet(attempt, PLAN)
    with pytest.raises(UsageError, match=f"^MASTER_ADDR=host1 has no IPv4 address or route on {here}"):
        rank_of(0, "host1").meet(attempt, PLAN)
    alone = rank_of(0, "host1", tasks=(2,)).meet(attempt, PLAN)
    assert (alone.master_addr, alone.peer) == ("127.0.0.1", None)


def test_rank_0_that_does_not_come_is_named(attempt, monkeypatch):
    monkeypatch.setattr(module, "RENDEZVOUS_TIMEOUT_S", 0.1)
    with pytest.raises(TrainkitError, match=r"^rank 0 of torchrun at 127.0.0.1:29500 has not published "):
        rank_of(1).meet(attempt, PLAN)
