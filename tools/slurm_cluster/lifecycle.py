"""Making a cluster and taking it away, from the state alone."""

from __future__ import annotations

import os
import shutil
import socket
import stat
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
"""A file that says: everything in this folder belongs to a cluster and goes with it."""


def claim(
    folder: Path | None, accounting: bool, options: Mapping[str, str], owner: Pid | None, num_hosts: int
) -> State:
    """Take the first free number; make the folder, the bridge and the names."""
    path = _make_folder(folder)
    with registry_lock():
        for number in range(1, MAX_NUMBER + 1):
            port = FIRST_PORT + 10 * number
            if not (REGISTRY / f"{number}.json").exists() and network.is_free(number, port):
                break
        else:
            shutil.rmtree(path)
            raise RuntimeError(f"there are {MAX_NUMBER} clusters already")
        state = State(
            number,
            str(path),
            machine=socket.gethostname().partition(".")[0],
            boot_id=boot_id(),
            accounting=accounting,
            num_hosts=num_hosts,
            port=port,
            owner=owner,
            options=dict(options),
        )
        state.save()
        (path / STATE_LINK).symlink_to(state.file)
        network.make_bridge(state)
        network.add_names(state)
    return state


def start(state: State) -> None:
    """Start everything; the hosts still have to register. RuntimeError when a daemon does not start."""
    config_files.write(state)
    (state.path / "etc/hosts").write_text(network.hosts_file_inside(state))
    for number in range(config_files.NUM_GPUS):
        os.mknod(state.path / f"dev/gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    daemons.start_munge(state)
    if state.accounting:
        daemons.start_database(state)
        daemons.start_slurmdbd(state)
        daemons.add_accounts(state)
    daemons.start_slurmctld(state)
    for index in state.hosts():
        hosts.power_on(state, index)


def take_down(state: State) -> None:
    """End all processes of a cluster and remove its network, names, folder and state; none is fine."""
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
            shutil.rmtree(state.path)
        state.file.unlink(missing_ok=True)


def clean_up() -> None:
    """Take away the clusters whose owner is dead, and those from before the machine was restarted."""
    with registry_lock("cleaning"):
        for state in all_states():
            if state.abandoned:
                take_down(state)


def _make_folder(folder: Path | None) -> Path:
    # Paths of sockets can have 107 bytes, and a TMPDIR can be long.
    path = Path(tempfile.mkdtemp(prefix="tk-", dir="/tmp")) if folder is None else folder.absolute()
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise RuntimeError(f"{path} is not empty: a cluster wants a folder of its own")
    path.chmod(0o755)
    (path / MARK).touch()
    for name in ("log", "etc", "hosts", "slurmctld", "dev"):
        (path / name).mkdir()
    return path
