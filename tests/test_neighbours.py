"""Tests that another user of the machine cannot affect a run, except for torch's connections."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.on_slurm.login import Login
from tools.slurm_cluster.cluster import Cluster
from trainkit.run.files import read_json

NEIGHBOUR = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
CONFIG = """
name: mine
device: cpu
model: {preset: nano}
data: {seq_len: 64, val_fraction: 0, source: text, cache_dir: cache}
train: {steps: 20, device_batch_size: 1, global_batch_size: 2}
launch: {env: {TOKEN_OF_MINE: s3cret}}
"""
as_root = pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs two users")


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a folder that every user can enter, with a shared cache and shared `runs`."""
    folder = Path(tempfile.mkdtemp(prefix="neighbours-"))
    folder.chmod(0o755)
    for name, mode in (("cache", 0o1777), ("text", 0o700)):
        (folder / name).mkdir()
        (folder / name).chmod(mode)
    (folder / "text/a.txt").write_text("some text\n" * 3000)
    (folder / "mine.yaml").write_text(CONFIG)
    (folder / "mine.yaml").chmod(0o600)
    # The other user can read neither the tests nor the packages of their interpreter.
    shutil.copy(Path(__file__).parent / "support/neighbour.py", folder / "neighbour.py")
    yield folder
    shutil.rmtree(folder)


@contextmanager
def neighbour(place: Path) -> Iterator[dict[str, Any]]:
    """Let another user try everything while runs start and end in the block.

    Afterwards, the yielded dict has the results.
    """
    listed = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    taken = {line.split()[3].rpartition(":")[2] for line in listed.splitlines()}
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    folders = (f"{place}/runs", f"{place}/cache")
    argv = [*NEIGHBOUR, python, str(place / "neighbour.py"), ",".join(taken), *folders]
    seen: dict[str, Any] = {}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=place) as spy:
        yield seen
        seen |= json.loads(spy.communicate(timeout=150)[0])


def check(place: Path, seen: dict[str, Any]) -> None:
    end = read_json(place / "runs/mine/attempts/001/end.json")
    assert (end["state"], end["step"]) == ("finished", 20)
    assert seen["processes"] >= 4
    # A shared cache allows this access.
    assert [line for line in seen["found"] if not line.startswith(f"reads {place}/cache/")] == []
    assert not list(place.rglob("executed"))


@as_root
@pytest.mark.slow(seconds=60)
def test_a_neighbour_of_two_processes(place: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(trainkit.__file__).parents[1])}
    argv = [sys.executable, "-m", "trainkit", "run", "mine.yaml", "--gpus-per-node", "2"]
    with neighbour(place) as seen:
        done = subprocess.run(argv, cwd=place, env=environ, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
    check(place, seen)
    assert (seen["ports"] > 0, seen["stores"]) == (True, 0)  # gloo opens these ports


@as_root
@pytest.mark.slow(seconds=90)
def test_a_neighbour_of_two_hosts(cluster: Cluster, place: Path) -> None:
    login = Login(cluster, place)
    with neighbour(place) as seen:
        done = login.trainkit("submit", "mine.yaml", "--nodes", "2", "--follow", timeout_s=400.0)
        assert done.returncode == 0, done.stderr
    check(place, seen)
