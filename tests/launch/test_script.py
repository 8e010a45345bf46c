"""Tests that the batch script depends only on plan, config and place."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.support.programs import run_program
from trainkit.backend import JobScript, backend_named
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.errors import UsageError
from trainkit.launch.script import script_for
from trainkit.plan.facts import Facts
from trainkit.plan.make_plan import make_plan
from trainkit.run.rundir import RunDir


def script(tmp_path: Path, *overrides: str) -> JobScript:
    given = ["device=cpu", "train.global_batch_size=null", *overrides]
    loaded = load_config(None, overrides=given, environ={}, cwd=tmp_path)
    target = Target("sbatch", "a test", Cluster("unknown"))
    plan = make_plan(loaded, Facts(Machine(4, 0, (), "a login node"), target))
    return script_for(RunDir(tmp_path / "runs/mine"), 1, plan, loaded.config, tmp_path, None, "0123:4567")


@pytest.mark.parametrize(
    ("overrides", "restarts"),
    [
        ((), 3),
        (("requeue.max=1",), 1),
        (("requeue.max_crashes=0",), 0),
        (("requeue.on=[preempted]",), 0),
        (("requeue.on=[crash]",), 0),  # the job was submitted with --no-requeue
    ],
)
def test_a_start_that_fails_is_requeued_as_the_policy_says(tmp_path, overrides, restarts):
    text = script(tmp_path, *overrides).text
    assert ("scontrol requeue" in text) == (restarts > 0)
    assert not restarts or f"if (( $# > {restarts} ))" in text.replace("elif", "if")


@pytest.mark.parametrize(
    "name", ["with space", "it's", "$(touch HACKED)", "a;b", "ünïcode", "back\\slash", "50%"]
)
def test_names_are_only_names(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    text = script(folder).text
    assert run_program("bash", "-n", stdin=None, input=text).returncode == 0
    # The script itself, with a harmless command in place of the supervisor, prints its run folder.
    body = text.replace("exec ", "printf '%s\\n' ")
    done = run_program("bash", stdin=None, input=body, cwd=tmp_path, check=True)
    assert str(folder / "runs/mine") in done.stdout.splitlines()
    assert not list(tmp_path.rglob("HACKED"))


def test_a_secret_of_which_only_the_script_would_know(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", tmp_path.name)
    with pytest.raises(UsageError, match=r"the value of HF_TOKEN would be written into .*submit\.sbatch"):
        script(tmp_path)


def test_thousands_of_nodes_are_planned_and_rendered_in_half_a_second(tmp_path):
    script(tmp_path)  # this call loads the template engine
    began = time.process_time()
    text = script(tmp_path, "resources.nodes=4096", "resources.gpus_per_node=8").text
    assert time.process_time() - began < 0.5
    assert "    --ntasks=32768\n" in text


def test_a_template_of_the_project_takes_the_place_of_ours(tmp_path):
    own = tmp_path / "templates" / "submit.sbatch.j2"
    own.parent.mkdir()
    own.write_text("#!/bin/bash\n# mine\n{% for word in step %}\n{{ word | quote }}\n{% endfor %}\n")
    assert script(tmp_path).text.splitlines()[1:3] == ["# mine", "srun"]


def test_the_shell_of_submitit_outlives_a_signal_that_its_supervisor_handles(tmp_path, monkeypatch):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    supervisor = bin_folder / "python"
    supervisor.write_text("#!/bin/sh\ntrap '' TERM\necho started\nread line\nexit 75\n")
    (bin_folder / "srun").write_text("#!/bin/sh\n")  # submitit looks for srun
    for file in bin_folder.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    given = script(tmp_path)._replace(host_python=(str(supervisor),), setup="")
    file = tmp_path / "submission.sh"  # with `bash -c`, the last command would replace the shell
    (tmp_path / "runs/mine/submitit").mkdir(parents=True)
    file.write_text(backend_named("submitit").finish_script(RunDir(tmp_path / "runs/mine"), given).text)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["bash", str(file)], text=True, **pipes) as shell:
        assert shell.stdout.readline() == "started\n"
        shell.terminate()
        assert shell.communicate("ended\n", timeout=60)[0] == ""
        assert shell.returncode == 75
