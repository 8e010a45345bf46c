import errno
import os
import shutil
import subprocess
from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest

from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.backends.jobs import refuse_copy
from trainkit.errors import UsageError
from trainkit.run.files import read_json, write_json
from trainkit.run.process import ProcessId
from trainkit.run.record import (
    AttemptRecord,
    JobRecord,
    add_slurm_attempt,
    claim_entry,
    copied_folder,
    create_job,
    mark_cancelled,
    open_attempt,
    read_job,
)
from trainkit.run.rundir import RunDir, run_lock


def test_process_that_ended_is_gone_even_before_it_is_reaped():
    assert ProcessId.of(os.getpid()).alive()
    with subprocess.Popen(["sleep", "600"]) as child:
        identity = ProcessId.of(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert identity.alive() is False
    assert identity.alive() is False
    with pytest.raises(ProcessLookupError):
        ProcessId.of(child.pid)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"host": "elsewhere", "boot_id": "another"}, None),
        ({"host": "elsewhere"}, True),  # this host had that name, or a container on it
        ({"host": "elsewhere", "start_ticks": 1}, None),
        ({"pid": None}, None),
        ({"boot_id": "another"}, False),
        ({"start_ticks": 1}, False),
    ],
)
def test_what_cannot_be_known_is_not_guessed(change, expected):
    assert AttemptRecord(**{**asdict(ProcessId.of(os.getpid())), **change}).alive() is expected


def test_a_follow_up_that_started_without_the_name_of_its_cluster_waits_no_longer(monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTERS", "here")
    attempts = [AttemptRecord(1, "7", cluster="east"), AttemptRecord(2, "8")]
    record = JobRecord(attempts=attempts, follow_ups=["8", "9"])
    assert record.waiting == ["9"]
    assert replace(record, attempts=attempts[::-1]).waiting == ["9;east"]
    attempts[0] = replace(attempts[0], cluster="west")
    attempts[1] = replace(attempts[1], cluster="east")
    assert replace(record, follow_ups=["7", "8"]).waiting == ["7;east"]


def test_attempts_keep_their_own_config_and_plan(tmp_path):
    run = RunDir(tmp_path)
    open_attempt(run, "a: 1\n", '{"a": 1}')
    second = open_attempt(run, "a: 2\n", '{"a": 2}')
    assert second.number == 2
    assert (run.attempt(1).config_file.read_text(), run.config_file.read_text()) == ("a: 1\n", "a: 2\n")
    assert (run.attempt(1).plan_file.read_text(), run.plan_file.read_text()) == ('{"a": 1}', '{"a": 2}')
    assert (run.attempts_dir / "latest").readlink().name == "002"


def test_a_link_that_a_killed_command_left_behind_is_replaced(tmp_path):
    run = make_attempt(tmp_path / "run").run
    (run.attempts_dir / ".latest-002").symlink_to("001")
    assert open_attempt(run, "a: 2\n", '{"a": 2}').number == 2
    assert (run.attempts_dir / "latest").readlink().name == "002"


def test_a_record_that_cannot_be_read_now_is_not_replaced(tmp_path, monkeypatch):
    run = make_attempt(tmp_path / "run").run
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    before, stale = run.job_file.read_text(), OSError(errno.ESTALE, "Stale file handle")
    with monkeypatch.context() as patch:
        patch.setattr("trainkit.run.record.read_json", Mock(side_effect=stale))
        assert read_job(run).attempts == []
        with pytest.raises(OSError, match="Stale"):
            add_slurm_attempt(run, 2, "7", "restart", "sbatch")
        with pytest.raises(OSError, match="Stale"):
            claim_entry(run, 1, os.getpid())
    assert run.job_file.read_text() == before
    refuses = Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented"))
    monkeypatch.setattr("trainkit.locks.fcntl.flock", refuses)
    with pytest.raises(UsageError, match="cannot be locked: Function not implemented"), run_lock(run):
        pass


def test_what_this_version_does_not_understand_is_written_back(tmp_path):
    entry = {
        "attempt": 1,
        "job_id": "7",
        "step_id": 0,
        "reason": {"by": "hand"},
        "colour": "red",
        "more": [1],
    }
    content = {"cwd": "/", "code": ["x"], "attempts": [entry, {"attempt": True, "job_id": "8"}], "shape": 3}
    run = RunDir(tmp_path)
    write_json(run.job_file, content)
    [found] = read_job(run).attempts
    assert (found.step_id, found.reason) == (None, None)
    mark_cancelled(run)
    [written] = read_json(run.job_file)["attempts"]
    assert {**entry, "cancelled_at": written["cancelled_at"]} == written
    assert read_json(run.job_file)["code"] == ["x"]
    assert read_json(run.job_file)["shape"] == 3
    code = {"code": "/c", "colour": "red", "links": 3}
    write_json(run.job_file, {**content, "code": code})
    mark_cancelled(run)
    assert code.items() <= read_json(run.job_file)["code"].items()


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_ranks_do_not_take_other_code_for_a_damaged_record(tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ValueError, match=r"."):
        copied_folder(RunDir(tmp_path))
    code = {"workdir": "/snap", "code": "/snap"}
    write_json(tmp_path / "job.json", {"cwd": "/", "code": code, "attempts": None})
    assert str(copied_folder(RunDir(tmp_path))) == "/snap"


def test_a_folder_is_no_run_before_it_has_its_config_and_plan(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    create_job(run, backend="local", name="x", cwd="/", code=None)
    monkeypatch.setattr("trainkit.run.rundir.AttemptDir.create", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        open_attempt(run, "name: x\n", "{}")
    assert (run.config_file.read_text(), run.plan_file.read_text()) == ("name: x\n", "{}")
    assert not run.exists()


def test_a_record_tells_a_copy_from_a_moved_folder(tmp_path):
    run = RunDir(tmp_path / "run")
    run.attempts_dir.mkdir(parents=True)
    with run_lock(run):
        entry = add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    assert (entry.folder, entry.inode) == (str(run.path), run.path.stat().st_ino)
    copy, moved, link = (RunDir(tmp_path / name) for name in ("copy", "moved", "link"))
    shutil.copytree(run.path, copy.path)
    with pytest.raises(UsageError, match=r"copy is a copy of .*run, which is running as 7"):
        refuse_copy(copy, read_job(copy), "cancel")
    run.path.rename(moved.path)
    link.path.symlink_to(moved.path)
    for one in (moved, link):
        refuse_copy(one, read_job(one), "cancel")
    with pytest.raises(UsageError, match=r"is not the folder that 7 writes to, which is .*run") as caught:
        refuse_copy(copy, read_job(copy), "cancel")
    said(caught.value.hint)
    # A later run may be in the place of one that was moved.
    shutil.copytree(moved.path, run.path)
    write_json(run.job_file, {"attempts": [{"attempt": 1, "job_id": "8"}]})
    refuse_copy(moved, read_job(moved), "cancel")
