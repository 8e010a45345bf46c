"""Which processes of a command a notice is for, and what is kept until they have saved.

A shell, `time`, `accelerate launch` or a Python with `subprocess` handles no notice: the signal would end it,
and with it the training below that saves. What does handle one above a training, such as `uv run`, a trap or
torchrun, passes it on: nothing below it is signalled a second time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping

from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from trainkit.job import processes
from trainkit.job.failure.launcher_report import LaunchedRanks
from trainkit.job.handlers import SAVES_ON, is_in_foreground, is_shell, signal_mask
from trainkit.job.signals import NOTICE_SIGNALS, signal_exit_code
from trainkit.job.spare_children import AGENT_VARIABLE, own_handlers
from trainkit.plan.launch import LaunchPlan

ENDED_BY = (*NOTICE_SIGNALS, signal.SIGUSR1)
_DATA_WORKER = {signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGTERM}
"""What a worker of torch's DataLoader handles, in C and only to die of it."""


def takers(
    roots: Iterable[int], children: Mapping[int, list[int]], numbers: Collection[signal.Signals] = SAVES_ON
) -> dict[int, signal.Signals]:
    """The topmost processes that handle one of these signals, `roots` included: pid -> its first signal."""
    found: dict[int, signal.Signals] = {}
    for pid in roots:
        below = children.get(pid, [])
        handled = _handled(pid)
        number = next((one for one in numbers if one in handled), None)
        if number is not None:
            found[pid] = number
            # A shell calls its trap when the program has ended for which it waits: that has to hear it too.
            below = [child for child in below if is_in_foreground(child)] if is_shell(pid) else []
        found |= takers(below, children, numbers)
    return found


