"""Tests where a run folder may be: its name, its locks, and which other users can write there."""

import ctypes
import errno
import json
import os
import shutil
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.support.folders import content, write
from tests.support.said import said
from trainkit.config.schema import RunConfig
from trainkit.control.resume import copy_checkpoint
from trainkit.errors import UsageError
from trainkit.launch.create import create_run, defer_sigint, new_folder
from trainkit.launch.submission import disk_forecast
from trainkit.locks import local_locks
from trainkit.plan.launch import Batch, LaunchPlan, Layout
from trainkit.plan.workload import Workload
from trainkit.run.files import read_json
from trainkit.run.owner import refuse_foreign
from trainkit.run.rundir import RunDir
from trainkit.trust import unknown_owner

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/scratch {scratch} {kind} rw,relatime,{options} 0 0
"""


FORECAST = LaunchPlan("local", 1, 1, "cpu", Layout(), Batch(1, 1, 1, 1), 1e-3, 1, 20.0, {})
KEEP_SOME = {"checkpoint": {"keep": {"last": 2, "every": 50, "log_spaced": True}, "every_steps": 50}}
KEEP_ALL = {"checkpoint": {"keep_last": None, "every_steps": 30}}


@pytest.mark.parametrize(
    ("free_gib", "num_runs", "config"),
    [
        *((400, 1, {}), (99, 1, {}), (99, 20, {}), (3, 1, {}), (0.5, 1, {}), (400, 1, KEEP_ALL)),
        *((9, 1, KEEP_SOME), (60, 1, {**KEEP_SOME, "train": {"steps": None, "epochs": 3}})),
        *((400, 1, {**KEEP_ALL, "train": {"steps": None, "epochs": 3}}), (5, 1, KEEP_ALL)),
    ],
    ids=str,
)
def test_the_space_for_checkpoints(tmp_path, monkeypatch, free_gib, num_runs, config):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free_gib * 2**30))
    folder, given = tmp_path / "not" / "yet", RunConfig.model_validate(config)
    assert disk_forecast(folder, FORECAST, given) is None  # nothing is known about a COMMAND
    try:
        said(str(disk_forecast(folder, replace(FORECAST, checkpoint_bytes=2**30), given, num_runs)))
    except UsageError as error:
        said(error.message)


def problem(tmp_path: Path, kind: str, options: str, folder: str = "me/runs/x") -> str | None:
    place, mounts = tmp_path / "scratch disk", tmp_path / "mounts"
    mounts.write_text(MOUNTS.format(scratch=str(place).replace(" ", "\\040"), kind=kind, options=options))
    return local_locks(place / folder, mounts)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("lustre", "checksum,localflock,user_xattr", "localflock"),
        ("nfs4", "vers=4.2,local_lock=flock,addr=10.0.0.1", "local_lock=flock"),
        ("nfs4", "vers=4.2,local_lock=all,addr=10.0.0.1", "local_lock=all"),
        ("nfs", "vers=3,nolock,local_lock=none", "nolock"),
    ],
)
def test_locks_of_one_host(tmp_path, kind, options, named):
    said(problem(tmp_path, kind, options))
    assert problem(tmp_path, kind, options, "../elsewhere") is None


def test_locks_of_all_hosts(tmp_path):
    assert problem(tmp_path, "lustre", "checksum,flock,user_xattr") is None
    assert problem(tmp_path, "nfs4", "vers=4.2,local_lock=none") is None
    assert problem(tmp_path, "nfs", "vers=3,local_lock=posix") is None
    assert problem(tmp_path, "ext4", "localflock") is None
    assert local_locks(tmp_path) is local_locks(tmp_path, tmp_path / "none") is None


def answer(place: Path) -> str:
    try:
        refuse_foreign(place, "go away")
    except UsageError as error:
        return error.render()
    return "accepted"


@as_root
@pytest.mark.parametrize(
    ("foreign", "modes"),
    [
        ("shared/work/run", {}),
        ("shared/work", {}),
        ("shared/work", {"shared/work": 0o775}),  # the folder belongs to a project
        # each member of the project owns the files that they created
        ("shared/work", {"shared/work": 0o3770}),
        ("shared", {}),
        ("shared", {"shared": 0o2775}),
        ("shared", {".": 0o1777}),
        ("", {"shared": 0o777}),
        ("", {"shared": 0o1777, "shared/work/run": 0o775}),
        ("", {"shared": 0o2775, "shared/work": 0o2770}),
    ],
    ids=str,
)
def test_who_could_replace_a_run(tmp_path, foreign, modes):
    (tmp_path / "shared/work/run").mkdir(parents=True)
    if foreign:
        os.chown(tmp_path / foreign, 61234, -1)
    for name, mode in modes.items():
        (tmp_path / name).chmod(mode)
    said(answer(tmp_path / "shared/work/run"))


GROUP, OTHER_GROUP = 61235, 61236


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run of a user who is not root and is in one group. The folder `shared` belongs to root."""
    run = tmp_path / "shared/work/run"
    run.mkdir(parents=True)
    for folder in (run, run.parent):
        os.chown(folder, 61233, OTHER_GROUP)
    monkeypatch.setattr(os, "geteuid", lambda: 61233)
    monkeypatch.setattr(os, "getegid", lambda: 61233)
    monkeypatch.setattr(os, "getgroups", lambda: [GROUP])
    return run


