"""Tests that temporary and compiled files are where no other user can create a file first."""

import getpass
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.run import process
from trainkit.run.own_folders import CACHES, own_environ, own_folders

UID = os.getuid()
OTHER = 65534
as_root = pytest.mark.skipif(UID != 0, reason="only root can act as somebody else")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a folder where everybody can create files, like /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def as_other(code: str, folder: Path) -> None:
    """Run Python code as another user, whose current folder is `folder`."""
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(folder)  # the other user may not enter the folders above
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            exec(code, {"os": os})
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_folder_of_all_users_has_a_private_one_for_each(shared, tmp_path):
    found = own_folders({"TMPDIR": str(shared)}, tmp_path / "fallback")
    own = shared / f"trainkit-{UID}"
    assert found.temporary == f"{own}/tmp"
    assert found.caches == {name: f"{own}/{folder}" for name, folder in CACHES.items()}
    assert [stat.S_IMODE(Path(path).stat().st_mode) for path in (own, found.temporary)] == [0o700, 0o700]
    assert (found.note, (tmp_path / "fallback").exists()) == ("", False)
    assert own_folders({}, tmp_path).temporary == f"/tmp/trainkit-{UID}/tmp"


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_an_own_folder_stays(tmp_path, mode):
    (folder := tmp_path / "job").mkdir(mode)
    found = own_folders({"TMPDIR": str(folder)}, tmp_path / "fallback")
    assert (found.temporary, found.note) == (str(folder), "")


def test_folders_that_a_user_has_set_stay(shared, tmp_path):
    given = {"TMPDIR": str(shared), "TORCHINDUCTOR_CACHE_DIR": "/mine", "MPLCONFIGDIR": "/here"}
    found = own_folders(given, tmp_path, keeps=True).added_to(given)
    assert found == {**given, "TRITON_CACHE_DIR": f"{shared}/trainkit-{UID}/triton"}


def test_folders_of_the_rank_that_starts_a_run_are_not_taken_over(shared, tmp_path):
    """The starting rank may run on another host, where somebody else can have created these folders."""
    outer = own_folders({"TMPDIR": str(shared)}, tmp_path).added_to({})
    (other := tmp_path / "other").mkdir(0o700)
    there = {name: path.replace(str(shared), str(other)) for name, path in outer.items()}
    found = own_folders(there, tmp_path / "fallback").added_to(there)
    own = f"{other}/trainkit-{UID}"
    assert found == {"TMPDIR": str(other), **{name: f"{own}/{folder}" for name, folder in CACHES.items()}}


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("case", ["mode", "link", "file", "parent", "missing", "owner", "of torch"])
def test_what_somebody_else_has_made_is_not_used(tmp_path, shared, case, keeps):
    folder = private = shared / f"trainkit-{UID}"
    folder.mkdir(0o700)
    if case == "missing":
        folder.rmdir()
        shared.rmdir()
    elif case == "mode":
        folder.chmod(0o770)
    elif case == "parent":
        shared.chmod(0o777)
    elif case == "owner":
        if UID != 0:
            pytest.skip("only root can give a folder to somebody else")
        os.chown(folder, OTHER, OTHER)
    elif case == "of torch":  # torch has existing files in this folder
        folder = shared / f"torchinductor_{getpass.getuser()}"
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.rmdir()
        (tmp_path / "there").mkdir(0o700)
        folder.symlink_to(tmp_path / "there") if case == "link" else folder.write_text("")
    used = private if case == "of torch" else tmp_path / "fallback"
    found = own_folders({"TMPDIR": str(shared)}, tmp_path / "fallback", keeps=keeps)
    assert (found.temporary, found.caches["TORCHINDUCTOR_CACHE_DIR"]) == (f"{used}/tmp", f"{used}/inductor")
    assert Path(found.temporary).is_dir()
    if case == "of torch" and not keeps:  # torch's folder is not used at all
        assert found.note == ""
    else:
        moved = f"temporary files are in {used}/tmp instead of {shared}, where others can plant code: "
        assert moved in found.note
        assert str(folder) in found.note


PLANTS = """
os.umask(0)
for name in {names}:
    os.makedirs(name, exist_ok=True)
    for key in ("", "fxgraph", "cache", "precompiled_headers"):
        os.makedirs(os.path.join(name, key), exist_ok=True)
"""
NAMES = """
import getpass, json, os, tempfile
from pathlib import Path
user = getpass.getuser()
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch._inductor.codecache import _HEADER_DIR
from torch._inductor.cache import OnDiskCache
from tensorboard.manager import _get_info_dir
print("found", json.dumps([cache_dir(), default_cache_dir(), _HEADER_DIR, str(OnDiskCache().base_dir),
    _get_info_dir(), tempfile.gettempdir(), tempfile.mkdtemp()]))
"""


@as_root
@pytest.mark.slow(seconds=8)
def test_no_library_uses_what_a_neighbour_has_put_into_tmp(shared):
    """Another user has first created the names under which torch and TensorBoard write to /tmp."""
    names = [f"torchinductor_{getpass.getuser()}", getpass.getuser(), "cache", ".tensorboard-info"]
    names += ["quack_generated_epilogues"]
    as_other(PLANTS.format(names=names), shared)
    # A process passes on such variables after torch has compiled something.
    inherited = {
        "TORCHINDUCTOR_CACHE_DIR": f"{shared}/{names[0]}",
        "TRITON_CACHE_DIR": f"{shared}/{names[0]}/triton/0",
    }
    environ = own_environ({**os.environ, **inherited, "TMPDIR": str(shared)})
    done = subprocess.run(
        [sys.executable, "-c", NAMES], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

    for path in json.loads(done.stdout.partition("found ")[2]):
        assert Path(path).is_relative_to(shared / f"trainkit-{UID}"), path
    assert {entry.name for entry in shared.iterdir()} == {*names, f"trainkit-{UID}"}
    assert [file for name in names for file in (shared / name).rglob("*") if file.is_file()] == []


@as_root
def test_other_people_on_this_host(tmp_path, monkeypatch):
    for pid, uid in ((1, 0), (2, process.FIRST_PERSON - 1), (3, UID)):
        (tmp_path / str(pid)).mkdir()
        os.chown(tmp_path / str(pid), uid, uid)
    (tmp_path / "self").mkdir()
    os.chown(tmp_path / "self", OTHER, OTHER)
    monkeypatch.setattr(process, "PROC", tmp_path)
    assert process.other_people() == []
    for pid, uid in ((4, 61234), (5, OTHER), (6, OTHER)):
        (tmp_path / str(pid)).mkdir()
        os.chown(tmp_path / str(pid), uid, uid)
    assert process.other_people() == ["61234", "nobody"]
    (tmp_path / "1").rmdir()
    assert process.other_people() is None
