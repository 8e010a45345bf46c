"""Finds the processes of a command that need a stop signal, and protects them until they have saved.

Wrappers such as a shell, `time`, `accelerate launch` or Python code that uses `subprocess` do not handle stop
signals. A stop signal would kill such a wrapper and, with it, the training process that must save. Programs
that only start another program and forward signals to it, such as `uv run` and `timeout`, are skipped. Any
other process above the training process, for example torchrun or a shell with a trap, also gets the signal if
it handles the signal. If the process directly above the training process is a shell or only waits for a
child, the training process is stopped (SIGSTOP) until the forwarded signal is pending for the training
process. If no process above the training process forwards the signal in time, trainkit sends the signal to
the training process itself. The training process handles only one signal, regardless of how many arrive while
it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from trainkit.job import processes
from trainkit.job.failure.launcher_report import LaunchedRanks
from trainkit.job.handlers import PASSED_ON_S, SAVES_ON, SHELLS, is_in_foreground, is_shell, signal_mask
from trainkit.job.signals import NOTICE_SIGNALS, signal_exit_code
from trainkit.job.spare_children import AGENT_VARIABLE, own_handlers
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.workload import STARTERS

ENDED_BY = (*NOTICE_SIGNALS, signal.SIGUSR1)
_DATA_WORKER = {signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGTERM}
"""Signals for which torch installs C handlers in a DataLoader worker, only to report the worker's death."""
STOPS_S = 1.0
"""Seconds that a process may take to stop after SIGSTOP. A process in a disk read stops only after the
read."""
STOP_POLL_S = 0.002
PASSED_ON_SHARE = 0.25
"""The fraction of the grace time after which a stop signal is no longer expected to be forwarded."""


def takers(
    roots: Iterable[int], children: Mapping[int, list[int]], numbers: Collection[signal.Signals] = SAVES_ON
) -> dict[int, signal.Signals]:
    """Map the topmost processes at or below `roots` that handle a signal in `numbers` to that signal.

    A process in `STARTERS` is included only if no process below it handles one of the signals.
    """
    found: dict[int, signal.Signals] = {}
    for pid in roots:
        below = children.get(pid, [])
        number = _first_handled(pid, numbers)
        if number is not None:
            if _is_starter(pid) and (started := takers(below, children, numbers)):
                found |= started
                continue
            found[pid] = number
            # A shell runs its trap only after its foreground program has exited, so that program must also
            # get the signal.
            below = [child for child in below if is_in_foreground(child)] if is_shell(pid) else []
        found |= takers(below, children, numbers)
    return found


