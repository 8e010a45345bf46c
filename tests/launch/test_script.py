"""The batch script: a function of plan, config and place."""

import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.backends import JobScript, backend_named
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.launch.environment import container_program
from trainkit.launch.script import script_for
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.plan.workload import Command, workload_of
from trainkit.run.rundir import RunDir, submission_token

LOGIN_NODE = Machine(4, 0, (), "a login node")


def script(
    tmp_path: Path, *overrides: str, run: str = "runs/mine", command: tuple[str, ...] | None = None
) -> JobScript:
    config_file = tmp_path / "mine.yaml"
    config_file.write_text("name: mine\n")
    loaded = load_config(
        config_file,
        overrides=["device=cpu", "train.global_batch_size=null", *overrides],
        environ={},
        cwd=tmp_path,
    )
    target = Target("sbatch", "a test", Cluster("unknown"))
    plan = make_plan(loaded, Facts(LOGIN_NODE, target), workload_of(command))
    return script_for(RunDir(tmp_path / run), 1, plan, loaded.config, tmp_path, None)


def option(text: str, name: str) -> str | None:
    lines = [line for line in text.splitlines() if line.startswith(f"#SBATCH --{name}")]
    assert len(lines) <= 1, lines
    return lines[0].partition("=")[2] if lines else None


def test_what_is_asked_for_stands_in_the_script(tmp_path: Path) -> None:
    text = script(
        tmp_path,
        *("resources.nodes=4", "resources.gpus_per_node=2", "resources.time='02:00:00'"),
        *("resources.partition=long", "resources.account=me", "resources.mem=8G", "resources.cpus_per_gpu=3"),
        *("resources.exclude=node7", "resources.extra={exclusive: true, nice: 10, hold: false}"),
    ).text
    assert text.startswith("#!/bin/bash\n")
    expected = {
        **{"job-name": "mine", "nodes": "4", "ntasks-per-node": "2", "time": "02:00:00", "partition": "long"},
        **{"account": "me", "mem": "8G", "cpus-per-task": "3", "exclude": "node7", "nice": "10"},
        **{"signal": "USR2@120", "open-mode": "append"},
    }
    assert {name: option(text, name) for name in expected} == expected
    assert "#SBATCH --exclusive\n" in text
    assert "#SBATCH --requeue\n" in text
    assert "hold" not in text
    assert "    --ntasks=8\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_task_a_node_gets_the_cores_of_all_its_workers(tmp_path: Path) -> None:
    options = (
        "resources.nodes=2",
        "resources.gpus_per_node=4",
        "resources.cpus_per_gpu=3",
        "launch.per=node",
    )
    text = script(tmp_path, *options).text
    assert option(text, "ntasks-per-node") == "1"
    assert option(text, "cpus-per-task") == "12"
    assert "    --ntasks=2\n" in text


def test_gpus_are_asked_for_where_they_are_used(tmp_path: Path) -> None:
    options = ("device=cuda", "resources.gpus_per_node=4", "resources.gpu_type=a100")
    assert option(script(tmp_path, *options).text, "gpus-per-node") == "a100:4"
    assert option(script(tmp_path, "resources.gpus_per_node=4").text, "gpus-per-node") is None


def test_the_mark_is_one_word_and_the_comment_goes_with_it(tmp_path: Path) -> None:
    text = script(tmp_path, "resources.comment='for the paper'").text
    mark = submission_token(RunDir(tmp_path / "runs/mine"), 1)
    assert option(text, "comment") == f'"{mark} for the paper"'
    assert mark != submission_token(RunDir(tmp_path / "runs/mine"), 2)


def test_a_short_job_is_signalled_early_enough_but_not_from_its_start(tmp_path: Path) -> None:
    assert option(script(tmp_path, "resources.time='00:02:00'").text, "signal") == "USR2@30"
    assert option(script(tmp_path, "requeue.grace_s=30.5").text, "signal") == "USR2@31"


@pytest.mark.parametrize(
    ("overrides", "restarts"),
    [
        ((), 3),
        (("requeue.max=1",), 1),
        (("requeue.max_crashes=0",), 0),
        (("requeue.on=[preempted]",), 0),
        (("requeue.on=[crash]",), 0),  # submitted with --no-requeue
    ],
)
def test_a_start_that_fails_is_requeued_as_the_policy_says(
    tmp_path: Path, overrides: tuple[str, ...], restarts: int
) -> None:
    text = script(tmp_path, *overrides).text
    assert ("scontrol requeue" in text) == (restarts > 0)
    assert not restarts or f"if (( $# > {restarts} ))" in text.replace("elif", "if")


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    assert script(tmp_path).text == script(tmp_path).text


