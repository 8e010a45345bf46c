"""Ranks that wait for each other before there is a process group."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.support.runs import make_attempt
from trainkit.errors import EXIT_STOPPED, TrainkitError
from trainkit.job.rank_env import RankEnv
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_json
from trainkit.trainer import distributed as module
from trainkit.trainer import worker
from trainkit.trainer.distributed import startup_barrier
from trainkit.trainer.progress import Progress

SOON = timedelta(seconds=0.3)


def rank(number: int, port: int, nonce: str = "a") -> RankEnv:
    return RankEnv(
        rank=number,
        local_rank=number,
        world_size=2,
        local_world_size=2,
        node_rank=0,
        num_nodes=1,
        source="a test",
        master_addr="127.0.0.1",
        master_port=port,
        nonce=nonce,
    )


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(function()))
    thread.start()
    return thread, got


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_still_prepares_is_waited_for(
    late: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_POLL_S", 0.1)
    asked: list[int] = []

    def is_busy(number: int) -> bool:
        asked.append(number)
        return True

    thread, got = in_thread(lambda: startup_barrier(rank(1 - late, port), StopRequest(), SOON, is_busy))
    time.sleep(4 * SOON.total_seconds())
    store = startup_barrier(rank(late, port), StopRequest(), timedelta(seconds=20))
    thread.join(20)
    assert store is not None
    assert got[0] is not None
    assert set(asked) == {late}


def test_one_that_does_nothing_is_not(port: int) -> None:
    with pytest.raises(TrainkitError, match=r"1 of 2 ranks did not start within .*: rank 1$"):
        startup_barrier(rank(0, port), StopRequest(), SOON)


def test_who_prints_still_prepares(tmp_path: Path) -> None:
    attempt = make_attempt(tmp_path / "run")
    assert not worker._is_writing_log(attempt, 1)
    attempt.rank_log(1).parent.mkdir(exist_ok=True)
    attempt.rank_log(1).write_text("preparing data: 1 of 9 MiB\n")
    assert worker._is_writing_log(attempt, 1)
    long_ago = time.time() - worker.LOG_IDLE_S - 1
    os.utime(attempt.rank_log(1), (long_ago, long_ago))
    assert not worker._is_writing_log(attempt, 1)


@pytest.mark.parametrize("nonce", ["b", ""])
def test_a_rank_of_another_job_at_the_same_address(port: int, nonce: str) -> None:
    """It is refused, and does not count as the rank that is waited for."""
    thread, got = in_thread(lambda: startup_barrier(rank(0, port), StopRequest(), timedelta(seconds=60)))
    message = f"rank 1 has reached another job at 127.0.0.1:{port}, not rank 0 of its own attempt"
    with pytest.raises(TrainkitError, match=message) as caught:
        startup_barrier(rank(1, port, nonce), StopRequest(), timedelta(seconds=60))
    assert "next attempt" in caught.value.hint
    assert thread.is_alive()
    store = startup_barrier(rank(1, port), StopRequest(), timedelta(seconds=60))
    thread.join()
    assert store is not None
    store.set("key", "value")
    assert got[0].get("key") == b"value"


def test_a_store_that_no_rank_0_has_made(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example that of another training program, which listens on the port first."""
    monkeypatch.setattr(module, "IDENTITY_TIMEOUT", SOON)
    other = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(TrainkitError, match="has reached another job"):
        startup_barrier(rank(1, port), StopRequest(), timedelta(seconds=60))
    assert other.num_keys() <= 1


def test_keys_of_two_jobs_do_not_mix(port: int) -> None:
    thread, got = in_thread(lambda: startup_barrier(rank(0, port), StopRequest(), timedelta(seconds=60)))
    module._wait_for_main(rank(1, port), StopRequest(), 60.0, lambda number: False)
    other = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    other.set("verdict", "stop")
    assert startup_barrier(rank(1, port), StopRequest(), timedelta(seconds=60)) is not None
    thread.join()
    assert got[0] is not None


def neighbour(port: int) -> TCPStore:
    """Another user's connection to the store of rank 0, once that listens."""
    module._wait_for_main(rank(1, port), StopRequest(), 60.0, lambda number: False)
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def test_the_nonce_is_in_no_key_or_value(port: int) -> None:
    thread, got = in_thread(
        lambda: startup_barrier(rank(0, port, "s3cret"), StopRequest(), timedelta(seconds=60))
    )
    store = neighbour(port)
    assert startup_barrier(rank(1, port, "s3cret"), StopRequest(), timedelta(seconds=60)) is not None
    thread.join()
    seen = {key: store.get(key) for key in store.list_keys()}
    assert any("verdict" in key for key in seen)
    assert "s3cret" not in repr(seen)
    assert got[0] is not None


def test_a_neighbour_neither_arrives_nor_decides(port: int) -> None:
    """It sees the names of the keys in the store, but cannot seal a value."""
    with ThreadPoolExecutor(1) as threads:
        main = threads.submit(startup_barrier, rank(0, port), StopRequest(), timedelta(seconds=60))
        store = neighbour(port)
        while not (found := [key for key in store.list_keys() if key.endswith("num_arrived")]):
            time.sleep(0.01)
        prefix = found[0].removesuffix("num_arrived")
        store.set(f"{prefix}arrived/1", "elsewhere")
        assert store.add(found[0], 1) == 2
        env = rank(0, port)
        assert module._missing_ranks(env, PrefixStore(module._digest(env, "keys"), store)) == [1]
        store.compare_set(f"{prefix}verdict", "", "go")
        with pytest.raises(TrainkitError, match="not a rank of this attempt has written to the store"):
            main.result(60)


@pytest.mark.parametrize("number", [0, 1])
def test_rank_0_looks_at_the_shards_for_all(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = make_attempt(tmp_path / "run", num_procs=2)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    asked: list[bool] = []
    stop = StopRequest()

    def build_task(*args: Any, checks_data: bool) -> None:
        asked.append(checks_data)

    monkeypatch.setattr(worker, "build_task", build_task)
    monkeypatch.setattr(worker, "find_rank_env", lambda: rank(number, 1))
    monkeypatch.setattr(worker, "join_world", lambda *args, **options: None)
    assert worker.run_worker(attempt, plan, stop, Progress()) == EXIT_STOPPED
    assert asked == [number == 0]
