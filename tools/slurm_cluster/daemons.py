"""Start and stop the daemons of a cluster; the start functions return once the daemon responds."""

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
"""The daemons, in the order they are stopped."""


def path_with_sbin() -> str:
    """Return PATH extended by the sbin folders, which contain the daemons."""
    folders = os.environ.get("PATH", os.defpath).split(":")
    return ":".join([*folders, *(sbin for sbin in SBIN if sbin not in folders)])


def environ(state: State) -> dict[str, str]:
    """Return the environment variables that select this cluster for Slurm's daemons and commands."""
    path = f"{state.slurm}/programs:{path_with_sbin()}" if state.slurm else path_with_sbin()
    return {"SLURM_CONF": str(state.path / "etc/slurm.conf"), "PATH": path}


def slurmd(state: State, index: int) -> list[str]:
    """Return the argv of a host's slurmd."""
    stepd = ["-d", f"{state.slurm}/programs/slurmstepd"] if state.slurm else []
    return ["slurmd", "-N", state.host(index), "-f", environ(state)["SLURM_CONF"], *stepd]


def call(state: State, *argv: str, timeout_s: float = START_TIMEOUT_S) -> str:
    """Run a command on this machine and return its stdout; raise RuntimeError with its stderr if it fails."""
    env = {**os.environ, **environ(state)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def start_munge(state: State) -> None:
    """Start munged, which authenticates Slurm's messages; a single munged serves all hosts."""
    folder = state.path / "munge"
    folder.mkdir(mode=0o755)
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = (f"--{name}-file={folder / name}" for name in ("key", "pid", "seed", "log"))
    # Without --force, munged requires that all users can reach the socket, but the folder may be private.
    argv = ["munged", "--foreground", "--force", f"--socket={folder}/socket", *files]
    _start(state, "munge", argv, lambda: succeeds(state, "munge", f"--socket={folder}/socket", "--no-input"))


def start_database(state: State) -> None:
    """Start MariaDB for slurmdbd, accessible only through a private socket."""
    folder = state.path / "mariadb"
    fast = [
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-log-file-size=16M",
        "--innodb-buffer-pool-size=64M",
    ]
    # A starting MariaDB server removes the temporary tables of other servers in the same tmpdir.
    folders = [f"--datadir={folder}/data", f"--tmpdir={folder}"]
    common = ["--no-defaults", "--user=root", *folders, *fast]
    folder.mkdir(mode=0o700)
    # --force skips lookups of this machine's name, which fail while another cluster writes /etc/hosts.
    new = ["--force", "--skip-test-db", "--auth-root-authentication-method=normal"]
    call(state, "mariadb-install-db", *common, *new)
    server = ["--skip-networking", "--skip-log-bin", "--innodb-lock-wait-timeout=900"]
    files = [f"--socket={folder}/socket", f"--pid-file={folder}/pid"]
    ask = ["mariadb", "--no-defaults", f"--socket={folder}/socket", "--execute=select 1"]
    _start(state, "mariadb", ["mariadbd", *common, *server, *files], lambda: succeeds(state, *ask))


def start_slurmdbd(state: State) -> None:
    """Start slurmdbd, which reads slurmdbd.conf from the folder that contains slurm.conf."""
    env = {"MYSQL_UNIX_PORT": f"{state.path}/mariadb/socket"}
    ask = ["sacctmgr", "--noheader", "list", "cluster"]
    _start(state, "slurmdbd", ["slurmdbd", "-D"], lambda: succeeds(state, *ask), env)


def add_accounts(state: State) -> None:
    """Add a default account and another account for root, and a second QOS."""
    for change in (
        f"add cluster {state.name}",
        f"add account {ACCOUNT} {OTHER_ACCOUNT} Organization=trainkit",
        *([] if state.accounting_of else [f"add qos {SHORT_QOS} set MaxWall=00:10:00"]),
        f"add user root Account={ACCOUNT},{OTHER_ACCOUNT}",
        f"modify user root set DefaultAccount={ACCOUNT}",
        f"modify account {ACCOUNT} set QOS+={SHORT_QOS}",
    ):
        call(state, "sacctmgr", "--immediate", *change.split())


def start_slurmctld(state: State) -> None:
    """Start slurmctld."""
    _start(state, "slurmctld", ["slurmctld", "-D"], lambda: succeeds(state, "scontrol", "ping"))


def stop(state: State, name: str, force: bool = False) -> None:
    """Stop a running daemon, with SIGKILL if `force` is true, and wait until it has exited."""
    pid = state.processes.get(name)
    if pid is not None:
        if force:
            pid.kill()
        pid.stop(STOP_TIMEOUT_S)
        del state.processes[name]
        state.save()


def record(state: State, name: str, pid: Pid) -> None:
    """Record a process in the state file, so that other processes can terminate it later."""
    state.processes[name] = pid
    state.save()


def succeeds(state: State, *argv: str) -> bool:
    """Return whether a command exits with 0 within five seconds."""
    env = {**os.environ, **environ(state)}
    try:
        done = subprocess.run(argv, env=env, capture_output=True, timeout=5, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def is_running(state: State, name: str) -> bool:
    """Return whether a daemon is running."""
    pid = state.processes.get(name)
    return pid is not None and pid.alive()


def tail(log: Path, num_lines: int = 15) -> str:
    """Return the last lines of a log for an error message."""
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
        raise RuntimeError(f"{name} of {state.name} is already running")
    log = state.path / "log" / f"{name}.out"
    pid = start_daemon(argv, log, {**environ(state), **(env or {})})
    record(state, name, pid)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if not pid.alive() or time.monotonic() > deadline:
            problem = "exited" if not pid.alive() else f"does not respond after {START_TIMEOUT_S:.0f} s"
            own_log = tail(log.with_suffix(".log"))
            raise RuntimeError(f"{name} {problem}; its output:\n{tail(log)}\nits log:\n{own_log}")
        time.sleep(0.02)
