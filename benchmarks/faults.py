"""Injects and undoes the faults of `fault_campaign.py`."""

from __future__ import annotations

import heapq
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.flight import Flight
from tests.on_slurm import survival
from tests.support.disks import fill
from tools.slurm_cluster import daemons, hosts
from tools.slurm_cluster.cluster import Cluster
from trainkit.run.manifest import Checkpoint

T = TypeVar("T")

KINDS = {
    "rank": 6,
    "slurmd": 3,
    "cut": 4,
    "slurmctld": 2,
    "disk": 2,
    "damage": 4,
    "stale checkpoints": 2,
    "stale attempts": 1,
}
"""Maps each kind of fault to its relative frequency."""
MOST_HOSTS_AWAY = 2
STUCK_S = 90.0
"""Seconds after which a completing host must have lost a message from slurmctld; longer than any network
cut."""


@dataclass(frozen=True)
class Fault:
    """One drawn fault; its numbers from 0 to 1 select the target from the targets that exist at injection."""

    number: int
    kind: str
    gap_s: float
    """Minimum time since the previous fault."""
    waits: bool
    """True if the fault waits until its run computes steps; other faults are injected in any state of the
    run."""
    who: float
    where: float
    length: float


def draw(count: int, seed: int) -> list[Fault]:
    """Draw the faults of a campaign; a longer campaign starts with the same faults as a shorter one."""
    chance = random.Random(seed)
    kinds, weights = list(KINDS), list(KINDS.values())
    return [
        Fault(
            number=number,
            kind=chance.choices(kinds, weights)[0],
            gap_s=chance.uniform(1.0, 9.0),
            waits=chance.random() < 0.7,
            who=chance.random(),
            where=chance.random(),
            length=chance.random(),
        )
        for number in range(1, count + 1)
    ]


def one_of(things: Sequence[T], chosen: float) -> T:
    """Return the item of a sequence selected by a number from 0 to 1."""
    return things[int(chosen * len(things))]


