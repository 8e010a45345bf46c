"""Tests that commands that cannot start are refused early, as far as this can be known."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.__main__ import HERE as GOLDEN
from tests.golden.__main__ import unpack_run
from tests.support.folders import write
from tests.support.said import said
from tests.support.torch_builds import make_torch
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster, NodeKind, Partition
from trainkit.cluster.target import LOCAL, Target
from trainkit.config import RunConfig, load_config
from trainkit.errors import ConfigError, UsageError
from trainkit.launch import packages as module
from trainkit.launch.environment import command_python
from trainkit.launch.packages import Packages, find_environment, find_packages, own_packages
from trainkit.launch.plan_run import gather, plan_run, refuse_missing
from trainkit.launch.repeat import load_again
from trainkit.plan.facts import KeyProblem
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.rundir import RunDir

LAUNCH = RunConfig().launch


def test_a_script_that_is_not_there(tmp_path):
    for command in (["no/such.py"], ["-u", "no/such.py", "--out", "made.py"]):
        with pytest.raises(UsageError, match=r"there is no .*no/such.py"):
            refuse_missing([sys.executable, *command], LAUNCH, "python", tmp_path)
    # The option before each file shows that the file is not the script of the command.
    for command in (["-m", "package", "--out", "made.py"], ["-c", "import made", "made.py"]):
        refuse_missing([sys.executable, *command], LAUNCH, "python", tmp_path)
    # A line of launch.setup may change to the folder of the script.
    launch = LAUNCH.model_copy(update={"setup": ("cd src",)})
    refuse_missing(["python", "train.py"], launch, "python", tmp_path)
    with pytest.raises(UsageError, match=r"command not found on PATH: 'train.py'") as caught:
        refuse_missing(["train.py"], LAUNCH, "python", tmp_path)
    assert "specify its path" in caught.value.hint


def test_a_launcher_takes_the_interpreter_that_would_run_the_command(tmp_path):
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


def only_problem(call: Callable[[], object]) -> KeyProblem:
    with pytest.raises(ConfigError) as caught:
        call()
    [problem] = caught.value.problems
    return problem


def test_a_torch_that_is_too_old_is_refused(tmp_path, monkeypatch):
    write(tmp_path, "torch/__init__.py")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.6.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for target in (LOCAL, Target("sbatch", "a test", Cluster("unknown"))):
        loaded = load_config(None, overrides=["device=cpu"], environ={}, cwd=tmp_path)
        facts = gather(loaded, target=target)
        said(only_problem(lambda loaded=loaded, facts=facts: plan_run(loaded, facts)).message)
        command = Workload((sys.executable,))
        plan_run(loaded, gather(loaded, command, target=target), command)  # a command may need no torch


def test_a_launcher_whose_package_is_missing_is_refused(tmp_path, monkeypatch):
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    loaded = load_config(None, overrides=["device=cpu"], environ={}, cwd=tmp_path)
    command = Workload(("train.py",), "deepspeed")
    [problem] = gather(loaded, command, target=LOCAL).environment.problems
    said("\n".join(problem))
    assert gather(loaded, Workload(("train.py",), "torchrun"), target=LOCAL).environment.problems == ()
    # Another Python starts the command, and nothing is known about that Python.
    program(tmp_path / "env" / "bin" / "python")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "env"))
    monkeypatch.setenv("PATH", f"{tmp_path}/env/bin", prepend=":")
    assert gather(loaded, command, target=LOCAL).environment.problems == ()


V100 = "Tesla V100-SXM2-32GB"
GPUS = Cluster("west", (Partition("gpu", is_default=True, nodes=(NodeKind(2, 64, 512_000, {"h100": 4}),)),))


class Submitting:
    """A project on the login node of a cluster with GPUs, with the torch of its interpreters."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.package = make_torch(folder / "site")
        monkeypatch.chdir(folder)
        monkeypatch.setattr(module, "find_packages", lambda argv, *_: self._packages(argv[0]))
        monkeypatch.setattr(module, "own_packages", lambda *_: self._packages(sys.executable))
        program(folder / "bin" / "sbatch")
        program(folder / "venv" / "bin" / "python")
        (folder / "venv" / "bin" / "activate").touch()
        monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
        monkeypatch.delenv("SLURM_CONF", raising=False)
        monkeypatch.setattr("trainkit.cluster.target.conf_file", lambda: None)

    def _packages(self, program: str) -> Packages:
        self.asked.append(program)
        return Packages("3.11", program, {"torch": str(self.package / "__init__.py")}, {})

    def plan(self, *overrides: str, workload: Workload = TRAINER) -> LaunchPlan:
        overrides = ("train.global_batch_size=null", *overrides)
        loaded = load_config(None, overrides=overrides, environ={}, cwd=self.folder)
        target = Target("sbatch", "a test", GPUS)
        return plan_run(loaded, gather(loaded, workload, target=target), workload)

    def problem(self, *overrides: str) -> str:
        return only_problem(lambda: self.plan(*overrides)).render()


