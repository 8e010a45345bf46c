"""A barrier before any process group exists, at which the ranks agree whether to start at all.

torch's rendezvous blocks in C++ until the last rank has arrived: missing ranks cannot be named, and a rank
that is asked to stop during it either hangs or leaves the others hanging. Here each rank reports to the store
and polls it every few milliseconds, and one key decides for all: the first rank that sees all ranks sets
"go", a rank that was asked to stop sets "stop", and the first value wins.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from trainkit.errors import TrainkitError
from trainkit.job.rank_env import RankEnv
from trainkit.job.signals import StopRequest

LOOPBACK = "127.0.0.1"
POLL_S = 0.02
BUSY_POLL_S = 10.0
"""Seconds between checks, after the timeout, whether missing ranks are still preparing data."""
STOP_GRACE_S = 20.0
"""Seconds that a rank asked to stop allows for notifying the others."""


def startup_barrier(
    env: RankEnv, stop: StopRequest, timeout: timedelta, is_busy: Callable[[int], bool] = lambda rank: False
) -> Store | None:
    """Wait for all ranks; returns the store that they share, or None if they agreed to stop.

    Raises TrainkitError with the ranks that are missing after the timeout, but keeps waiting while `is_busy`
    returns True for one of them.
    """
    timeout_s = timeout.total_seconds()
    if env.rank != 0 and not _wait_for_main(env, stop, timeout_s, is_busy):
        return None
    deadline = time.monotonic() + timeout_s
    store = _open_store(env, timeout)
    if stop:
        # Before it arrives: if it is the last rank, another rank could otherwise set "go" first.
        store.compare_set("verdict", "", "stop")
    store.set(f"arrived/{env.rank}", socket.gethostname())
    store.add("num_arrived", 1)
    while not store.check(["verdict"]):
        if stop:
            store.compare_set("verdict", "", "stop")
        elif store.add("num_arrived", 0) == env.world_size:
            store.compare_set("verdict", "", "go")
        elif time.monotonic() > deadline:
            missing = [rank for rank in range(env.world_size) if not store.check([f"arrived/{rank}"])]
            if not any(map(is_busy, missing)):
                raise _missing_ranks_error(env, missing, timeout)
            deadline = time.monotonic() + BUSY_POLL_S
        else:
            time.sleep(POLL_S)
    if store.get("verdict") == b"go":
        return store
    _keep_store_alive(env, store)
    return None


def _open_store(env: RankEnv, timeout: timedelta) -> TCPStore:
    """Rank 0 listens, the others connect; on one machine it listens on the loopback interface only."""
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    if env.rank == 0 and env.master_addr == LOOPBACK:
        listener = socket.create_server((LOOPBACK, env.master_port), backlog=env.world_size + 16)
        # The libuv server cannot take over a listening socket.
        options |= {"master_listen_fd": listener.detach(), "use_libuv": False}
    return TCPStore(env.master_addr, env.master_port, env.world_size, is_master=env.rank == 0, **options)


def _wait_for_main(env: RankEnv, stop: StopRequest, timeout_s: float, is_busy: Callable[[int], bool]) -> bool:
    """Wait until rank 0 listens; returns False if asked to stop before that."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((env.master_addr, env.master_port), timeout=1.0):
                return True
        except OSError as error:
            stopped_s = stop.received_monotonic_s
            if stopped_s is not None and time.monotonic() > stopped_s + STOP_GRACE_S:
                return False
            if time.monotonic() > deadline and is_busy(0):
                deadline = time.monotonic() + BUSY_POLL_S
            if time.monotonic() > deadline:
                raise TrainkitError(
                    f"rank {env.rank} cannot reach rank 0 at {env.master_addr}:{env.master_port} ({error})",
                    hint="check the log of rank 0: it may have failed before it started to listen",
                ) from None
            time.sleep(POLL_S)


def _keep_store_alive(env: RankEnv, store: TCPStore) -> None:
    """Rank 0 runs the store, so it leaves last, after all ranks have read the verdict."""
    store.add("num_left", 1)
    deadline = time.monotonic() + STOP_GRACE_S
    while env.rank == 0 and store.add("num_left", 0) < env.world_size and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _missing_ranks_error(env: RankEnv, missing: Sequence[int], timeout: timedelta) -> TrainkitError:
    listed = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return TrainkitError(
        f"{len(missing)} of {env.world_size} ranks did not start within {timeout}: rank {listed}",
        hint="check the logs of the missing ranks",
    )