class Striker:
    """Injects faults, and undoes each fault after its duration."""

    def __init__(self, cluster: Cluster, disk: Path) -> None:
        self.cluster = cluster
        self.disk = disk
        self.away: set[int] = set()
        """Hosts that are disconnected or whose slurmd is dead."""
        self.active: set[str] = set()
        """Kinds of faults that are still active."""
        self._due: list[tuple[float, int, str, Callable[[], None]]] = []

    def can_strike(self, fault: Fault, flight: Flight) -> bool:
        """Return whether a fault has a target now."""
        if fault.kind in ("slurmd", "cut"):
            return len(self.away) < MOST_HOSTS_AWAY
        if fault.kind in ("slurmctld", "disk"):
            return fault.kind not in self.active
        if fault.kind == "damage":
            return len(flight.intact()) > 1  # without another checkpoint, the run would be right to end
        if fault.kind == "rank":
            return bool(survival.ranks_of(flight.run))
        return self._old(fault, flight) is not None and bool(self._readers(fault, flight))

    def strike(self, fault: Fault, flight: Flight) -> str:
        """Inject a fault into one run or into all runs; return a description."""
        strikes: dict[str, Callable[[Fault, Flight], str]] = {
            "rank": self._kill_rank,
            "slurmd": self._kill_slurmd,
            "cut": self._cut,
            "slurmctld": self._stop_slurmctld,
            "disk": self._fill_disk,
            "damage": self._damage,
            "stale checkpoints": self._make_stale,
            "stale attempts": self._make_stale,
        }
        return strikes[fault.kind](fault, flight)

    def mend(self, everything: bool = False) -> None:
        """Undo the faults whose duration is over, or all faults."""
        while self._due and (everything or self._due[0][0] <= time.monotonic()):
            _, _, kind, undo = heapq.heappop(self._due)
            undo()
            if all(other[2] != kind for other in self._due):
                self.active.discard(kind)

    def _later(self, fault: Fault, delay_s: float, undo: Callable[[], None]) -> None:
        self.active.add(fault.kind)
        heapq.heappush(self._due, (time.monotonic() + delay_s, fault.number, fault.kind, undo))

    def _kill_rank(self, fault: Fault, flight: Flight) -> str:
        ranks = survival.ranks_of(flight.run)
        if not ranks:
            return "SIGKILL of a rank: there was none"
        rank = one_of(sorted(ranks), fault.where)
        try:
            os.kill(ranks[rank], signal.SIGKILL)
        except ProcessLookupError:
            return f"SIGKILL of rank {rank}: it had ended"
        return f"SIGKILL of rank {rank}"

    def _host(self, fault: Fault) -> int:
        state = self.cluster.state
        there = [i for i in state.hosts() if i not in self.away and hosts.signal_slurmd(state, i, 0)]
        return one_of(there, fault.where)

    def _kill_slurmd(self, fault: Fault, flight: Flight) -> str:
        index = self._host(fault)
        self.cluster.kill_slurmd(index)
        self.away.add(index)
        delay_s = 2 + 38 * fault.length

        def start() -> None:
            self.cluster.start_slurmd(index)
            self.away.discard(index)

        self._later(fault, delay_s, start)
        return f"slurmd of node{index} killed for {delay_s:.0f} s"

    def _cut(self, fault: Fault, flight: Flight) -> str:
        index = self._host(fault)
        self.cluster.cut_off(index)
        self.away.add(index)
        delay_s = 5 + 55 * fault.length

        def reconnect() -> None:
            self.cluster.reconnect(index)
            self.away.discard(index)

        self._later(fault, delay_s, reconnect)
        return f"network of node{index} cut for {delay_s:.0f} s"

    def _stop_slurmctld(self, fault: Fault, flight: Flight) -> str:
        killed = fault.where < 0.3
        self.cluster.stop_slurmctld(force=killed)
        delay_s = 12 * fault.length
        self._later(fault, delay_s, self.cluster.start_slurmctld)
        return f"slurmctld {'killed' if killed else 'stopped'} for {delay_s:.0f} s"

    def _fill_disk(self, fault: Fault, flight: Flight) -> str:
        filler = fill(self.disk, leave_bytes=int(fault.where * 100_000))
        delay_s = 1 + 10 * fault.length
        self._later(fault, delay_s, filler.unlink)
        return f"disk full for {delay_s:.0f} s"

    def _damage(self, fault: Fault, flight: Flight) -> str:
        found = flight.intact()
        flight.note_damage(found[-1])
        how = damage(found[-1], fault.where)
        if fault.length < 0.5:
            # The damage is detected only when the checkpoint is read.
            return f"newest checkpoint (step {found[-1].step}) {how}, and {self._kill_rank(fault, flight)}"
        return f"newest checkpoint (step {found[-1].step}) {how}"

    def _old(self, fault: Fault, flight: Flight) -> Path | None:
        """Return the stored copy of the folder that a host sees instead of the current folder."""
        return flight.old_checkpoints if fault.kind == "stale checkpoints" else flight.old_attempts

    def _readers(self, fault: Fault, flight: Flight) -> list[str]:
        """Return the hosts that only read a folder, because a host sees its own writes on any file system."""
        placed = survival.hosts_of(flight.run, survival.newest_attempt(flight.run))
        return placed if fault.kind == "stale checkpoints" else placed[1:]

    def _make_stale(self, fault: Fault, flight: Flight) -> str:
        """Show one host an outdated run folder for a while, and kill a rank so that the folder is read."""
        old = self._old(fault, flight)
        assert old is not None
        folder = flight.run.path / fault.kind.removeprefix("stale ")
        name = one_of(self._readers(fault, flight), fault.where)
        index = self.cluster.hosts.index(name) + 1
        shown = old.with_name(f"{old.name}-shown-{fault.number}")
        shutil.copytree(old, shown, symlinks=True)
        killed = self._kill_rank(fault, flight)
        # Make the copy read-only before it is mounted, because a mount with open files cannot become
        # read-only.
        read_only = f"mount --bind {shown} {shown} && mount -o remount,bind,ro {shown}"
        show = f"{read_only} && mount --bind {shown} {folder} && umount {shown}"
        self.cluster.run(["sh", "-c", show], host=index, check=True)
        delay_s = 2 + 6 * fault.length

        def show_again() -> None:
            self.cluster.run(["umount", "--lazy", str(folder)], host=index)
            shutil.rmtree(shown)

        self._later(fault, delay_s, show_again)
        return f"{fault.kind} shown on node{index} for {delay_s:.0f} s, and {killed}"


