"""Tests that Slurm gets the script that is shown, names stay literal, and later edits change nothing."""

import json
from pathlib import Path

import pytest
import yaml

from tests.on_slurm.login import BACKENDS, HOLD, Login, log_of, settings
from trainkit.run.rundir import RunDir


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


EXECUTED = "executed"
SHELL = f'$(touch {EXECUTED}) `touch {EXECUTED}`; touch {EXECUTED} & | >{EXECUTED} "${{HOME}}" $0'
HOSTILE = {
    "quotes": "'single' \"double\"",
    "shell": SHELL.replace("/", ":"),
    "newline": f"two\n#SBATCH --hold\ntouch {EXECUTED}",
    "backslash": "back\\slash \\$(x) \\",
    "percent": " %j  %x 100% ",
    "dashes": "--hold #SBATCH # -x * ? [a-z] {1,2} ~ !!",
    "control": "Größe 模型 🚀 \u2028 tab\tbell\a escape\x1b[31m",
}
SHOWS = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('VALUE'), os.getcwd()]))"
NOT_FOR_SUBMITIT = {"backslash", "newline"}


def hostile(login: Login, name: str) -> Login:
    """Return a login whose folder has a hostile name."""
    folder = login.folder / HOSTILE[name]
    folder.mkdir()
    return Login(login.cluster, folder)


def in_env(value: str) -> list[str]:
    """Return options that put a value into the environment of every rank."""
    text = yaml.safe_dump(value, default_style='"', width=1_000_000).strip()
    return settings(f"launch.env.VALUE={text}")


def assert_nothing_was_executed(*folders: Path) -> None:
    places = [*folders, Path("/"), Path.home(), Path.cwd()]
    assert [place for place in places if (place / EXECUTED).exists()] == []


CASES = {"sbatch": tuple(HOSTILE), "submitit": ("quotes", "shell", "newline", "backslash", "percent")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_folders_with_such_names(login, backend):
    runs = {}
    for name in CASES[backend]:
        there, value = hostile(login, name), HOSTILE[name]
        command = ["python", "-c", SHOWS, value, "", "*"]
        args = ["--backend", backend, "--nodes", "2", "--run-dir", f"runs/{value}", *in_env(value)]
        done = there.trainkit("submit", str(there.config), "--json", *args, "--", *command)
        answer = json.loads(done.stdout)
        if done.returncode:
            assert done.returncode == 2
            assert answer["hint"], answer
            assert name == "newline" or (backend == "submitit" and name in NOT_FOR_SUBMITIT), answer
            assert not (there.folder / "runs").exists() or list((there.folder / "runs").iterdir()) == []
            assert set(there.jobs()) <= {login.job_id(run) for _, run in runs.values()}
        else:
            runs[name] = there, RunDir(answer["run_dir"])
    for name, (there, run) in runs.items():
        value = HOSTILE[name]
        there.finish(run)
        assert run.path == there.folder / "runs" / value
        for rank in range(2):
            assert json.loads(log_of(run, rank)) == [[value, "", "*"], value, str(run.work_dir)]
        if name == "shell":
            assert there.status(run)["state"] == "finished"
            assert there.trainkit("logs", str(run.path)).stdout == log_of(run)
    assert_nothing_was_executed(login.folder, *(path for path in login.folder.rglob("*") if path.is_dir()))


def test_what_slurm_gets_arrives_as_it_is(login):
    """`slurm/test_quoting.py` has the options that trainkit writes into a script itself."""
    comment = f'it\'s 100% "mine" {SHELL} ; 1#2 模型'
    asked = ["--qos", "short", "--constraint", "rack1", "--account", "research", "--time", "5"]
    given = settings(f"resources.comment={comment}", "resources.extra.hold=true")
    run = login.submit("--backend", "submitit", *asked, *given, "--", "true")
    shown = login.run(["squeue", "--noheader", "--format=%k", "--jobs", login.job_id(run)], check=True).stdout
    assert shown.strip().partition(" ")[2] == comment
    assert_nothing_was_executed(login.folder)