def savers_below(pid: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    """Yield the topmost processes below a process that handle a stop signal."""
    for child in children.get(pid, []):
        if not _is_multiprocessing(child) and _handled(child) & {*SAVES_ON}:
            yield child
        else:
            yield from savers_below(child, children)


def _first_handled(pid: int, numbers: Collection[signal.Signals]) -> signal.Signals | None:
    handled = _handled(pid)
    return next((one for one in numbers if one in handled), None)


def _handled(pid: int) -> set[int]:
    """Return the signals for which a process has a handler, or for which it waits synchronously."""
    caught = own_handlers(signal_mask(pid, "SigCgt"))
    if caught >= _DATA_WORKER and signal.SIGILL not in caught:  # faulthandler also handles SIGILL
        return set()
    blocked = {*SAVES_ON} & signal_mask(pid, "SigBlk") - signal_mask(pid, "SigIgn")
    return caught if _is_multiprocessing(pid) else caught | blocked


def _is_multiprocessing(pid: int) -> bool:
    """Return whether a process was forked or spawned by Python's multiprocessing."""
    argv, parent = processes.proc_file(pid, "cmdline"), processes.parent_pid(pid)
    return b"--multiprocessing-fork" in argv or (
        parent is not None and argv == processes.proc_file(parent, "cmdline")
    )


def _is_starter(pid: int) -> bool:
    """Return whether a process runs one of `STARTERS`, possibly as a Python or Perl script."""
    name = processes.proc_file(pid, "comm").decode(errors="replace").strip()
    if name.startswith(("python", "perl")):
        words = processes.proc_file(pid, "cmdline").decode(errors="replace").split("\0")[1:]
        name = PurePath(next((word for word in words if not word.startswith("-")), "")).name
    return name in STARTERS


def _only_waits(pid: int) -> bool:
    """Return whether a process is a shell or only waits for a child, which a training process never does."""
    return is_shell(pid) or processes.proc_file(pid, "wchan").startswith(b"do_wait")


def _await_stop(pids: Iterable[int]) -> None:
    """Wait until SIGSTOP has stopped the processes, so that they handle a new signal only after SIGCONT."""
    deadline_s = time.monotonic() + STOPS_S
    for pid in pids:
        while processes.is_running(pid) and not processes.is_stopped(pid) and time.monotonic() < deadline_s:
            time.sleep(STOP_POLL_S)


def was_signalled(pid: int) -> bool:
    """Return whether a stop signal may have killed a process, or the child whose exit code it returned."""
    code = processes.exit_code_of_zombie(pid) or EXIT_OK
    return (signal_exit_code(-code) if code < 0 else code) in map(signal_exit_code, ENDED_BY)


@dataclass
class _Relay:
    """A process that received the stop signal, and the processes below it that are still stopped.

    The processes below the first process stay stopped (SIGSTOP) until it has forwarded the signal.
    """

    rank: int
    above: int
    below: dict[int, signal.Signals]
    """Maps each process that is still stopped to the signal it handles."""
    waiting: set[int]
    """The processes that only wait for a child and may forward the signal to it."""
    until_s: float
    """The monotonic time after which the signal is no longer expected to be forwarded."""


class CommandStopSignal:
    """Sends the stop signal to members that run a command, and to processes below them that must save."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.configured, self.has_launcher = plan.workload.signal, plan.workload.has_launcher
        named = self.configured != "auto"
        self._numbers = (signal.Signals[f"SIG{self.configured}"],) if named else SAVES_ON
        self._asked: set[bytes] = set()
        """The command lines of processes below members that have already been asked to save."""
        self.groups: dict[int, int] = {}
        """Maps each member's pid, which is also its process group id, to the member's rank."""
        self._heard: signal.Signals | None = None
        """The stop signal if Slurm also sent it to the command's processes, else None."""
        self._savers: dict[int, LaunchedRanks] = {}
        """The processes below each member that handle the stop signal, keyed by the member's rank."""
        self._kept: dict[int, set[int]] = {}
        """The processes that may outlive each member, keyed by the member's rank."""
        self._orphaned: set[int] = set()
        """The ranks whose member has failed after the stop signal."""
        self._relays: list[_Relay] = []
        self._patience_s = min(PASSED_ON_S, plan.grace_s * PASSED_ON_SHARE)

    @property
    def is_sent(self) -> bool:
        return bool(self._savers)

    def send(
        self, members: Mapping[int, subprocess.Popen[bytes]], heard: signal.Signals | None = None
    ) -> None:
        """Ask each member's processes to save, unless Slurm has sent them the signal `heard`."""
        self._heard = heard
        for rank, member in members.items():
            self._savers[rank], self._kept[rank] = LaunchedRanks(), set()
            self._send(rank, member)

    def send_to_repeated(self, members: Mapping[int, subprocess.Popen[bytes]]) -> None:
        """Ask processes to save if a member, such as a shell loop, started them again after the signal.

        Restarted processes are recognized by their command line.
        """
        if not self._asked:
            return
        children = processes.children_by_parent()
        for rank, member in members.items():
            for pid, number in takers([member.pid], children, self._numbers).items():
                argv = processes.proc_file(pid, "cmdline")
                if pid not in {member.pid, *self._kept[rank]} and argv in self._asked:
                    self._kept[rank].add(pid)
                    self._savers[rank].watch({pid: rank})
                    processes.signal_all([pid], number)

    def _send(self, rank: int, member: subprocess.Popen[bytes]) -> None:
        children, configured = processes.children_by_parent(), self.configured
        has_ended, found = processes.ended(member), dict[int, signal.Signals]()
        orphans, below_member = self._orphans_of(rank, children), dict[int, signal.Signals]()
        # A child that exits at this moment is still listed below the member, but its own children may already
        # be below this agent.
        roots = [*children.get(member.pid, []), *orphans] if has_ended else self._ranks_of(member.pid)
        for root in roots:
            handlers = takers([root], children, self._numbers)
            below_member |= handlers
            if not has_ended and not handlers:
                handlers = {root: processes.signal_handled_by(root, configured)}
            found |= handlers
        if not roots and not has_ended:  # the launcher has not started any ranks yet
            os.kill(member.pid, signal.SIGTERM)
        found = {pid: number for pid, number in found.items() if pid not in self._kept[rank]}
        # Find all processes before sending the signal, which may kill a shell that lies between two of the
        # processes.
        below = {pid: {*savers_below(pid, children)} for pid in found}
        waiting = {*filter(_only_waits, found)}
        kept = {*found}.union(*(below[pid] for pid in waiting)) - {member.pid}
        if not has_ended and all(is_shell(pid) or _is_starter(pid) for pid in below_member):
            # If Slurm killed a shell in the meantime, the processes that the shell left behind have also
            # received Slurm's signal.
            kept.update(takers(orphans, children, self._numbers))
        self._kept[rank] |= kept
        self._asked |= {processes.proc_file(pid, "cmdline") for pid in found.keys() - {member.pid}}
        self._savers[rank].watch(dict.fromkeys(kept.union(*below.values()), rank))
        asked = {
            pid: number
            for pid, number in found.items()
            if self._heard is None or not self._is_notice_for(pid, self._heard)
        }
        self._signal(rank, asked, {pid: below[pid] - found.keys() for pid in waiting})

    def _signal(
        self, rank: int, numbers: Mapping[int, signal.Signals], below: Mapping[int, Iterable[int]]
    ) -> None:
        """Stop the processes in `below`, then send each process in `numbers` its signal."""
        relays = []
        for pid in numbers.keys() & below.keys():
            handled = {saver: _first_handled(saver, self._numbers) for saver in below[pid]}
            stopped = {saver: number for saver, number in handled.items() if number is not None}
            waiting = {*filter(_only_waits, stopped)}
            relays.append(_Relay(rank, pid, stopped, waiting, time.monotonic() + self._patience_s))
        stopped_pids = [pid for relay in relays for pid in relay.below]
        processes.signal_all(stopped_pids, signal.SIGSTOP)
        _await_stop(stopped_pids)
        for pid, number in numbers.items():
            processes.signal_all([pid], number)
        self._relays += relays

    def poll(self) -> bool:
        """Resume stopped processes that need not wait for a signal; return whether any remain stopped."""
        for relay in [*self._relays]:
            # Compute `is_over` before reading the pending signals, because a process forwards a signal before
            # it exits.
            is_over = not processes.is_running(relay.above) or time.monotonic() > relay.until_s
            for pid in [*relay.below]:
                pending = signal_mask(pid, "ShdPnd") & {*ENDED_BY}
                if pending or is_over or not processes.is_running(pid):
                    # A signal that is already pending would be delivered only once.
                    number = signal.Signals(min(pending)) if pending else relay.below[pid]
                    below = {*savers_below(pid, processes.tree_of(pid))} if pid in relay.waiting else {}
                    self._kept[relay.rank].update(below)
                    self._savers[relay.rank].watch(dict.fromkeys(below, relay.rank))
                    self._signal(relay.rank, {pid: number}, {pid: below})
                    processes.signal_all([pid], signal.SIGCONT)
                    del relay.below[pid]
            if not relay.below:
                self._relays.remove(relay)
        return bool(self._relays)

    def _ranks_of(self, member: int) -> list[int]:
        """Return the processes to signal: `member`, or the ranks that a launcher has started so far."""
        if not self.has_launcher:
            return [member]
        # A launcher that starts only one process, such as accelerate, does not set RANK.
        return processes.ranks_below(member) or processes.descendants(member)[:1]

    def _is_notice_for(self, pid: int, heard: signal.Signals) -> bool:
        """Return whether a process to which Slurm sent the signal `heard` needs no further signal."""
        if self.configured == "auto":
            # The process may have had a handler that restored the signal's default action.
            return heard != signal.SIGUSR2 or not processes.ignores(pid, heard)
        return heard.name == f"SIG{self.configured}"

    def _orphans_of(self, rank: int, children: Mapping[int, list[int]]) -> list[int]:
        """Return a member's processes that became children of this agent when the member exited."""

        def is_of_rank(pid: int) -> bool:
            group, environ = _group_of(pid), processes.environ_of(pid)
            if group in self.groups:
                return pid != group and self.groups[group] == rank
            return environ.get(AGENT_VARIABLE) == str(os.getpid()) and environ.get("RANK") == str(rank)

        return list(filter(is_of_rank, children.get(os.getpid(), [])))

    def may_be_of_notice(self, rank: int, member: subprocess.Popen[bytes]) -> bool:
        """Return whether Slurm's signal may be the reason that a member failed.

        Slurm's signal may have killed the member itself. If the member is a shell or one of `STARTERS` and
        has left saving processes behind, Slurm's signal may have killed one of its children. For example,
        make exits with 2 if a signal kills its recipe, and a shell with a trap may exit with any code. A
        crash of any other program is reported immediately, even if the program leaves processes behind.
        """
        if was_signalled(member.pid):
            return True
        if processes.exit_code_of_zombie(member.pid) in (None, EXIT_OK, EXIT_STOPPED):
            return False
        # Once a process has exited, only its name can be read from /proc.
        name = processes.proc_file(member.pid, "comm").decode(errors="replace").strip()
        if name not in (*SHELLS, *STARTERS):
            return False
        children = processes.children_by_parent()
        return bool(takers(self._orphans_of(rank, children), children, self._numbers))

    def keeps(self, rank: int, member: subprocess.Popen[bytes]) -> bool:
        """Return whether a process started by an exited member is still saving."""
        if rank not in self._savers or self.has_launcher:
            return False
        # Exit codes other than EXIT_OK and EXIT_STOPPED are failures; for example, make exits with 2 if a
        # signal kills its recipe.
        has_failed = processes.exit_code_of_zombie(member.pid) not in (EXIT_OK, EXIT_STOPPED)
        if has_failed and rank not in self._orphaned:
            self._orphaned.add(rank)
            for _ in range(2):  # the second pass finds processes that were reparented during the first pass
                self._send(rank, member)
        return any(map(processes.is_running, self._kept[rank]))

    def exit_code(self, rank: int, code: int, of_notice: int) -> int:
        """Return the exit code of the saving processes below a member, or else the member's own `code`."""
        codes = {*self._savers[rank].codes} if rank in self._savers else set()
        if not codes or code == EXIT_STOPPED:
            return code
        if codes <= {EXIT_OK, EXIT_STOPPED}:
            return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_OK
        # A wrapper may exit with 1, regardless of its child's exit code.
        failed = any(one is not None and one > EXIT_OK and one != EXIT_STOPPED for one in codes)
        return of_notice if code == EXIT_FAILED and not failed else code

    def reap_orphans(self) -> None:
        """Reap orphaned processes of this agent's members; record the exit codes of processes that saved."""
        for pid in processes.children_of(os.getpid()) if self.groups else ():
            code = processes.exit_code_of_zombie(pid)
            if code is None or pid in self.groups:
                continue
            rank = next((one for one, kept in self._kept.items() if pid in kept), None)
            if rank is not None or _group_of(pid) in self.groups:
                os.waitpid(pid, 0)
            if rank is not None:
                self._savers[rank].record(pid, rank, code)


def _group_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
