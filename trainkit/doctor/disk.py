"""The run folder and the folders for temporary files: space, speed, and whether all nodes share them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.check import Check, Request
from trainkit.job.preflight import (
    MAX_CLOCK_OFFSET_S,
    MIN_FREE_MIB,
    clock_offset_s,
    direction,
    free_mib,
)
from trainkit.run.files import refresh_listing
from trainkit.run.process import own_host

MIN_FREE_GIB, FEW_GIB = 0.25, 10.0
"""Free space that is too little for any checkpoint, and that is little."""
FEW_TEMPORARY_GIB = 0.5
PROBE_MIB = 32
SLOW_MIB_S, SLOW_FSYNC_S = 50.0, 0.5
NUM_FSYNCS = 3
VISIBLE_TIMEOUT_S, VISIBLE_POLL_S = 5.0, 0.2
"""How long a file of another host may take to be visible: an NFS client may have cached its folder."""
PREFIX = ".doctor-"
SHM_HINT = "in a container, `docker run --shm-size=8g` enlarges it; data loaders with processes need it"
TMP_HINT = "remove old files there, or set TMPDIR to another folder"
CLOCK_HINT = "ask the administrators to synchronize it; `chronyc tracking` shows the offset"


class NoFolder(Exception):
    """A run folder cannot be created here."""


def nearest_folder(folder: Path) -> Path:
    """The folder itself if it exists, else the one in which it would be created. Raises NoFolder, OSError."""
    for item in (folder, *folder.parents):
        if item.is_dir():
            return item
        if os.path.lexists(item):
            what = "a link to a missing folder" if item.is_symlink() and not item.exists() else "a file"
            raise NoFolder(f"{item} is {what}, not a folder")
    raise NoFolder(f"{folder} has no parent")


def check_folder(request: Request) -> Iterator[Check]:
    """Whether checkpoints can be written here, how fast, and whether all hosts see the same files."""
    existing = request.folder
    try:
        existing = nearest_folder(request.folder)
        # Named after the shared file, whose host removes what a killed task has left.
        prefix = PREFIX if request.shared is None else f"{Path(request.shared[0]).name}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=existing) as name:
            yield _free_space(existing)
            if request.shared is not None and request.shared[1] != own_host():
                yield _is_shared(*request.shared)
            yield _write_speed(Path(name), request.quick)
            yield _renames(Path(name))
            if request.shared is None:  # else the clocks of all nodes are compared
                yield _clock(Path(name))
    except NoFolder as error:
        yield Check("disk", "failure", str(error), "choose another --run-dir")
    except OSError as error:
        yield _unwritable(existing, error)


def _unwritable(folder: Path, error: OSError) -> Check:
    hint = "choose another --run-dir, or check its mount options and `ls -ld`"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "delete old runs or checkpoints (`trainkit ckpt prune`), or check `quota`"
    if error.errno == errno.ENOENT:  # as below /proc
        return Check("disk", "failure", f"no files can be created in {folder}", "choose another --run-dir")
    return Check("disk", "failure", f"{folder} cannot be written: {error.strerror or error}", hint)


@contextlib.contextmanager
def shared_file(folder: Path) -> Iterator[tuple[str, str] | Check]:
    """A file below the run folder for `Request.shared`, or why there can be none.

    It is removed at the end, with what the tasks of nodes have left.
    """
    existing = folder
    try:
        existing = nearest_folder(folder)
        handle, name = tempfile.mkstemp(prefix=f"{PREFIX}shared-", dir=existing)
        os.close(handle)
    except NoFolder as error:
        yield Check("disk", "failure", str(error), "choose another --run-dir", own_host())
        return
    except OSError as error:
        check = _unwritable(existing, error)
        yield Check(check.name, check.state, check.value, check.hint, own_host())
        return
    try:
        yield name, own_host()
    finally:
        Path(name).unlink(missing_ok=True)
        for left in existing.glob(f"{Path(name).name}-*"):
            shutil.rmtree(left, ignore_errors=True)


def _is_shared(name: str, host: str) -> Check:
    """Whether a file that another host has created is visible here."""
    path = Path(name)
    deadline_s = time.monotonic() + VISIBLE_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            value = f"{path.parent} is not shared: a file of {host} is not visible on {own_host()}"
            hint = "choose a --run-dir on a filesystem that all nodes mount, and check its mount there"
            return Check("shared", "failure", value, hint)
        refresh_listing(path.parent)
        time.sleep(VISIBLE_POLL_S)
    return Check("shared", "ok", f"a file of {host} is visible")


def check_space(name: str, folder: Path, hint: str) -> Check:
    """The free space of a folder for temporary files; under what a job refuses, a failure."""
    free = free_mib(folder)
    if free is None:
        return Check(name, "ok", "there is none")
    size = f"{free / 1024:,.1f} GiB" if free >= 1024 else f"{free:,.0f} MiB"
    value = f"{size} free in {folder}"
    if free >= FEW_TEMPORARY_GIB * 1024:
        return Check(name, "ok", value)
    return Check(name, "failure" if free < MIN_FREE_MIB else "warning", value, hint)


def _free_space(folder: Path) -> Check:
    free = (free_mib(folder) or 0.0) / 1024
    value = f"{free:,.1f} GiB free in {folder}"
    if free >= FEW_GIB:
        return Check("disk", "ok", value)
    hint = "delete old runs or checkpoints (`trainkit ckpt prune`), or choose another disk"
    return Check("disk", "failure" if free < MIN_FREE_GIB else "warning", value, hint)


def _write_speed(folder: Path, quick: bool) -> Check:
    size_mib = PROBE_MIB // 4 if quick else PROBE_MIB
    block = os.urandom(2**20)  # which no filesystem can compress
    started_s = time.monotonic()
    with (folder / "probe").open("wb") as file:
        for _ in range(size_mib):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written_s = time.monotonic() - started_s
        waits_s = []
        for _ in range(NUM_FSYNCS):
            file.write(block[:4096])
            file.flush()
            began_s = time.monotonic()
            os.fsync(file.fileno())
            waits_s.append(time.monotonic() - began_s)
    speed, wait_s = size_mib / max(written_s, 1e-6), sorted(waits_s)[NUM_FSYNCS // 2]
    value = f"{speed:,.0f} MiB/s for {size_mib} MiB with fsync; fsync of 4 KiB {1e3 * wait_s:.1f} ms"
    if speed < SLOW_MIB_S or wait_s > SLOW_FSYNC_S:
        hint = "checkpoints will take long: save less often, or use a faster filesystem with --run-dir"
        return Check("write speed", "warning", value, hint)
    return Check("write speed", "ok", value)


def _renames(folder: Path) -> Check:
    (folder / "partial").mkdir()
    (folder / "partial" / "file").write_text("x")
    (folder / "partial").rename(folder / "published")
    if not (folder / "published" / "file").is_file():
        hint = "checkpoints are published by renaming a folder: use another filesystem"
        return Check("rename", "failure", f"a renamed folder is not complete in {folder.parent}", hint)
    return Check("rename", "ok", "a folder can be published by renaming it")


def _clock(folder: Path) -> Check:
    """This host's clock against that of the file server, or against itself on a local disk."""
    offset_s = clock_offset_s(folder)
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        value = f"{abs(offset_s):.0f} s {direction(offset_s)} the clock of the run folder's file server"
        return Check("clock", "failure", value, CLOCK_HINT)
    return Check("clock", "ok", f"{abs(offset_s):.1f} s from the run folder's file server")


def file_server_offset_s(request: Request) -> float | None:
    """`clock_offset_s` of the run folder; None if it cannot be written, which `check_folder` reports."""
    with contextlib.suppress(NoFolder, OSError):
        return clock_offset_s(nearest_folder(request.folder))
    return None
