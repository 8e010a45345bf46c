"""Acts as another user: ``python neighbour.py FOLDER…`` prints as JSON what a run lets it do.

It tries every file and folder below some folders, every process that works in them, and every port on which
one of these processes listens. It imports only the standard library, because it must run without access to
the tests.
"""

import json
import os
import pickle
import socket
import sys
import time
from pathlib import Path


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.system, (f"touch {self.folder}/executed",)


def files(folder):
    """Return the files below a folder that can be read or changed."""
    found = []
    for path in [folder, *sorted(folder.rglob("*"))]:
        try:
            if path.is_dir():
                if os.access(path, os.W_OK) and not path.stat().st_mode & 0o1000:
                    found.append(f"changes {path}")
            elif path.stat().st_uid != os.getuid():
                found += [
                    f"{word} {path}"
                    for word, mode in (("reads", os.R_OK), ("changes", os.W_OK))
                    if os.access(path, mode)
                ]
        except OSError:
            continue
    return found


def processes(folders):
    """Return the pids and arguments of the ranks and their parents, whose arguments name a folder."""
    names, found = [os.fsencode(folder) for folder in folders], {}
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words, pid = line.read_bytes(), int(line.parent.name)
            if any(name in words for name in names) and pid != os.getpid():
                found[pid] = words.decode(errors="replace").split("\0")
        except OSError:
            continue
    return found


def tries(pid):
    """Return the accesses to a process that succeed."""
    found = []
    for name in ("environ", "mem", "fd", "cwd"):
        try:
            path = Path(f"/proc/{pid}/{name}")
            list(path.iterdir()) if name in ("fd", "cwd") else path.read_bytes()
            found.append(f"reads {path}")
        except OSError:
            pass
    try:
        os.kill(pid, 0)
        found.append(f"signals {pid}")
    except OSError:
        pass
    return found


def listening(uid):
    """Return the ports on which processes of another user listen."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(line[1].partition(":")[2], 16) for line in lines if line[3] == "0A" and int(line[7]) == uid}


def knocks(port, folder):
    """Send a pickle to a port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as peer:
            peer.sendall(pickle.dumps(Planted(folder)))
    except OSError:
        pass


def main():
    before, *folders = sys.argv[1:]
    taken = {int(port) for port in before.split(",") if port}
    folders = [Path(folder) for folder in folders]
    ports, found, seen = set(), set(), {}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        pids = processes(folders)
        seen.update(pids)
        for folder in folders:
            found.update(files(folder))
        for pid in pids:
            found.update(tries(pid))
        new = listening(0) - taken - ports
        ports |= new
        for port in new:
            knocks(port, folders[0])
        if seen and not pids:
            break
        time.sleep(0.2)
    named = [words[words.index("--master-port") + 1] for words in seen.values() if "--master-port" in words]
    count = {"ports": len(ports), "processes": len(seen), "stores": len(ports & set(map(int, named)))}
    print(json.dumps({"found": sorted(found), **count}))


main()