def damage(checkpoint: Checkpoint, how: float) -> str:
    """Damage a checkpoint in a way selected by a number from 0 to 1; return a description."""
    shard = max((file for file in checkpoint.path.iterdir()), key=lambda file: file.stat().st_size)
    if how < 0.4:
        place = int(how / 0.4 * (shard.stat().st_size - 8))
        with shard.open("rb") as stream:
            stream.seek(place)
            flipped = bytes(byte ^ 0xFF for byte in stream.read(8))
        _overwrite(shard, place, flipped)
        return f"flipped at byte {place} of {shard.name}"
    if how < 0.6:
        os.truncate(shard, shard.stat().st_size - 2)
        return f"lost two bytes of {shard.name}"
    if how < 0.8:
        shard.unlink()
        return f"lost {shard.name}"
    _overwrite(checkpoint.manifest_file, 0, b"garbage")
    return "lost its manifest"


def _overwrite(file: Path, place: int, data: bytes) -> None:
    """Overwrite bytes of a file in place, which works even if the disk is full."""
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(data)


class Administrator:
    """Repairs Slurm as an administrator would."""

    def __init__(self, cluster: Cluster, away: set[int]) -> None:
        self._cluster = cluster
        self._away = away
        """Hosts that a fault has disabled, which the administrator does not repair."""
        self._completing_s: dict[str, float] = {}
        """Maps a completing host to the time at which it was first seen completing."""

    def help(self) -> list[str]:
        """Restart dead slurmds, resume drained hosts, release held jobs, reconcile Slurm's node state."""
        states = self._cluster.node_states()
        done = self._start_slurmd() + _resume_and_release(self._cluster, states)
        now = time.monotonic()
        stuck = [name for name, state in states.items() if state.startswith("completing")]
        self._completing_s = {name: self._completing_s.get(name, now) for name in stuck}
        if any(now > since_s + STUCK_S for since_s in self._completing_s.values()):
            # Slurm 22.05 requeues a finished job whose host was lost, and then waits forever for
            # confirmations from the other hosts.
            self._cluster.run(["scontrol", "reconfigure"], timeout_s=30)
            self._completing_s = {}
            done.append(f"reconfigured, for {', '.join(stuck)} did not stop completing")
        return done

    def _start_slurmd(self) -> list[str]:
        """Start slurmd, as the service manager of a host would."""
        state = self._cluster.state
        dead = [i for i in state.hosts() if i not in self._away and not hosts.signal_slurmd(state, i, 0)]
        for index in dead:
            self._cluster.start_slurmd(index)
        return [f"started slurmd of node{index}, which had died by itself" for index in dead]


def _resume_and_release(cluster: Cluster, states: dict[str, str]) -> list[str]:
    done = []
    for name, state in states.items():
        index = cluster.hosts.index(name) + 1
        if state.startswith("drain") and daemons.is_running(cluster.state, "slurmctld"):
            cluster.run(["scontrol", "update", f"nodename={name}", "state=resume"], timeout_s=30)
            done.append(f"resumed {hosts.folder(cluster.state, index).name}")
    shown = cluster.run(["squeue", "--noheader", "--states=PENDING", "--format=%i %r"], timeout_s=30).stdout
    for line in shown.splitlines():
        job_id, _, reason = line.partition(" ")
        if "held" in reason.lower():
            cluster.run(["scontrol", "release", job_id], timeout_s=30)
            done.append(f"released {job_id} ({reason})")
    return done
