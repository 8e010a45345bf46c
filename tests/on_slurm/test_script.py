"""Tests that Slurm gets the script that is shown, that names stay literal, and that edits change nothing."""

import json
import stat
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from tests.on_slurm.login import BACKENDS, HOLD, Login, log_of, settings, wait_for
from trainkit.errors import EXIT_NO_RESTART
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir


@pytest.mark.parametrize(("backend", "command"), [("sbatch", []), ("submitit", ["--", "echo", "two words"])])
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


SECRETS = {"HF_TOKEN": "hf_verysecretvalue123", "WANDB_API_KEY": 'it\'s $ecret "value" é'}
TELLS = """
import hashlib, os, sys
for name in ("HF_TOKEN", "WANDB_API_KEY"):
    print(name, hashlib.sha256(os.environ[name].encode()).hexdigest())
"""


def files_with(folder: Path, value: str) -> list[Path]:
    """Return every file below a folder that contains a value."""
    needle = value.encode()
    return [path for path in folder.rglob("*") if path.is_file() and needle in path.read_bytes()]


def test_secrets_reach_the_ranks_and_no_file(login):
    (login.folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    login.script(TELLS)
    runs, printed = [], ""
    for backend in BACKENDS:
        args = ["--backend", backend, "--nodes", "2", "--set", "resources.extra.hold=true"]
        command = ["--", "python", "script.py"]
        shown = login.trainkit("submit", str(login.config), *args, "--dry-run", *command, env=SECRETS)
        assert shown.returncode == 0, shown.stderr
        run = login.submit(*args, *command, env=SECRETS)
        script = login.cluster.batch_script(login.job_id(run)).decode()
        job = login.run(["scontrol", "--details", "show", "job", login.job_id(run)], check=True).stdout
        login.run(["scontrol", "release", login.job_id(run)], check=True)
        printed += shown.stdout + shown.stderr + script + job
        runs.append(run)
    hashes = "".join(f"{name} {sha256(value.encode()).hexdigest()}\n" for name, value in SECRETS.items())
    for run in runs:
        login.finish(run)
        assert [log_of(run, rank) for rank in range(2)] == [hashes, hashes]
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    for value in SECRETS.values():
        assert [file for run in runs for file in files_with(run.path, value)] == []
        assert value not in printed


def replaced(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_nothing_runs_of_a_folder_that_is_not_what_was_submitted(login):
    ran = login.folder / "ran"
    ran.mkdir()

    def held(name: str, *args: str) -> RunDir:
        command = ("sh", "-c", f"touch {ran}/{name}-$SLURM_ARRAY_TASK_ID")
        return login.submit(*HOLD, "--name", name, *args, "--", *command)

    same, config, swapped, other = (held(name) for name in ("same", "config", "swapped", "other"))
    plans = {name: held(name, "--backend", name) for name in ("sbatch", "submitit")}
    group = RunGroup(held("group", "--array", "0-1").path)
    jobs = {run: login.job_id(run) for run in (same, config, swapped, *plans.values())}
    replaced(config.attempt(1).config_file, "name: config", "name: other")
    for name, run in plans.items():
        replaced(run.attempt(1).plan_file, f"{ran}/{name}", f"{ran}/planted")
    record = json.loads(group.sweep_file.read_text())
    record["points"][1]["plan"] = {"command": ["sh", "-c", f"touch {ran}/planted"]}
    group.sweep_file.write_text(json.dumps(record))
    swapped.path.rename(login.folder / "away")
    # the folder belongs to the same user, and nobody else could have written its files
    other.path.rename(swapped.path)
    login.run(["scontrol", "release", *jobs.values(), str(group.job_id)], check=True)
    login.finish(same)
    for run in (config, *plans.values()):
        end = login.wait_for_end(run)
        assert (end["state"], end["exit_code"]) == ("failed", EXIT_NO_RESTART)
        assert f"{run.path}/" in end["reason"]
        assert login.status(run)["reason"] == end["reason"]
    file = config.attempt(1).config_file
    assert str(file) in login.wait_for_end(config)["reason"]
    log = swapped.attempt(1).supervisor_log
    error = f"error: {swapped.attempt(1).config_file} differs from the file"
    wait_for(lambda: error in log.read_text(), "the log")
    logs = [group.log_file(index) for index in (0, 1)]
    wait_for(
        lambda: all("sweep.json differs from the file" in one.read_text() for one in logs),
        "the logs of the array",
    )
    login.run(["scancel", "--user=root"], check=True)  # `other` waits for its next start
    login.wait_until_idle()
    assert not swapped.attempt(1).end_file.exists(), "it is the attempt of another run, which may still run"
    assert [path.name for path in ran.iterdir()] == ["same-"]
    assert all(login.cluster.job(job)["Restarts"] == "0" for job in jobs.values())
    resumed = login.trainkit("resume", str(config.path))
    assert resumed.returncode == 0, resumed.stderr
    login.run(["scontrol", "release", login.job_id(config)], check=True)
    assert login.wait_for_end(config, attempt=2)["state"] == "finished"