def savers_below(pid: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    """The topmost programs below one that handles a notice, to which it may pass that on."""
    for child in children.get(pid, []):
        if not _is_multiprocessing(child) and _handled(child) & {*SAVES_ON}:
            yield child
        else:
            yield from savers_below(child, children)


def _handled(pid: int) -> set[int]:
    """The signals that a process handles or, without a handler, waits for."""
    caught = own_handlers(signal_mask(pid, "SigCgt"))
    if caught >= _DATA_WORKER and signal.SIGILL not in caught:  # which faulthandler handles as well
        return set()
    blocked = {*SAVES_ON} & signal_mask(pid, "SigBlk") - signal_mask(pid, "SigIgn")
    return caught if _is_multiprocessing(pid) else caught | blocked


def _is_multiprocessing(pid: int) -> bool:
    """Whether a process is a worker of a Python program: a fork of its parent, or one that it has spawned."""
    argv, parent = processes.proc_file(pid, "cmdline"), processes.parent_pid(pid)
    return b"--multiprocessing-fork" in argv or (
        parent is not None and argv == processes.proc_file(parent, "cmdline")
    )


def was_signalled(pid: int) -> bool:
    """Whether a notice may have ended a process, or what it has started, whose exit code a shell returns."""
    code = processes.exit_code_of_zombie(pid) or EXIT_OK
    return (signal_exit_code(-code) if code < 0 else code) in map(signal_exit_code, ENDED_BY)


class CommandNotice:
    """The notice to the members of an agent, which run a command, and what saves below each."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.configured, self.has_launcher = plan.command_signal, plan.workload.has_launcher
        named = self.configured != "auto"
        self._numbers = (signal.Signals[f"SIG{self.configured}"],) if named else SAVES_ON
        self._asked: set[bytes] = set()
        """The command lines of what was asked to save below a member."""
        self.groups: dict[int, int] = {}
        """The rank of each member, by its pid: also that of the process group of what it starts."""
        self._heard: signal.Signals | None = None
        """The notice, if Slurm has sent it to the processes of the command as well."""
        self._savers: dict[int, LaunchedRanks] = {}
        """By rank, the processes below the member that handle the notice."""
        self._kept: dict[int, set[int]] = {}
        """By rank, those that may outlive the member."""
        self._orphaned: set[int] = set()
        """The ranks whose member was ended by a signal."""

    @property
    def is_sent(self) -> bool:
        return bool(self._savers)

    def send(
        self, members: Mapping[int, subprocess.Popen[bytes]], heard: signal.Signals | None = None
    ) -> None:
        """Ask each member's processes to save that have not `heard` it from Slurm."""
        self._heard = heard
        for rank, member in members.items():
            self._savers[rank], self._kept[rank] = LaunchedRanks(), set()
            self._send(rank, member)

    def send_to_repeated(self, members: Mapping[int, subprocess.Popen[bytes]]) -> None:
        """Ask what a member has started again since, such as a shell in a loop: the same command line."""
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
        # A child that ends at this moment is listed below the member or, like its own, below this agent.
        orphans = (*children.get(member.pid, []), *self._orphans_of(rank, children))
        roots = orphans if has_ended else self._ranks_of(member.pid)
        for root in roots:
            handlers = takers([root], children, self._numbers)
            if not has_ended and not handlers:
                handlers = {root: processes.signal_handled_by(root, configured)}
            found |= handlers
        if not roots and not has_ended:  # a launcher that has started no rank yet
            os.kill(member.pid, signal.SIGTERM)
        found = {pid: number for pid, number in found.items() if pid not in self._kept[rank]}
        # Before the signal, of which a shell may end.
        below = {pid: {*savers_below(pid, children)} for pid in found}
        kept = {*found}.union(*(below[pid] for pid in below if is_shell(pid))) - {member.pid}
        self._kept[rank] |= kept
        self._asked |= {processes.proc_file(pid, "cmdline") for pid in found.keys() - {member.pid}}
        self._savers[rank].watch(dict.fromkeys(kept.union(*below.values()), rank))
        for pid, number in found.items():
            if self._heard is None or not self._is_notice_for(pid, self._heard):
                processes.signal_all([pid], number)

    def _ranks_of(self, member: int) -> list[int]:
        """The ranks to notify: `member` itself, or those of a launcher; empty while it has started none."""
        if not self.has_launcher:
            return [member]
        # A launcher of a single process, such as accelerate, gives it no RANK.
        return processes.ranks_below(member) or processes.descendants(member)[:1]

    def _is_notice_for(self, pid: int, heard: signal.Signals) -> bool:
        """Whether a rank of a command that has received a signal from Slurm needs no other."""
        if self.configured == "auto":
            # It may have had a handler of its own, and restored the default action in it.
            return heard != signal.SIGUSR2 or not processes.ignores(pid, heard)
        return heard.name == f"SIG{self.configured}"

    def _orphans_of(self, rank: int, children: Mapping[int, list[int]]) -> list[int]:
        """What a member has started and, with its end, left to this agent."""

        def is_of_rank(pid: int) -> bool:
            group, environ = _group_of(pid), processes.environ_of(pid)
            if group in self.groups:
                return pid != group and self.groups[group] == rank
            return environ.get(AGENT_VARIABLE) == str(os.getpid()) and environ.get("RANK") == str(rank)

        return list(filter(is_of_rank, children.get(os.getpid(), [])))

    def keeps(self, rank: int, member: subprocess.Popen[bytes]) -> bool:
        """Whether something still saves that a member, which has ended, has started."""
        if rank not in self._savers or self.has_launcher:
            return False
        if was_signalled(member.pid) and rank not in self._orphaned:
            self._orphaned.add(rank)
            for _ in range(2):  # others get another parent during the first pass
                self._send(rank, member)
        return any(map(processes.is_running, self._kept[rank]))

    def exit_code(self, rank: int, code: int, of_notice: int) -> int:
        """The exit code of what has saved below a member, or else `code`, its own."""
        codes = {*self._savers[rank].codes} if rank in self._savers else set()
        if not codes or code == EXIT_STOPPED:
            return code
        if codes <= {EXIT_OK, EXIT_STOPPED}:
            return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_OK
        # A wrapper may exit with 1 whatever what it has started returns.
        failed = any(one is not None and one > EXIT_OK and one != EXIT_STOPPED for one in codes)
        return of_notice if code == EXIT_FAILED and not failed else code

    def reap_orphans(self) -> None:
        """Reap what members have left to this agent, and note the exit codes of what has saved."""
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