def program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.fixture
def submitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submitting:
    return Submitting(tmp_path, monkeypatch)


def test_a_torch_without_cuda_is_refused_before_a_job_on_gpus_queues(submitting):
    said(submitting.problem())
    python = f"{submitting.folder}/venv/bin/python"
    said(submitting.problem("launch.venv=venv"))
    said(submitting.problem("launch.python=venv/bin/python"))
    assert submitting.asked == [sys.executable, python, python]
    problem = only_problem(lambda: submitting.plan("launch.conda=mine", "launch.modules=[-x]"))
    assert problem.key == "launch.modules", "the torch is unknown"


def test_a_torch_with_cuda_and_runs_that_need_none(submitting):
    submitting.plan("device=cpu", "launch.venv=venv")
    submitting.plan(workload=Workload(("/bin/true",)))
    assert submitting.asked == []
    (submitting.package / "version.py").write_text("cuda = '13.0'\nhip = None\n")
    assert submitting.plan().device == "cuda"


@pytest.mark.parametrize(
    "overrides",
    [
        *(("launch.modules=[pytorch]",), ("launch.setup=[source env.sh]",), ("launch.cluster=west",)),
        ("launch.container=docker://x", "launch.container_runtime=apptainer"),
        ("launch.python=python3", "launch.modules=[pytorch]"),
    ],
)
def test_a_torch_that_only_the_job_knows_is_left_to_it(submitting, overrides):
    program(submitting.folder / "bin" / "apptainer")
    assert submitting.plan(*overrides).device == "cuda"


def test_a_cluster_by_its_name_on_its_own_login_node(submitting, monkeypatch):
    monkeypatch.setattr("trainkit.cluster.target.conf_file", lambda: Path("/etc/slurm/slurm.conf"))
    assert "built without CUDA" in submitting.problem("launch.cluster=west")
    (submitting.folder / "bin" / "sbatch").unlink()
    monkeypatch.setenv("PATH", f"{submitting.folder}/bin")
    assert submitting.plan().device == "cuda", "this host submits no jobs"


def test_what_every_host_installs_for_itself_may_differ_on_the_nodes(submitting, monkeypatch):
    monkeypatch.setattr(module, "SYSTEM_FOLDER", str(submitting.folder))
    assert submitting.plan().device == "cuda"


