"""Tests `trainkit submit RUN`, which repeats a run in a new folder. No process is started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.golden.__main__ import HERE, unpack_run
from tests.support.said import said
from tests.support.sweeps import made_up_sweep
from trainkit import api
from trainkit.api import Run
from trainkit.backends.local.backend import LocalBackend
from trainkit.cli import options
from trainkit.cli.main import main
from trainkit.config import read_effective
from trainkit.errors import UsageError
from trainkit.plan.launch import LaunchPlan
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

SCRIPT = "print('as submitted')\n"


@pytest.fixture(autouse=True)
def first(tmp_path, monkeypatch, prints):
    """Return the run `train` of a script that has changed since."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalBackend, "_supervisor", lambda *args: os.getpid())
    Path("train.py").write_text(SCRIPT)
    options = ["--gpus-per-node", "2", "--launcher", "torchrun", "--note", "baseline", "--set", "seed=5"]
    run = submitted(prints, *options, "--backend", "local", "--", "train.py", "--lr", "0.1")
    Path("train.py").write_text("1 / 0\n")
    return run


def submitted(prints, *args: str) -> RunDir:
    return RunDir(prints(["submit", *args]).out.splitlines()[0])


@pytest.mark.parametrize("name", ["train", "runs/train", "last"])
def test_config_code_command_and_size(name, first, monkeypatch, prints):
    config = first.config_file.read_text()
    first.config_file.write_text(config.replace("gpus_per_node: 2", "gpus_per_node: auto"))
    again = submitted(prints, name)
    assert again.path == first.path.with_name("train-2")
    assert (again.code_dir / "train.py").read_text() == SCRIPT
    code = read_job(again).code
    assert code is not None
    assert code.import_path == [code.workdir] == [str(again.code_dir)]
    before, plan = LaunchPlan.read(first.plan_file), LaunchPlan.read(again.plan_file)
    text = plan.reasons.pop("repeats")
    said(text)
    for key in ("workload", "layout", "batch", "device", "workers_per_node", "backend"):
        assert getattr(plan, key) == getattr(before, key), key
    assert (read_effective(again.config_file).seed, read_effective(again.config_file).note) == (5, "baseline")
    assert not Path("runs/train-3").exists()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    third = submitted(prints, "train" if name == "last" else str(first.path))
    assert (third.path.parent, read_job(third).cwd) == (first.path.parent, str(first.path.parent.parent))


def test_options_change_it(first, prints):
    options = ["--set", "seed=6", "--gpus-per-node", "3", "--name", "wide", "--run-dir", "here", "--dry-run"]
    out, err = prints(["submit", "train", *options])
    said("\n".join(line for line in out.splitlines() if line.startswith("  repeats ")))
    assert "  changed             seed: 5 -> 6\n" in err
    assert "launch.backend" not in err
    assert main(["submit", "train", "--sweep", "seed=1,2", "--dry-run", "--json", "--", "./x"]) == 2
    assert main(["submit", "train", "--sweep", "seed=1,2", "--name", "seeds"]) == 0
    group = Path("runs/seeds").absolute()
    assert (group / "code" / "train.py").read_text() == SCRIPT


def test_the_current_code(first, prints):
    run = submitted(prints, "train", "--no-snapshot")
    assert read_job(run).code is None
    said(LaunchPlan.read(run.plan_file).reasons["repeats"])
    # It has no copy itself.
    assert read_job(submitted(prints, run.name)).code is None
    copied = submitted(prints, run.name, "--set", "launch.snapshot=true")
    assert (copied.code_dir / "train.py").read_text() == "1 / 0\n"


def test_a_file_or_shipped_config_comes_first(prints):
    Path("train").write_text("name: of-the-file\ndevice: cpu\n")
    submitted(prints, "--name", "quickstart", "--", sys.executable, "train.py")
    for name, expected in (("train", "of-the-file"), ("quickstart", "quickstart-2")):
        out, err = prints(["submit", name, "--backend", "local", "--dry-run", "--json"])
        assert err.startswith(f"{expected}: ")
        assert "repeats" not in json.loads(out)["reasons"]


def test_a_run_of_an_earlier_version(capsys):
    Path("text.txt").write_text("a text" * 1000)
    for name in ("finished", "command"):
        run = RunDir(unpack_run(HERE / "folders" / name, Path.cwd()))
        if read_job(run).code is not None:
            (run.code_dir / "command.py").touch()
        assert main(["submit", name, "--backend", "local", "--set", "device=cpu", "--dry-run", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["reasons"]["repeats"].startswith(f"{run.path}: its config")
        assert plan["command"] == json.loads(run.plan_file.read_text())["command"]


def test_what_is_refused(first, monkeypatch, prints):
    def refused(name: str) -> str:
        return prints(["submit", name, "--dry-run"], code=2).err

    said(refused("trian"))
    made_up_sweep(Path("runs/sweep").absolute(), {"seed": [1, 2]})
    said(refused("runs/sweep"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        if os.getuid() == 0:
            os.chown(first.path, 77, 77)
        uid = first.path.stat().st_uid
        assert f"runs/train belongs to user {uid}, who could replace the run" in refused("train")
        assert main(["submit", "train", "--dry-run", "--trust"]) == 0
        os.chown(first.path, os.getuid(), os.getgid())
    first.code_dir.rename(first.path / "moved")
    said(refused("train"))
    assert sorted(item.name for item in Path("runs").iterdir()) == ["sweep", "train"]


@pytest.mark.parametrize(
    "command",
    [
        *("resume RUN", "requeue RUN", "submit RUN", "generate RUN x", "ckpt export RUN --out out"),
        *("data show RUN --step 1", "replay RUN --step 1"),
    ],
)
def test_what_executes_files_of_a_run_asks_whose_they_are(first, monkeypatch, capsys, prints, command):
    def refuse(folder: Path, hint: str) -> None:
        raise UsageError(f"whose is {folder}?", hint=hint)

    for module in (options, api):
        monkeypatch.setattr(module, "refuse_foreign", refuse)
    argv = [str(first.path) if word == "RUN" else word for word in command.split()]
    error = prints(argv, code=2).err
    assert error == f"error: whose is {first.path}?\n\nhint: use `--trust` to accept the folder anyway\n"
    if command.split()[0] not in ("resume", "requeue"):  # the supervisor is this process here
        main([*argv, "--trust"])
        assert "whose is" not in capsys.readouterr().err
    monkeypatch.setattr(Run, "wait", lambda *args: None)
    for act in (Run(first).resume, Run(first).results):
        with pytest.raises(UsageError, match="whose is"):
            act()


def test_the_path_of_an_interpreter_says_which_one_a_launcher_takes(tmp_path, prints):
    """The path of an interpreter selects it for a launcher. A plain name is refused, because it does not."""
    python = tmp_path / "other" / "python3"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    run = submitted(prints, "--launcher", "torchrun", "--backend", "local", "--", "other/python3", "train.py")
    assert LaunchPlan.read(run.plan_file).environment.python == (str(python),)
    assert main(["submit", "--launcher", "torchrun", "--", "python3", "train.py"]) == 2
