"""Provides full disks, which are small file systems that only root can mount, and damaged files."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a separate file system at `folder`, for example of ``4m``. Skip the test unless root runs it."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def flip(file: Path) -> None:
    """Invert a byte in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """Fill a disk up to a few bytes, and return the file whose deletion frees the space."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"x" * 4096)
        except OSError:
            pass
        stream.truncate(max(0, stream.tell() - leave_bytes))
    return filler