@as_root
@pytest.mark.parametrize(
    ("name", "owner", "group", "mode"),
    [
        ("shared", 0, OTHER_GROUP, 0o2775),  # an administrator has chosen the group
        ("shared", 61234, GROUP, 0o2770),  # the owner is the head of a project
        *(("shared", 61234, OTHER_GROUP, 0o2775), ("shared", 61234, GROUP, 0o755)),
        *(("shared/work", 61233, GROUP, 0o2775), ("shared/work", 61233, OTHER_GROUP, 0o2755)),
        # other users can add files to the folder, but cannot replace any
        *(("shared/work", 61233, OTHER_GROUP, 0o3775), ("shared/work", 61233, OTHER_GROUP, 0o775)),
        *(("shared/work/run", 61233, OTHER_GROUP, 0o1775), ("shared/work/run", 61234, GROUP, 0o2775)),
        ("shared/work/run", 0, 0, 0o755),
    ],
)
def test_which_groups_are_trusted(mine, tmp_path, name, owner, group, mode):
    os.chown(tmp_path / name, owner, group)
    (tmp_path / name).chmod(mode)
    said(answer(mine))


@as_root
def test_a_link_on_the_way_is_judged_with_the_folders_it_leads_through(tmp_path):
    (tmp_path / "mine/run").mkdir(parents=True)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/link").symlink_to("../mine")
    (tmp_path / "link").symlink_to("theirs/link")
    refuse_foreign(tmp_path / "link/run", "go away")
    os.lchown(tmp_path / "theirs/link", 61234, 61234)
    refuse_foreign(tmp_path / "link/run", "go away")  # only root can replace the link
    (tmp_path / "theirs").chmod(0o1777)
    with pytest.raises(UsageError, match="theirs/link belongs to user 61234, who could replace link/run"):
        refuse_foreign(tmp_path / "link/run", "go away")
    (tmp_path / "theirs").chmod(0o755)
    os.chown(tmp_path / "theirs", 61234, -1)
    refuse_foreign(tmp_path / "mine/run", "go away")
    with pytest.raises(UsageError, match="theirs belongs to user 61234, who could replace link/run"):
        refuse_foreign(tmp_path / "link/run", "go away")
    (tmp_path / "circle").symlink_to("../" + tmp_path.name + "/circle")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        refuse_foreign(tmp_path / "circle", "go away")


