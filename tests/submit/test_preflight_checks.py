"""Commands that cannot start, as far as can be told before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainkit.cluster.model import Cluster
from trainkit.cluster.target import LOCAL, Target
from trainkit.config import RunConfig, load_config
from trainkit.errors import ConfigError, UsageError
from trainkit.submit.plan_run import plan_run
from trainkit.submit.preflight_checks import command_python, refuse_missing

LAUNCH = RunConfig().launch


@pytest.mark.parametrize("command", [["no/such.py"], ["-u", "no/such.py", "--out", "made.py"]])
def test_a_script_that_is_not_there(tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(UsageError, match=r"there is no no/such.py in"):
        refuse_missing([sys.executable, *command], LAUNCH, "python", tmp_path)


@pytest.mark.parametrize("command", [["-m", "package", "--out", "made.py"], ["-c", "import made", "made.py"]])
def test_a_file_that_is_no_script_of_the_command(tmp_path: Path, command: list[str]) -> None:
    refuse_missing([sys.executable, *command], LAUNCH, "python", tmp_path)


def test_a_file_here_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no program 'train.py' on PATH") as caught:
        refuse_missing(["train.py"], LAUNCH, "python", tmp_path)
    assert "give its path" in caught.value.hint
    (tmp_path / "train.py").touch()
    with pytest.raises(UsageError, match=r"there is no program 'train.py' on PATH") as caught:
        refuse_missing(["train.py", "--lr", "1"], LAUNCH, "python", tmp_path)
    assert caught.value.hint == "`-- python train.py …` runs the file of that name here"


def test_a_line_of_setup_may_go_where_the_script_is(tmp_path: Path) -> None:
    launch = LAUNCH.model_copy(update={"setup": ("cd src",)})
    refuse_missing(["python", "train.py"], launch, "python", tmp_path)


def test_a_launcher_takes_the_interpreter_that_would_run_the_command(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    active = {"VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:/usr/bin:/bin"}
    in_venv = (f"{venv}/bin/python",)
    command = ("train.py",)
    assert command_python(LAUNCH, command, tmp_path, active) == in_venv
    assert command_python(LAUNCH, ("venv/bin/python", "train.py"), tmp_path, {}) == in_venv
    assert command_python(LAUNCH.model_copy(update={"venv": "venv"}), command, tmp_path, {}) == in_venv
    # Another python on PATH may not have torch.
    assert command_python(LAUNCH, command, tmp_path, {"PATH": f"{venv}/bin"}) == (sys.executable,)
    assert command_python(LAUNCH, command, tmp_path, {**active, "PATH": "/usr/bin"}) == (sys.executable,)


def test_a_torch_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.6.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    config = tmp_path / "run.yaml"
    targets = [LOCAL, Target("sbatch", "a test", Cluster("unknown"))]
    for target in targets:
        config.write_text("device: cpu\n")
        loaded = load_config(config, environ={}, cwd=tmp_path)
        with pytest.raises(ConfigError) as caught:
            plan_run(loaded, target=target)
        expected = f"{sys.executable} has torch 2.6.0, and the trainer requires torch 2.11 or newer"
        assert [problem.message for problem in caught.value.problems] == [expected]
        plan_run(loaded, [sys.executable], target=target)  # a command may need no torch
    for key in ("modules: [pytorch]", "setup: [. env.sh]", "container: 'docker://pytorch/pytorch'"):
        config.write_text(f"device: cpu\nlaunch: {{{key}}}\n")
        plan_run(load_config(config, environ={}, cwd=tmp_path), target=targets[1])  # the job may have another


def test_what_has_only_run_with_stand_ins_is_said(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("device: cpu\nlaunch: {container: 'docker://pytorch/pytorch'}\n")
    loaded = load_config(config, environ={}, cwd=tmp_path)
    on_slurm = plan_run(loaded, target=Target("sbatch", "a test", Cluster("unknown")))
    assert on_slurm.reasons["experimental"] == (
        "launch.container has not been validated with a real Apptainer or pyxis; try a short run first"
    )
    # Without Slurm the key has no effect.
    assert "experimental" not in plan_run(loaded, target=LOCAL).reasons