@pytest.mark.parametrize(
    ("gpu", "driver", "build", "override", "problem"),
    [
        (V100, (13, 0), "13.0", "fp16", "has no kernels for the GPU V100 32GB .*cu126` installs"),
        (V100, (12, 4), "12.6", "fp16", None),
        ("Tesla T4", (13, 0), "13.0", "bf16", "is bf16, which the tensor cores of T4 do .*dtype: fp16"),
        ("NVIDIA H100", (12, 4), "13.0", "bf16", "driver for CUDA 13, and has one for 12.4.*cu126` installs"),
        ("NVIDIA H100", (13, 0), "13.0", "bf16", None),
        ("NVIDIA H100", (13, 0), None, "bf16", "the run uses GPUs, but torch .* was built without CUDA"),
        ("", None, None, "bf16", r"torch 2.13.0\+x of .* is for AMD GPUs, .* use CPUs.*are not supported"),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_of_a_workstation(
    submitting, monkeypatch, gpu, driver, build, override, problem
):
    make_torch(submitting.folder / "other", "2.13.0+x", build, None if gpu else "6.4")
    submitting.package = submitting.folder / "other" / "torch"
    names = (gpu,) if gpu else ()
    machine = Machine(16, len(names), names, "there is no NVIDIA driver on this machine", driver_cuda=driver)
    monkeypatch.setattr("trainkit.launch.plan_run.detect_machine", lambda: machine)
    loaded = load_config(None, overrides=[f"precision.dtype={override}"], environ={}, cwd=submitting.folder)
    if problem is None:
        assert plan_run(loaded, gather(loaded, target=LOCAL)).device == "cuda"
        return
    found = only_problem(lambda: plan_run(loaded, gather(loaded, target=LOCAL)))
    assert re.search(problem, found.render(), re.DOTALL)


TENSORBOARD = f"`{sys.executable} -m pip install 'tensorboard>=2.16'` installs it"


def tracker_problems(folder: Path, **launch: Any) -> list[KeyProblem]:
    config = RunConfig.model_validate({"logging": {"mlflow": True}, "launch": launch})
    return list(find_environment(config, True, Workload(("true",)), folder).problems)


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "own_packages", lambda *_: Packages("3.11", "python", {}, {}))
    [found] = tracker_problems(tmp_path)
    said("\n".join(found))
    assert not find_environment(RunConfig(), True, Workload(("true",)), tmp_path).problems
    # Only the job knows these environments.
    for launch in ({"setup": ["module load x"]}, {"env": {"PYTHONPATH": "x"}}):
        assert not tracker_problems(tmp_path, **launch)


@pytest.mark.parametrize(
    ("value", "workload", "repeats", "is_refused"),
    [
        (True, TRAINER, False, True),
        ("auto", TRAINER, False, False),
        (False, TRAINER, False, False),
        (True, Workload(("true",)), False, False),  # the command writes no checkpoint
        (None, TRAINER, True, False),  # the config of the run has an earlier version's default, true
        (True, TRAINER, True, True),
    ],
)
def test_tensorboard_that_is_not_installed(submitting, value, workload, repeats, is_refused):
    overrides = [] if value is None else [f"logging.tensorboard={str(value).lower()}"]
    if repeats:
        run = RunDir(unpack_run(GOLDEN / "folders" / "finished", submitting.folder))
        text = run.config_file.read_text()
        run.config_file.write_text(text.replace("tensorboard: false", "tensorboard: true"))
        again = load_again(run, LaunchPlan.read(run.plan_file), overrides, {})
        loaded = load_config(run.config_file, overrides=overrides, environ={}, cwd=submitting.folder)
        assert again.config == loaded.config
    else:
        loaded = load_config(None, overrides=overrides, environ={}, cwd=submitting.folder)
    facts = gather(loaded, workload, target=LOCAL)
    assert facts.environment is not None
    words = (f"is set, but {sys.executable} has no tensorboard", TENSORBOARD)
    assert list(facts.environment.problems) == [("logging.tensorboard", *words)] * is_refused


def test_a_folder_is_no_module(tmp_path, monkeypatch):
    """W&B writes to a folder with the name of its module."""
    (tmp_path / "no_such_tracker").mkdir()
    (tmp_path / "a_tracker.py").touch()
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert own_packages("no_such_tracker", "a_tracker").files.keys() == {"a_tracker"}
    names = ["no_such_tracker", "json"]
    assert find_packages([str(tmp_path / "python"), "-I"], names, {}).files.keys() == {"json"}
