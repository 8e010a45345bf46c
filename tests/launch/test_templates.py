"""Tests templates: which one is used, errors that name their line, and the batch script of a plan."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_program
from tests.support.said import said
from trainkit.backend import JobScript, backend_named
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.errors import UsageError
from trainkit.folders import shipped_templates
from trainkit.launch import script as templates
from trainkit.launch.environment import JobEnvironment
from trainkit.launch.script import render, script_for
from trainkit.plan.facts import Facts
from trainkit.plan.make_plan import make_plan
from trainkit.run.rundir import RunDir

PARTIAL = "partials/environment.sh.j2"
CONTEXT = {"environment": JobEnvironment("/w", ("python3",), ("python3",))}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "templates" / "partials").mkdir(parents=True)
    return tmp_path


def write(project: Path, text: str, name: str = "mine.j2") -> Path:
    path = project / "templates" / name
    path.write_text(text)
    return path


def refusal(project: Path, name: str = "mine.j2", **context: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        render(name, context, project)
    return caught.value


def test_which_template_is_taken(project):
    assert render(PARTIAL, CONTEXT, project).startswith("umask 077")
    write(project, "{% include 'partials/environment.sh.j2' %}\necho {{ x }}\n", "outer.j2")
    assert render("outer.j2", {**CONTEXT, "x": 1}, project).startswith("umask 077")
    write(project, "echo mine", PARTIAL)
    assert render("outer.j2", {"x": 1}, project) == "echo mine\necho 1\n"
    # A checkout of trainkit overrides nothing, and no file from outside of the folder is used.
    assert templates._folders(shipped_templates().parent) == [shipped_templates()]
    (project / "secret.j2").write_text("x")
    said(refusal(project, "../secret.j2").message)


VERBATIM = "{{ y }} {% raw %} \\1 \\g<0>"
TIDY = "\n\na   \n{% if true %}\n\n\n\nb {{ '' }}\n{% endif %}\n{{ x | verbatim }}\n\n\n"
FILTERS = "# {{ x | comment }}\n#SBATCH --x={{ x | directive }}\n{{ x | quote }} {{ y | words }}\n"


@pytest.mark.parametrize(
    ("template", "x", "y", "text"),
    [
        # Text is tidied, except for verbatim text, which is not treated as a template either.
        (TIDY, "cat <<X\n\n\n\nkept   \nX \\ ", "", "a\n\nb\ncat <<X\n\n\n\nkept   \nX \\ \n"),
        ("{{ x | verbatim }}\n{{ y | verbatim }}\n", VERBATIM, "second", f"{VERBATIM}\nsecond\n"),
        (FILTERS, "it's", ["x y", 2], "# it's\n#SBATCH --x=\"it's\"\n'it'\"'\"'s' 'x y' 2\n"),
        ("echo ${{ '{#' }}name}\n", "", "", "echo ${#name}\n"),
        # jinja2 applies filters to constants only once, when it compiles a template.
        ("{{ 'echo  ${#x}  ' | verbatim }}\n{{ x | verbatim }}\n", "a  ", "", "echo  ${#x}  \na  \n"),
        ("{{ 'echo' | verbatim }}\n{{ x | verbatim }}\n", "caf\u00e9 \udcff", "", "echo\ncaf\u00e9 \udcff\n"),
    ],
)
def test_text_and_filters(project, template, x, y, text):
    write(project, template)
    assert render("mine.j2", {"x": x, "y": y}, project) == text


@pytest.mark.parametrize(
    "text",
    [
        *("one\ntwo {{ workdri | quote }}\n", "a\n{% if x %}\n", "a\n{{ x | qoute }}", "a\n\n{{ 1 / 0 }}"),
        *("a\n{{ x | directive }}", "a\n{{ none | quote }}", "a\n{% include 'gone.j2' %}"),
        "\necho ${#name}\n",
    ],
)
def test_errors_lead_to_their_line(project, text):
    path = write(project, text)
    said(refusal(project, x="a\nb").message.replace(str(shipped_templates()), "SHIPPED"))
    path.write_bytes(b"\xff")
    assert refusal(project).message.startswith("mine.j2: UnicodeDecodeError: ")


def test_undefined_attribute_in_an_included_template(project):
    write(project, "{% include 'partials/x.j2' %}")
    path = write(project, "\n\n{{ environment.modulse }}", "partials/x.j2")
    error = refusal(project, **CONTEXT)
    assert error.message.startswith(f"{path}:3: ")
    said(error.message)
    assert str(shipped_templates()) in error.hint


def test_a_changed_template_is_rendered_as_it_is_now(project):
    for text in ("one", "two"):
        write(project, f"{text} {{{{ word }}}}\n")
        assert render("mine.j2", {"word": "a"}, project) == f"{text} a\n"
    path = write(project, "{{ word\n")
    assert refusal(project, word="a").message.startswith(f"{path}:1: ")


UNSAFE = (
    *("''.__class__.__mro__", "environment.__init__.__globals__", "words.__code__"),
    *("plan.update({'nodes': 9})", "hosts.append('evil')", "plan.pop('nodes')", "hosts.clear()"),
)


@pytest.mark.parametrize("expression", UNSAFE)
def test_a_template_reaches_no_internals_of_python(project, expression):
    """The job reads the same plan that the template describes."""
    path = write(project, f"one\n{{{{ {expression} | string }}}}")
    context: dict[str, Any] = {"plan": {"nodes": 2}, "hosts": ["a"], "words": test_text_and_filters}
    error = refusal(project, **CONTEXT, **context)
    assert error.message.startswith(f"{path}:2: ")
    assert "unsafe" in error.message
    assert (context["plan"], context["hosts"]) == ({"nodes": 2}, ["a"])


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
