"""Create and remove a cluster, based only on its state file."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.slurm_cluster import config_files, daemons, hosts, network
from tools.slurm_cluster.processes import Pid
from tools.slurm_cluster.state import (
    MAX_NUMBER,
    REGISTRY,
    STATE_LINK,
    State,
    all_states,
    boot_id,
    registry_lock,
)

FIRST_PORT = 21_000
MARK = ".trainkit-cluster"
"""Name of the file that marks a folder as created for a cluster; such a folder is deleted with the
cluster."""


def claim(
    folder: Path | None,
    accounting: bool,
    options: Mapping[str, str],
    owner: Pid | None,
    num_hosts: int,
    slurm: Path | None,
    confined: bool,
    accounting_of: Path | None = None,
) -> State:
    """Reserve the first free cluster number, and create the folder, the bridge and the host names.

    Raises RuntimeError if all numbers are taken or the folder is not empty.
    """
    path = _make_folder(folder)
    with registry_lock():
        for number in range(1, MAX_NUMBER + 1):
            port = FIRST_PORT + 10 * number
            if not (REGISTRY / f"{number}.json").exists() and network.is_free(number, port):
                break
        else:
            _remove_folder(path)
            raise RuntimeError(f"there are already {MAX_NUMBER} clusters")
        state = State(
            number,
            str(path),
            machine=socket.gethostname().partition(".")[0],
            boot_id=boot_id(),
            accounting=accounting,
            num_hosts=num_hosts,
            port=port,
            slurm=str(slurm or ""),
            cgroups=confined,
            accounting_of=str(accounting_of or ""),
            owner=owner,
            options=dict(options),
        )
        state.save()
        (path / STATE_LINK).symlink_to(state.file)
        network.make_bridge(state)
        network.add_names(state)
    return state


def start(state: State) -> None:
    """Start all daemons and hosts; return before the hosts have registered with slurmctld.

    Raises RuntimeError if a daemon does not start.
    """
    config_files.write(state)
    (state.path / "etc/hosts").write_text(network.hosts_file_inside(state))
    for number in range(config_files.NUM_GPUS):
        os.mknod(state.path / f"dev/gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    if state.accounting_of:
        (state.path / "munge").symlink_to(Path(state.accounting_of, "munge"))
    else:
        daemons.start_munge(state)
    if state.accounting:
        if not state.accounting_of:
            daemons.start_database(state)
            daemons.start_slurmdbd(state)
        daemons.add_accounts(state)
    daemons.start_slurmctld(state)
    for index in state.hosts():
        hosts.power_on(state, index)


def take_down(state: State) -> None:
    """Kill all processes of a cluster, and remove its network, host names, folder and state if they exist."""
    if state.boot_id != boot_id():
        state.processes = {}
    for index in state.hosts():
        hosts.power_off(state, index)
    for name in daemons.NAMES:
        daemons.stop(state, name, force=True)
    network.remove_bridge(state)
    with registry_lock():
        network.remove_names(state)
        if (state.path / MARK).exists():
            _remove_folder(state.path)
        state.file.unlink(missing_ok=True)


def clean_up() -> None:
    """Remove each cluster whose owner has died or that was started before a reboot."""
    with registry_lock("cleaning"):
        for state in all_states():
            if state.abandoned:
                take_down(state)


def _make_folder(folder: Path | None) -> Path:
    # Socket paths are limited to 107 bytes, so do not use TMPDIR, which may be long.
    path = Path(tempfile.mkdtemp(prefix="tk-", dir="/tmp")) if folder is None else folder.absolute()
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise RuntimeError(f"{path} is not empty: a cluster needs an empty folder")
    # Keep the folder in memory, because the database and slurmctld sync each change to disk, which takes
    # seconds on a busy machine.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(path)], check=True)
    (path / MARK).touch()
    for name in ("log", "etc", "hosts", "slurmctld", "dev"):
        (path / name).mkdir()
    return path


def _remove_folder(path: Path) -> None:
    if path.is_mount():
        subprocess.run(["umount", "--lazy", str(path)], check=True)
    shutil.rmtree(path)