def in_user_namespace(place: Path) -> str:
    """Return the answer of `refuse_foreign` in a user namespace of user 61233, whose number inside is 5."""
    libc, ours = ctypes.CDLL(None, use_errno=True), os.geteuid()
    unknown_owner.cache_clear()
    os.setgroups([])
    os.setresgid(61233, 61233, 61233)
    os.setresuid(61233, 61233, 61233)
    libc.prctl(4, 1)  # PR_SET_DUMPABLE lets the process write its uid_map
    if libc.unshare(0x10000000):  # CLONE_NEWUSER
        return f"no namespace: {os.strerror(ctypes.get_errno())}"
    Path("/proc/self/uid_map").write_text("5 61233 1")
    assert (ours, os.geteuid(), Path("/").stat().st_uid) == (0, 5, 65534)
    return answer(place)


@as_root
def test_in_a_container_that_does_not_know_whose_the_root_is(monkeypatch):
    with TemporaryDirectory() as name, ProcessPoolExecutor(1, get_context("fork")) as child:
        monkeypatch.chdir("/")
        run, theirs = Path(name, "run"), Path(name, "theirs")
        for folder, owner in ((Path(name), 0), (run, 61233), (theirs, 61234)):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
            os.chown(folder, owner, owner)
        said = child.submit(in_user_namespace, run).result()
        if said.startswith("no namespace"):
            pytest.skip(said)
        assert said == "accepted"
        again = child.submit(refuse_foreign, theirs, "go away")
        with pytest.raises(UsageError, match="theirs belongs to user 65534, who could replace the run"):
            again.result()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_folder_of_runs_is_for_its_owner_to_change(umask):
    before = os.umask(umask)
    try:
        with new_folder("mine", None) as (folder, _):
            pass
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o7777 for path in (folder.parent, folder)] == [0o755, 0o700]
    folder.parent.chmod(0o777)
    refused = r"every user can write to .*runs, and could replace runs/mine"
    with pytest.raises(UsageError, match=refused), new_folder("mine", None):
        pass


PLAN = LaunchPlan("local", 1, 1, "cpu", Layout(), Batch(1, 1, 1, 1), 0.1, 1, 60.0, {"lr": "so"})
PLAN = replace(PLAN, workload=Workload(("a", "b")))


@pytest.fixture(autouse=True)
def outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def create(folder: Path) -> Path:
    config = RunConfig.model_validate({"name": "mine"})
    return create_run(config, PLAN, ["trainkit"], folder).run.path


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2775, 0o777, 0o1777, 0o703])
def test_a_folder_that_everybody_can_write_to(tmp_path, mode):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    if not mode & 0o002:
        assert create(tmp_path / "run").is_dir()
        return
    with pytest.raises(UsageError, match=r"every user can write to .*, and could change what") as caught:
        create(tmp_path / "run")
    assert "chmod o-w" in caught.value.hint
    assert list((tmp_path / "run").iterdir()) == []


