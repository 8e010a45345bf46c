"""A barrier before any process group exists, at which the ranks agree whether to start at all.

torch's rendezvous blocks in C++ until the last rank has arrived: missing ranks cannot be named, and a rank
that is asked to stop during it either hangs or leaves the others hanging. Here each rank reports to the store
and then polls one key, which decides for all: the last rank to arrive sets "go", a rank that was asked to
stop sets "stop", rank 0 sets "missing" after the timeout, and the first value wins.

Thousands of ranks ask one server, so they ask less and less often. The store's own wait would ask once, but
it cannot be interrupted by a stop signal.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # all documented, but not in its `__all__`
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.job.rank_env import GPU_BINDING_HINT, RankEnv
from trainkit.job.signals import StopRequest

LOOPBACK = "127.0.0.1"
POLL_S = 0.02
"""The first pause between two questions; each is longer than the one before."""
LONGER = 1.5
LONGEST_POLL_S = 2.0
BUSY_POLL_S = 10.0
"""Seconds between checks, after the timeout, whether missing ranks are still preparing data."""
IDENTITY_TIMEOUT = timedelta(seconds=60)
"""How long rank 0 may take from listening to identifying itself, which it does first."""
STOP_GRACE_S = 20.0
"""Seconds that a rank asked to stop allows for notifying the others."""


def startup_barrier(
    env: RankEnv,
    stop: StopRequest,
    timeout: timedelta,
    is_busy: Callable[[int], bool] = lambda rank: False,
    gpu: str = "",
) -> Store | None:
    """Wait for all ranks; returns the store that they share, or None if they agreed to stop.

    `gpu` is the UUID of this rank's GPU, which `refuse_shared_gpu` compares. Raises TrainkitError with the
    ranks that are missing after the timeout, but keeps waiting while `is_busy` returns True for one of them.
    """
    timeout_s = timeout.total_seconds()
    if env.rank != 0 and not _wait_for_main(env, stop, timeout_s, is_busy):
        return None
    deadline = time.monotonic() + timeout_s
    store = _own_part(env, _open_store(env, timeout), timeout)
    if stop:
        # Before it arrives: if it is the last rank, it would set "go" first.
        store.compare_set("verdict", "", "stop")
    store.set(f"arrived/{env.rank}", f"{socket.gethostname()} {gpu}")
    if store.add("num_arrived", 1) == env.world_size:
        store.compare_set("verdict", "", "go")
    pauses = _pauses(env.world_size)
    while not store.check(["verdict"]):
        if stop:
            store.compare_set("verdict", "", "stop")
        elif env.rank == 0 and time.monotonic() > deadline:
            missing = _missing_ranks(env, store)
            if missing and not any(map(is_busy, missing)):
                # Named once: thousands of ranks would otherwise each ask for every other.
                store.set("missing", json.dumps(missing))
                store.compare_set("verdict", "", "missing")
            deadline = time.monotonic() + BUSY_POLL_S
        else:
            time.sleep(next(pauses))
    verdict = store.get("verdict")
    if verdict == b"go":
        return store
    if verdict == b"missing":
        missing = json.loads(store.get("missing"))
        _keep_store_alive(env, store, env.world_size - len(missing))
        raise _missing_ranks_error(env, missing, timeout)
    _keep_store_alive(env, store, env.world_size)
    return None


def refuse_shared_gpu(env: RankEnv, gpu: str, store: Store) -> None:
    """Raise TrainkitError (exit code 78) if a lower rank of this node has arrived with the same GPU."""
    for other in range(env.rank - env.local_rank, env.rank):
        if store.get(f"arrived/{other}").decode().endswith(f" {gpu}"):
            raise TrainkitError(
                f"ranks {other} and {env.rank} on {socket.gethostname()} have the same GPU, {gpu}",
                hint=GPU_BINDING_HINT,
                exit_code=EXIT_NO_RESTART,
            )


def _pauses(world_size: int) -> Iterator[float]:
    """Growing pauses in seconds; the more ranks ask the same server, the longer they get."""
    longest_s = min(LONGEST_POLL_S, max(5 * POLL_S, world_size / 4000))
    pause_s = max(POLL_S, longest_s / 20)
    while True:
        yield pause_s
        pause_s = min(longest_s, LONGER * pause_s)


def _missing_ranks(env: RankEnv, store: Store) -> list[int]:
    return [rank for rank in range(env.world_size) if not store.check([f"arrived/{rank}"])]


def _open_store(env: RankEnv, timeout: timedelta) -> TCPStore:
    """Rank 0 listens, the others connect; on one machine it listens on the loopback interface only."""
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    if env.rank == 0 and env.master_addr == LOOPBACK:
        listener = socket.create_server((LOOPBACK, env.master_port), backlog=env.world_size + 16)
        # The libuv server cannot take over a listening socket.
        options |= {"master_listen_fd": listener.detach(), "use_libuv": False}
    return TCPStore(env.master_addr, env.master_port, env.world_size, is_master=env.rank == 0, **options)


def _own_part(env: RankEnv, store: TCPStore, timeout: timedelta) -> Store:
    """The part of the store that belongs to this attempt, in which no other job's keys are.

    Raises TrainkitError when the store at the address of rank 0 is that of another job.
    """
    identity = hashlib.sha256(env.nonce.encode()).hexdigest()
    if env.rank == 0:
        store.set("attempt", identity)
    else:
        store.set_timeout(IDENTITY_TIMEOUT)
        try:
            found = store.get("attempt").decode(errors="replace")
        except DistStoreError:
            found = ""
        if found != identity:
            raise TrainkitError(
                f"rank {env.rank} has reached another job at {env.master_addr}:{env.master_port}, "
                "not rank 0 of its own attempt",
                hint="that job took the port before rank 0 could; the next attempt chooses another one",
            )
        store.set_timeout(timeout)
    return PrefixStore(env.nonce or "ranks", store)


def _wait_for_main(env: RankEnv, stop: StopRequest, timeout_s: float, is_busy: Callable[[int], bool]) -> bool:
    """Wait until rank 0 listens; returns False if asked to stop before that."""
    deadline, pauses = time.monotonic() + timeout_s, _pauses(env.world_size)
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
            time.sleep(next(pauses))


def _keep_store_alive(env: RankEnv, store: Store, num_ranks: int) -> None:
    """Rank 0 runs the store, so it leaves last, after `num_ranks` ranks have read the verdict."""
    store.add("num_left", 1)
    deadline = time.monotonic() + STOP_GRACE_S
    while env.rank == 0 and store.add("num_left", 0) < num_ranks and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _missing_ranks_error(env: RankEnv, missing: Sequence[int], timeout: timedelta) -> TrainkitError:
    listed = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return TrainkitError(
        f"{len(missing)} of {env.world_size} ranks did not start within {timeout}: rank {listed}",
        hint="check the logs of the missing ranks",
    )
