"""A run on several hosts without Slurm: every host runs the agent of its node, and node 0 supervises all.

Node 0 makes the attempt and announces it over the links of the static rendezvous. Later it forwards signals
and deadlines to the other hosts, which report theirs and how their agent ended.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, TrainkitError
from trainkit.job import processes
from trainkit.job.attempt_end import judge, write_end
from trainkit.job.decision import Decision, Outcome, RestartOptions
from trainkit.job.node.rendezvous import (
    LOCAL_ADDR,
    VISIBLE_TIMEOUT_S,
    StopSignalReceived,
    await_plan,
    new_nonce,
)
from trainkit.job.node.static_rendezvous import HostLink, HostPlace, dismiss, stopped_error
from trainkit.job.notifications import notify_end
from trainkit.job.preflight import SUPERVISOR_VIEW_VARIABLE, plan_digest, supervisor_view
from trainkit.job.processes import KILL_MARGIN_S, PEER_EXIT_S, ProcessGroup, module_argv, redirect_output
from trainkit.job.rank_env import NONCE_VARIABLE
from trainkit.job.signals import NOTICE_SIGNALS, is_death_by_notice, signal_exit_code
from trainkit.job.watch.attempt import LocalAttemptWatch
from trainkit.job.work_folder import WORK_DIR_VARIABLE, prepare_work_folder
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import end_line
from trainkit.run.events import log_event
from trainkit.run.files import write_json
from trainkit.run.lock import become_sole_supervisor
from trainkit.run.record import read_job
from trainkit.run.rundir import AttemptDir, RunDir

NO_RESTART = RestartOptions(unavailable_reason="a run started by hand is not restarted")
READY_TIMEOUT_S = VISIBLE_TIMEOUT_S + 30.0
LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class HostAttempt:
    """The attempt that the hosts run, as node 0 announces it."""

    run_dir: str
    attempt: int
    cwd: str
    """The working directory of every agent."""
    plan_digest: str
    view: str
    """The run folder as node 0 sees it, for the preflight checks of the other hosts."""
    work_dir: str | None
    """The folder in which a command starts."""
    nonce: str

    @property
    def folder(self) -> AttemptDir:
        return RunDir(self.run_dir).attempt(self.attempt)


def prepare_process() -> None:
    """Block the signals that the functions here wait for; a closed terminal counts as SIGTERM."""
    processes.block_signals()
    processes.adopt_orphans()
    signal.signal(signal.SIGHUP, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))


def announce(
    attempt: AttemptDir, plan: LaunchPlan, place: HostPlace, links: Mapping[int, HostLink]
) -> HostAttempt:
    """Announce an attempt to the other hosts and wait until all of them see its folder.

    Raises TrainkitError when one does not, and StopSignalReceived when a notice signal arrives meanwhile.
    """
    become_sole_supervisor(attempt.run, LOCK_TIMEOUT_S)
    hosts = [socket.gethostname(), *(links[node].host for node in sorted(links))]
    address = {"addr": place.master_addr, "port": place.master_port}
    write_json(attempt.rendezvous_file, {**address, "hosts": hosts})
    work_dir = prepare_work_folder(attempt.run) if plan.workload.is_command else None
    found = HostAttempt(
        run_dir=str(attempt.run.path),
        attempt=attempt.number,
        cwd=read_job(attempt.run).cwd or str(Path.cwd()),
        plan_digest=plan_digest(attempt),
        view=supervisor_view(attempt),
        work_dir=None if work_dir is None else str(work_dir),
        nonce=new_nonce(),
    )
    for link in links.values():
        link.send(**vars(found))
    for link in links.values():
        link.await_message(READY_TIMEOUT_S)
    for link in links.values():
        link.send(start=True)
    return found


def await_attempt(link: HostLink, timeout_s: float) -> HostAttempt:
    """Wait until node 0 announces the attempt, and confirm that this host sees its folder.

    Raises TrainkitError, which node 0 receives too, when it does not.
    """
    message = link.await_message(timeout_s)
    found = HostAttempt(**message)
    try:
        _check_folders(found)
    except StopSignalReceived as stop:
        dismiss([link], stopped_error(stop))
        raise
    except TrainkitError as error:
        dismiss([link], error)
        raise
    link.send(ready=True)
    link.await_message(READY_TIMEOUT_S)
    return found


def _check_folders(found: HostAttempt) -> None:
    attempt, host = found.folder, socket.gethostname()
    hint = "all nodes must share the filesystem of the run folder"
    await_plan(attempt, VISIBLE_TIMEOUT_S)
    if plan_digest(attempt) != found.plan_digest:
        raise TrainkitError(f"{attempt.plan_file} on {host} is not the file that node 0 has written", hint)
    if not Path(found.cwd).is_dir():
        raise TrainkitError(f"there is no folder {found.cwd} on {host}, in which node 0 was started", hint)


def _start_agent(found: HostAttempt, place: HostPlace, peer: str | None) -> subprocess.Popen[bytes]:
    attempt, addr = found.folder, LOCAL_ADDR if place.master_addr == "localhost" else place.master_addr
    where = ["--master-addr", addr, "--master-port", str(place.master_port)]
    where += [] if peer is None else ["--peer", peer]
    node = ["--attempt", str(found.attempt), "--node-rank", str(place.node_rank)]
    environ = {**os.environ, SUPERVISOR_VIEW_VARIABLE: found.view, NONCE_VARIABLE: found.nonce}
    environ.pop(WORK_DIR_VARIABLE, None)
    if found.work_dir is not None:
        environ[WORK_DIR_VARIABLE] = found.work_dir
    argv = module_argv("trainkit.job.node.agent", found.run_dir, *node, *where)
    with attempt.node_log(place.node_rank).open("ab") as log:
        return processes.start_child(argv, environ=environ, output=log, keeps_mask=True, cwd=found.cwd)


class FirstHostWatch(LocalAttemptWatch):
    """The agent of node 0 and, over their links, the other hosts of the attempt."""

    def __init__(
        self, found: HostAttempt, plan: LaunchPlan, place: HostPlace, links: Mapping[int, HostLink]
    ) -> None:
        super().__init__(found.folder, plan, place.master_port)
        self.found = found
        self.place = place
        self.links = dict(links)
        self.remote = set(links)
        """The node ranks whose agent has not ended."""
        self._has_killed = False

    def start(self) -> None:
        peer = self.links[1].address if self.links else None
        self.running[0] = _start_agent(self.found, self.place, peer)

    def run(self) -> None:
        try:
            self.start()
            while self.running or self.remote:
                self._wait()
        finally:
            self._kill_running()
            processes.end_descendants()

    def poll(self) -> None:
        for node_rank, link in self.links.items():
            for message in link.received():
                self._on_message(node_rank, message)
            if link.is_closed and node_rank in self.remote:
                self._on_lost(node_rank, "has lost its connection")
        super().poll()

    def _on_message(self, node_rank: int, message: Mapping[str, Any]) -> None:
        if "exit" in message and node_rank in self.remote:
            self.remote.remove(node_rank)
            code = int(message["exit"])
            if code not in (EXIT_OK, EXIT_STOPPED) and not self.died_of_notice(code):
                self.kill_within(PEER_EXIT_S)
            self.on_exit(node_rank, code, bool(message.get("killed")))
        elif message.get("signal") in {number.name for number in NOTICE_SIGNALS}:
            received = signal.Signals[str(message["signal"])]
            processes.log_line(f"node {node_rank} has received {received.name}")
            self.forward_signal(received)
            self.on_signal(received)

    def _on_lost(self, node_rank: int, reason: str) -> None:
        host = self.links[node_rank].host
        processes.log_line(f"node {node_rank} on {host} {reason}")
        self.remote.remove(node_rank)
        self.outcome.lost_nodes = (*self.outcome.lost_nodes, host)
        self.outcome.exits.append((node_rank, signal_exit_code(signal.SIGKILL)))
        self.kill_within(PEER_EXIT_S)

    def forward_signal(self, received: signal.Signals) -> None:
        super().forward_signal(received)
        self._send(signal=received.name)

    def kill_within(self, seconds: float) -> None:
        super().kill_within(seconds)
        self._send(kill_within_s=seconds)

    def _send(self, **message: Any) -> None:
        for node_rank in self.remote:
            self.links[node_rank].send(**message)

    def _kill_running(self) -> None:
        super()._kill_running()
        if self.remote and not self._has_killed:
            self._has_killed = True
            self._send(kill_within_s=0.0)
            self.deadline_s = time.monotonic() + KILL_MARGIN_S
            return
        for node_rank in sorted(self.remote):
            self._on_lost(node_rank, "does not respond")


class HostWatch(ProcessGroup):
    """The agent of another host, which reports to node 0 and follows its signals and deadlines."""

    def __init__(self, found: HostAttempt, place: HostPlace, link: HostLink) -> None:
        super().__init__()
        self.found = found
        self.place = place
        self.link = link
        self.final: dict[str, Any] | None = None
        """How node 0 says that the attempt has ended."""
        self._was_notified = False

    def start(self) -> None:
        self.running[self.place.node_rank] = _start_agent(self.found, self.place, self.place.master_addr)

    def forward_signal(self, received: signal.Signals) -> None:
        """Report a signal to node 0, which forwards it to every host, this one included."""
        self.link.send(signal=received.name)

    def on_signal(self, received: signal.Signals) -> None:
        self._was_notified = True

    def died_of_notice(self, code: int) -> bool:
        return self._was_notified and is_death_by_notice(code)

    def on_exit(self, rank: int, code: int, killed: bool) -> None:
        self.link.send(exit=code, killed=killed)

    def poll(self) -> None:
        for message in self.link.received():
            if "signal" in message:
                self._was_notified = True
                super().forward_signal(signal.Signals[message["signal"]])
            elif "kill_within_s" in message:
                self.kill_within(float(message["kill_within_s"]))
            elif "end" in message:
                self.final = message["end"]
        if self.link.is_closed and self.running:
            self.kill_within(PEER_EXIT_S)  # rank 0 is lost too, so the ranks here cannot save

    def run(self) -> None:
        try:
            super().run()
        finally:
            processes.end_descendants()

    def await_end(self) -> dict[str, Any]:
        """Wait for the message with which node 0 ends the attempt: ``text`` and ``exit_code``.

        Raises TrainkitError when node 0 is lost.
        """
        while True:
            self.poll()
            if self.final is not None:
                return self.final
            if self.link.is_closed:
                raise TrainkitError(
                    f"{self.link.host} has ended or lost its connection, so the attempt has ended here too",
                    hint=f"`trainkit resume {quote(self.found.run_dir)}` with the same --nodes, --node-rank, "
                    "--master-addr and --master-port on every host continues the run",
                )
            received = processes.wait_for_signal(float(KILL_MARGIN_S))
            if received is not None and received != signal.SIGCHLD:
                self.forward_signal(received)


def abandon(attempt: AttemptDir, reason: str) -> None:
    """Record the end of an attempt that was not started, because a host could not take part in it."""
    write_end(attempt, Outcome(), Decision("failed", reason, EXIT_FAILED))


def run_first_host(
    found: HostAttempt,
    plan: LaunchPlan,
    place: HostPlace,
    links: Mapping[int, HostLink],
    show: Callable[[AttemptDir, threading.Event], None],
) -> tuple[Decision, str | None]:
    """Run node 0 of an attempt and record how the attempt ended; returns that and the signal that stopped it.

    `show` prints rank 0's output in a thread until its event is set. Everything else that is printed goes to
    the supervisor's log.
    """
    attempt = found.folder
    redirect_output(attempt.supervisor_log)
    log_event(attempt.run, attempt.number, "started", world_size=plan.world_size, nodes=plan.num_nodes)
    ended = threading.Event()
    printer = threading.Thread(target=show, args=(attempt, ended), name="show-rank-0")
    printer.start()
    watch = FirstHostWatch(found, plan, place, links)
    try:
        watch.run()
        watch.collect_outcome()
        decision = judge(attempt, plan, watch.outcome, NO_RESTART)
    except (OSError, ValueError, TrainkitError) as error:
        decision = Decision("failed", f"{type(error).__name__}: {error}", EXIT_FAILED)
    finally:
        ended.set()
        printer.join()
    processes.log_line(end_line(attempt.number, decision.action, decision.reason))
    notify_end(attempt, write_end(attempt, watch.outcome, decision))
    return decision, watch.outcome.stop_signal


def end_hosts(links: Mapping[int, HostLink], text: str, exit_code: int) -> None:
    """Report the end of the attempt to the other hosts, which exit with the same code."""
    for link in links.values():
        link.send(end={"text": text, "exit_code": exit_code})
        link.close()
