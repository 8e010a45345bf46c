"""Starting and stopping what a cluster consists of, one function a daemon; each returns when it answers."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.slurm_cluster.config_files import ACCOUNT, OTHER_ACCOUNT, SHORT_QOS
from tools.slurm_cluster.processes import Pid, start_daemon
from tools.slurm_cluster.state import State

SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
START_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 60.0
NAMES = ("slurmctld", "slurmdbd", "mariadb", "munge")
"""In the order in which they are ended."""


def path_with_sbin() -> str:
    """PATH, with the folders of daemons that only root's login shell has."""
    folders = os.environ.get("PATH", os.defpath).split(":")
    return ":".join([*folders, *(sbin for sbin in SBIN if sbin not in folders)])


def environ(state: State) -> dict[str, str]:
    """What a daemon or a command of Slurm needs to find this cluster and not another."""
    return {"SLURM_CONF": str(state.path / "etc/slurm.conf"), "PATH": path_with_sbin()}


def call(state: State, *argv: str, timeout_s: float = START_TIMEOUT_S) -> str:
    """Run a command on the machine; returns its stdout, raises RuntimeError with its stderr."""
    env = {**os.environ, **environ(state)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def start_munge(state: State) -> None:
    """Who vouches for the sender of every message; one for all hosts, as on a cluster they share the key."""
    folder = state.path / "munge"
    folder.mkdir(mode=0o755)
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = (f"--{name}-file={folder / name}" for name in ("key", "pid", "seed", "log"))
    # Without --force it wants all users to reach the socket, and the folder can be private.
    argv = ["munged", "--foreground", "--force", f"--socket={folder}/socket", *files]
    _start(state, "munge", argv, lambda: succeeds(state, "munge", f"--socket={folder}/socket", "--no-input"))


def start_database(state: State) -> None:
    """MariaDB for slurmdbd, reached through its socket only and by nobody else on the machine."""
    folder = state.path / "mariadb"
    fast = [
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-log-file-size=16M",
        "--innodb-buffer-pool-size=64M",
    ]
    # A server that starts removes the temporary tables of any other in the same folder.
    folders = [f"--datadir={folder}/data", f"--tmpdir={folder}"]
    common = ["--no-defaults", "--user=root", *folders, *fast]
    folder.mkdir(mode=0o700)
    call(state, "mariadb-install-db", *common, "--skip-test-db", "--auth-root-authentication-method=normal")
    server = ["--skip-networking", "--skip-log-bin", "--innodb-lock-wait-timeout=900"]
    files = [f"--socket={folder}/socket", f"--pid-file={folder}/pid"]
    ask = ["mariadb", "--no-defaults", f"--socket={folder}/socket", "--execute=select 1"]
    _start(state, "mariadb", ["mariadbd", *common, *server, *files], lambda: succeeds(state, *ask))


def start_slurmdbd(state: State) -> None:
    """The accounting daemon."""
    env = {"MYSQL_UNIX_PORT": f"{state.path}/mariadb/socket"}
    # It reads its own file from beside slurm.conf.
    ask = ["sacctmgr", "--noheader", "list", "cluster"]
    _start(state, "slurmdbd", ["slurmdbd", "-D"], lambda: succeeds(state, *ask), env)


def add_accounts(state: State) -> None:
    """Two accounts, of which root has one by default, and a second QOS."""
    for change in (
        f"add cluster {state.name}",
        f"add account {ACCOUNT} {OTHER_ACCOUNT} Organization=trainkit",
        f"add qos {SHORT_QOS} set MaxWall=00:10:00",
        f"add user root Account={ACCOUNT},{OTHER_ACCOUNT}",
        f"modify user root set DefaultAccount={ACCOUNT}",
        f"modify account {ACCOUNT} set QOS+={SHORT_QOS}",
    ):
        call(state, "sacctmgr", "--immediate", *change.split())


def start_slurmctld(state: State) -> None:
    """The scheduler."""
    _start(state, "slurmctld", ["slurmctld", "-D"], lambda: succeeds(state, "scontrol", "ping"))


def stop(state: State, name: str, force: bool = False) -> None:
    """End a daemon and wait until it is gone; `force` kills it. Not running is fine."""
    pid = state.processes.get(name)
    if pid is not None:
        if force:
            pid.kill()
        pid.stop(STOP_TIMEOUT_S)
        del state.processes[name]
        state.save()


def record(state: State, name: str, pid: Pid) -> None:
    """Note a process in the state file, so that whoever comes can end it."""
    state.processes[name] = pid
    state.save()


def succeeds(state: State, *argv: str) -> bool:
    """Whether a command ends with 0 within a few seconds."""
    env = {**os.environ, **environ(state)}
    try:
        done = subprocess.run(argv, env=env, capture_output=True, timeout=5, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def is_running(state: State, name: str) -> bool:
    """Whether a daemon runs."""
    pid = state.processes.get(name)
    return pid is not None and pid.alive()


def tail(log: Path, num_lines: int = 15) -> str:
    """The last lines of a log, for an error message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  {line}" for line in lines[-num_lines:])


def _start(
    state: State,
    name: str,
    argv: Sequence[str],
    ready: Callable[[], bool],
    env: dict[str, str] | None = None,
) -> None:
    if is_running(state, name):
        raise RuntimeError(f"{name} of {state.name} is running already")
    log = state.path / "log" / f"{name}.out"
    pid = start_daemon(argv, log, {**environ(state), **(env or {})})
    record(state, name, pid)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if not pid.alive() or time.monotonic() > deadline:
            what = "ended" if not pid.alive() else f"does not answer after {START_TIMEOUT_S:.0f} s"
            own = tail(log.with_suffix(".log"))
            raise RuntimeError(f"{name} {what}; its output:\n{tail(log)}\nits log:\n{own}")
        time.sleep(0.02)
