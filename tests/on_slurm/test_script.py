"""Tests that Slurm gets the script that is shown, and that later edits change nothing in the job."""

import pytest

from tests.on_slurm.login import BACKENDS, HOLD, Login, log_of, settings


@pytest.mark.parametrize(
    ("backend", "command"), zip(BACKENDS, ([], ["--", "echo", "two words"]), strict=True)
)
def test_the_dry_run_is_what_is_submitted(login, backend, command):
    folder = login.folder / """my "first" run's"""
    folder.mkdir()
    quoted = Login(login.cluster, folder)
    setting = settings("resources.extra.hold=true", "launch.setup=['echo ü']", "resources.comment=it's %j")
    args = ["--backend", backend, "--nodes", "2", *setting]
    files = set(quoted.folder.rglob("*"))
    shown = quoted.trainkit("submit", str(quoted.config), *args, "--dry-run", *command)
    assert shown.returncode == 0, shown.stderr
    assert set(quoted.folder.rglob("*")) == files
    run = quoted.submit(*args, *command)
    held = quoted.cluster.batch_script(quoted.job_id(run))
    assert held.decode() == shown.stdout
    assert run.script_file.read_bytes() == held
    assert run.attempt(1).script_file.read_bytes() == held


def test_editing_after_the_submit_changes_nothing_but_without_a_copy(login):
    login.script("from lib.part import WORD\nprint(WORD, open('data.txt').read())")
    (login.folder / "lib").mkdir()
    part, data = login.folder / "lib/part.py", login.folder / "data.txt"
    part.write_text("WORD = 'before'\n")
    data.write_text("before")
    copied = login.submit(*HOLD, "--", "python", "script.py")
    plain = login.submit("--no-snapshot", *HOLD, "--", "python", "script.py")
    login.script("print('edited')")
    part.write_text("WORD = 'after'\n")
    data.write_text("after")
    login.run(["scontrol", "release", login.job_id(copied), login.job_id(plain)], check=True)
    assert log_of(login.finish(copied)) == "before before\n"
    assert log_of(login.finish(plain)) == "edited\n"
    assert not plain.code_dir.exists()


def test_test_only_asks_slurm_and_submits_nothing(login):
    files = set(login.folder.rglob("*"))
    done = login.trainkit("submit", str(login.config), "--array=0-3", "--test-only")
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stdout
    assert set(login.folder.rglob("*")) == files
    assert login.jobs() == []