@pytest.mark.parametrize(
    "name", ["with space", "it's", "$(touch HACKED)", "a;b", "ünïcode", "back\\slash", "50%"]
)
def test_names_are_only_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    text = script(folder).text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    # The script itself, with something harmless in the place of the supervisor, names its run folder.
    body = text.replace("exec ", "printf '%s\\n' ")
    said = subprocess.run(
        ["bash"], input=body, text=True, capture_output=True, cwd=tmp_path, check=True
    ).stdout
    assert str(folder / "runs/mine") in said.splitlines()
    assert not list(tmp_path.rglob("HACKED"))


def test_thousands_of_nodes_are_planned_and_rendered_in_half_a_second(tmp_path: Path) -> None:
    script(tmp_path)  # loads the template engine
    began = time.process_time()
    text = script(tmp_path, "resources.nodes=4096", "resources.gpus_per_node=8").text
    assert time.process_time() - began < 0.5
    assert "    --ntasks=32768\n" in text


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    config_file = tmp_path / "mine.yaml"
    config_file.write_text("name: mine\n")
    loaded = load_config(config_file, overrides=["device=cpu"], environ={}, cwd=tmp_path)
    facts = Facts(LOGIN_NODE, Target("sbatch", "a test", Cluster("unknown")))
    plan = make_plan(loaded, facts, Command(("python", "x.py")))
    assert LaunchPlan.from_dict(plan.to_dict()) == plan


def test_a_template_of_the_project_takes_the_place_of_ours(tmp_path: Path) -> None:
    own = tmp_path / "templates" / "submit.sbatch.j2"
    own.parent.mkdir()
    own.write_text("#!/bin/bash\n# mine\n{% for word in step %}\n{{ word | quote }}\n{% endfor %}\n")
    found = script(tmp_path)
    assert found.text.startswith("#!/bin/bash\n# mine\nsrun\n")


@pytest.mark.parametrize(
    ("has", "program", "shown"),
    [
        (("apptainer",), "apptainer", "    apptainer\n    exec\n"),
        (("singularity",), "singularity", "    singularity\n    exec\n"),
        (("pyxis", "enroot"), "pyxis", "    --container-image="),
    ],
)
def test_what_the_cluster_has_runs_the_container(
    tmp_path: Path, has: tuple[str, ...], program: str, shown: str
) -> None:
    config_file = tmp_path / "mine.yaml"
    config_file.write_text("name: mine\nlaunch: {container: nvcr.io/nvidia/pytorch}\n")
    overrides = ["device=cpu", "train.global_batch_size=null"]
    loaded = load_config(config_file, overrides=overrides, environ={}, cwd=tmp_path)
    target = Target("sbatch", "a test", Cluster("unknown", containers=has))
    found = container_program(loaded.config.launch, has)
    assert found == program
    plan = replace(make_plan(loaded, Facts(LOGIN_NODE, target)), container_program=found)
    text = script_for(RunDir(tmp_path / "runs/mine"), 1, plan, loaded.config, tmp_path, None).text
    assert shown in text
    assert "\nexec python3" not in text, "the supervisor runs on the node, with the interpreter that submits"


def test_spare_nodes_stand_in_the_script(tmp_path: Path) -> None:
    text = script(tmp_path, "resources.nodes=2", "resources.spare_nodes=1", "requeue.on=[crash]").text
    assert option(text, "nodes") == "3"
    assert "#SBATCH --no-kill\n" in text
    assert "#SBATCH --no-requeue\n" in text
    assert "    --nodes=2\n" in text
    assert "mine: 2 nodes with 1 worker each, and 1 spare, one Slurm task per gpu" in text


def test_the_shell_of_submitit_outlives_a_signal_that_its_supervisor_handles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    supervisor = bin_folder / "python"
    supervisor.write_text("#!/bin/sh\ntrap '' TERM\necho started\nread line\nexit 75\n")
    (bin_folder / "srun").write_text("#!/bin/sh\n")  # submitit looks for it
    for file in bin_folder.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    given = replace(script(tmp_path), host_python=(str(supervisor),), setup="")
    file = tmp_path / "submission.sh"  # of `bash -c` the last command replaces the shell
    file.write_text(backend_named("submitit").finish_script(RunDir(tmp_path / "runs/mine"), given).text)
    with subprocess.Popen(
        ["bash", str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout.readline() == "started\n"
        shell.terminate()
        shell.stdin.write("ended\n")
        shell.stdin.flush()
        assert shell.wait(timeout=60) == 75


def test_a_step_needs_no_mpi_plugin_unless_the_user_wants_one(tmp_path: Path) -> None:
    assert "    --mpi=none\n" in script(tmp_path).text
    own = script(tmp_path, "launch.srun_extra={mpi: pmix}").text
    assert "    --mpi=pmix\n" in own
    assert "--mpi=none" not in own
