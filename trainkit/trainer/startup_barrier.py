"""The ranks meet before any process group exists, and agree there whether to begin at all.

torch's own rendezvous blocks in C++ until the last rank has come: nothing can be said about who is missing,
and a rank that is asked to stop meanwhile either hangs or leaves the others hanging. Here each rank reports
to the store and looks again every few milliseconds, and one key decides for all of them: whoever sees
everybody says "go", whoever was asked to stop says "stop", and the first word counts.
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
ASK_BUSY_S = 10.0
"""How often to look whether those that are missing still prepare, when the time is over."""
LAST_WORDS_S = 20.0
"""How long a rank that was asked to stop waits for the others, to tell them so."""


def startup_barrier(
    env: RankEnv, stop: StopRequest, timeout: timedelta, is_busy: Callable[[int], bool] = lambda rank: False
) -> Store | None:
    """The store that all ranks share, or None when they have agreed to stop instead.

    Raises TrainkitError when somebody has not come within the timeout, naming who; as long as `is_busy` says
    of one of those ranks that it still prepares, all are waited for.
    """
    patience_s = timeout.total_seconds()
    if env.rank != 0 and not _reach_main(env, stop, patience_s, is_busy):
        return None
    deadline = time.monotonic() + patience_s
    store = _open_store(env, timeout)
    if stop:
        # Said before arriving: a rank that comes with this wish must not be outvoted by being the last one.
        store.compare_set("verdict", "", "stop")
    store.set(f"arrived/{env.rank}", socket.gethostname())
    store.add("num_arrived", 1)
    while not store.check(["verdict"]):
        if stop:
            store.compare_set("verdict", "", "stop")
        elif store.add("num_arrived", 0) == env.world_size:
            store.compare_set("verdict", "", "go")
        elif time.monotonic() > deadline:
            absent = [rank for rank in range(env.world_size) if not store.check([f"arrived/{rank}"])]
            if not any(map(is_busy, absent)):
                raise _missing(env, absent, timeout)
            deadline = time.monotonic() + ASK_BUSY_S
        else:
            time.sleep(POLL_S)
    if store.get("verdict") == b"go":
        return store
    _see_off(env, store)
    return None


def _open_store(env: RankEnv, timeout: timedelta) -> TCPStore:
    """Rank 0 listens, the others connect; on one machine it listens on the loopback interface only."""
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    if env.rank == 0 and env.master_addr == LOOPBACK:
        listener = socket.create_server((LOOPBACK, env.master_port), backlog=env.world_size + 16)
        # libuv's server cannot take over a socket that listens already.
        options |= {"master_listen_fd": listener.detach(), "use_libuv": False}
    return TCPStore(env.master_addr, env.master_port, env.world_size, is_master=env.rank == 0, **options)


def _reach_main(env: RankEnv, stop: StopRequest, patience_s: float, is_busy: Callable[[int], bool]) -> bool:
    """Wait until rank 0 listens; False when asked to stop before it does."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with socket.create_connection((env.master_addr, env.master_port), timeout=1.0):
                return True
        except OSError as error:
            asked = stop.received_monotonic_s
            if asked is not None and time.monotonic() > asked + LAST_WORDS_S:
                return False
            if time.monotonic() > deadline and is_busy(0):
                deadline = time.monotonic() + ASK_BUSY_S
            if time.monotonic() > deadline:
                raise TrainkitError(
                    f"rank {env.rank} cannot reach rank 0 at {env.master_addr}:{env.master_port} ({error})",
                    hint="look at the log of rank 0: it may have failed before it could listen",
                ) from None
            time.sleep(POLL_S)


def _see_off(env: RankEnv, store: TCPStore) -> None:
    """The store lives in rank 0, which therefore goes last: after all have come and read the verdict."""
    store.add("num_left", 1)
    deadline = time.monotonic() + LAST_WORDS_S
    while env.rank == 0 and store.add("num_left", 0) < env.world_size and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _missing(env: RankEnv, absent: Sequence[int], timeout: timedelta) -> TrainkitError:
    shown = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    return TrainkitError(
        f"{len(absent)} of {env.world_size} ranks did not come within {timeout}: rank {shown}",
        hint="look at the logs of the missing ranks",
    )
