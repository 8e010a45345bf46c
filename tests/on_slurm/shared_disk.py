"""Provides a small disk that the login node and all hosts of a cluster share, and that tests fill up."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.disks import small_disk
from tools.slurm_cluster.cluster import Cluster

OPEN_TREE, MOVE_MOUNT = 428, 429
AT_FDCWD, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = -100, 1, 4
ATTACH = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
tree, folder = int(sys.argv[1]), sys.argv[2].encode()
if libc.syscall({MOVE_MOUNT}, tree, b"", {AT_FDCWD}, folder, {MOVE_MOUNT_F_EMPTY_PATH}):
    sys.exit(os.strerror(ctypes.get_errno()))
"""


@contextmanager
def shared_small_disk(cluster: Cluster, folder: Path, size: str) -> Iterator[Path]:
    """Mount a separate file system at `folder`, for example of size ``1m``.

    A new mount does not appear in the mount namespaces of the hosts, so each host gets a clone of it.
    """
    hosts = range(1, len(cluster.hosts) + 1)
    with small_disk(folder, size):
        try:
            for index in hosts:
                _attach(cluster, folder, index)
            yield folder
        finally:
            for index in hosts:
                cluster.run(["umount", "--lazy", str(folder)], host=index)


def _attach(cluster: Cluster, folder: Path, index: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    tree = libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(folder), OPEN_TREE_CLONE)
    if tree < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    try:
        argv = cluster.command_line([sys.executable, "-c", ATTACH, str(tree), str(folder)], index, "/")
        subprocess.run(argv, env=cluster.environ, pass_fds=[tree], check=True, timeout=30)
    finally:
        os.close(tree)