def test_a_new_folder_that_everybody_could_replace(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open")
    for folder in (tmp_path / "open" / "run", tmp_path / "open" / "deep" / "run", tmp_path / "link" / "run"):
        with pytest.raises(UsageError, match="every user can write to open, and could replace"):
            create(folder)
    assert list((tmp_path / "open").iterdir()) == []
    tmp_path.chmod(0o1777)  # only the owner can rename a folder here
    assert (create(tmp_path / "deep" / "run").stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize("is_cwd", [True, False])
def test_a_folder_whose_name_is_not_utf_8(tmp_path, monkeypatch, is_cwd):
    """The name is refused before anything is written, because the files of a run contain it."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    if is_cwd:
        folder.mkdir()
        monkeypatch.chdir(folder)
    refused = pytest.raises(UsageError, match=r"(?m)the name of .*caf\\xe9 is not UTF-8$")
    with refused as caught, new_folder("a", None if is_cwd else folder):
        pass
    assert caught.value.hint.startswith("rename it")
    assert not is_cwd or not any(folder.iterdir())


def test_new_folders_count_up(tmp_path):
    config = RunConfig.model_validate({"name": "mine"})
    names = [create_run(config, PLAN, ["trainkit"]).name for _ in range(3)]
    assert names == ["mine", "mine-2", "mine-3"]
    job = read_json(tmp_path / "runs/mine-2/job.json")
    code = job.pop("code")
    assert (code["source"], code["code"]) == (str(tmp_path), str(tmp_path / "runs/mine-2/code"))
    assert job == {"backend": "local", "name": "mine-2", "cwd": str(tmp_path), "attempts": []}
    # A run in a given folder keeps the name of the config.
    created = create_run(config, PLAN, ["trainkit"], tmp_path / "deep" / "a b;$(x)\n")
    assert (created.name, created.run.path.is_dir()) == ("mine", True)
    assert PLAN.to_text().endswith("}\n")
    assert LaunchPlan.from_dict(json.loads(PLAN.to_text())) == PLAN


def test_copy_of_a_checkpoint_is_published_by_a_rename(tmp_path):
    source, target = RunDir(tmp_path / "a"), RunDir(tmp_path / "b")
    target.checkpoints_dir.mkdir(parents=True)
    write(source.checkpoint_dir(5), "rank-0/data")
    assert copy_checkpoint(source.checkpoint_dir(5), target) == target.checkpoint_dir(5)
    assert content(target.checkpoints_dir) == {"step-00000005/rank-0/data": "rank-0/data"}


@pytest.fixture
def held(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.provenance_file.write_text("{}")
    run.hold()
    return run


def test_a_held_folder_is_followed_also_with_its_parents(held, tmp_path, monkeypatch):
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert held.follow()
    assert not held.follow()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        assert not held.follow(), "a file system that does not answer has moved nothing"
    assert held.path == tmp_path / "elsewhere" / "mine"


@pytest.mark.parametrize("code", [None, errno.ESTALE, errno.ENOENT])
def test_a_folder_that_took_the_place_of_the_held_one_is_not_written_to(held, monkeypatch, code):
    path = held.path
    if code is not None:  # the error is like one for a folder that another host has deleted
        monkeypatch.setattr(os, "fstat", Mock(side_effect=OSError(code, "")))
        assert not held.follow()
        assert not held.was_replaced, "after a restart of its server, every folder may be stale"
    held.provenance_file.unlink()
    path.rmdir()
    assert not held.follow()
    assert (held.path, held.was_replaced) == (path, False)
    path.mkdir()
    assert not held.follow()
    assert held.was_replaced
    assert not held.events_file.parent.exists()


def test_a_held_folder_whose_file_system_numbers_it_anew_is_the_same(held, tmp_path):
    path, other = held.path, tmp_path / "other"
    other.mkdir()
    held.provenance_file.rename(other / "provenance.json")
    path.rmdir()
    other.rename(path)
    assert not held.follow()
    assert (held.path, held.was_replaced) == (path, False)


def test_one_of_two_commands_gets_an_empty_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with new_folder("x", folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainkit.launch.create.refuse_place", Mock())  # the first check was earlier
        with pytest.raises(UsageError, match="another command is creating a run in this folder"):
            new_folder("x", folder).__enter__()
    assert [path.name for path in folder.iterdir()] == [".lock"]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_deferred_to_the_end_of_the_block_but_a_second_one_is_not():
    done, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with defer_sigint():
            interrupt()
            done.append("all of it")
        done.append("what comes after")
    with pytest.raises(KeyboardInterrupt), defer_sigint():  # noqa: PT012
        interrupt()
        done.append("so far")
        interrupt()
        done.append("not here")
    assert done == ["all of it", "so far"]
    with defer_sigint():
        pass
    with pytest.raises(ValueError, match="no"), defer_sigint():
        raise ValueError("no")
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_ctrl_c_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_sigint():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        interrupt()
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
