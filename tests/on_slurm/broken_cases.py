"""Builds the broken runs of the test cluster: their list, their scripts, and changed hosts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any

from tests.on_slurm import survival
from tests.on_slurm.login import ON_TWO_HOSTS, Login, settings
from tests.support import broken_runs
from trainkit.run.rundir import RunDir

TIMEOUT_S = 100.0
ONCE = settings("requeue.max=0", "requeue.grace_s=10")
GROUP = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
Make = Callable[[Login], RunDir]


@dataclass(frozen=True)
class Broken:
    """Describes how a run is broken, its cause, and the rank and host that failed first.

    Without a host, either all ranks fail alike or none fails.
    """

    make: Make
    name: str | None
    """The name of the signature.

    It is None if only the user's code explains the failure, or if nothing failed.
    """
    rank: int | None = None
    host: int | None = None
    """The number of the host in the cluster."""
    cgroups: bool = False
    about: str = ""

    def is_right(self, found: dict[str, Any], hosts: Sequence[str]) -> bool:
        wanted: dict[str, Any] = {"name": self.name}
        if self.host is not None:
            wanted |= {"rank": self.rank, "host": hosts[self.host - 1]}
        return {key: found[key] for key in wanted} == wanted


BROKEN: dict[str, Broken] = {}


def broken(
    name: str | None, rank: int | None = None, host: int | None = None, cgroups: bool = False
) -> Callable[[Make], Make]:
    """Register a function that makes a broken run of the same name."""

    def register(make: Make) -> Make:
        run = make.__name__.replace("_", "-")
        BROKEN[run] = Broken(make, name, rank, host, cgroups, cleandoc(make.__doc__ or ""))
        return make

    return register


def broken_scripts(table: str) -> None:
    """Register scripts that fail.

    Above each script is a line with its name, signature, rank, host and options.
    """
    for (run, name, rank, host, *options), about, code in broken_runs.scripts(table):
        make = _failing(code.replace("GROUP\n", GROUP), options)
        at = (None if rank is None else int(rank), None if host is None else int(host))
        BROKEN[run] = Broken(make, name, *at, "resources.mem=300M" in options, about)


def _failing(code: str, options: Sequence[str]) -> Make:
    return lambda login: failed_command(login, code, *options)


# These functions build the runs.


def command_run(login: Login, code: str, *options: str) -> RunDir:
    """Submit a script on two hosts, whose first failure is final."""
    script = login.script(broken_runs.PREAMBLE + code + "\n")
    command = [script] if "--launcher" in options else ["python", script]
    return login.submit(*ON_TWO_HOSTS, *ONCE, *options, "--", *command)


def failed_command(login: Login, code: str, *options: str) -> RunDir:
    return end_of(login, command_run(login, code, *options))


def training(login: Login, *options: str, num_steps: int = 100_000) -> RunDir:
    """Submit a training run on two hosts, whose first failure is final because of `requeue.max=0`."""
    config = survival.survivor_config(login.folder, num_steps)
    return login.submit(*ONCE, *options, config=config)


def running(login: Login, *options: str) -> RunDir:
    """Return a training run that has begun to compute steps."""
    run = training(login, *options)
    survival.wait_for_steps(run, 1, 3)
    return run


def end_of(login: Login, run: RunDir) -> RunDir:
    login.wait_for_end(run, timeout_s=TIMEOUT_S)
    return run


def over(login: Login, run: RunDir) -> RunDir:
    """Wait until the job of a run has left the queue, whether or not it recorded its end."""
    login.wait_until_idle(TIMEOUT_S)
    return run


def on_host(login: Login, host: int, *argv: str) -> None:
    login.cluster.run(argv, host=host, check=True)


@contextmanager
def changed_host(login: Login, host: int, change: Sequence[str], undo: Sequence[str]) -> Iterator[None]:
    """Change something on one host only. Each host has separate mounts and a separate network."""
    on_host(login, host, *change)
    try:
        yield
    finally:
        login.cluster.run(undo, host=host)


@contextmanager
def hidden(login: Login, host: int, folder: Path) -> Iterator[None]:
    """Let a host see an empty folder in place of another folder."""
    with changed_host(
        login, host, ["mount", "-t", "tmpfs", "tmpfs", str(folder)], ["umount", "--lazy", str(folder)]
    ):
        yield
