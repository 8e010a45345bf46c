"""Runs the environment section of a batch script in bash: values arrive unchanged."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import write
from tests.support.programs import run_program
from tests.support.said import said
from trainkit.config.running import LaunchConfig
from trainkit.launch.environment import make_job_environment
from trainkit.launch.script import render
from trainkit.plan.facts import Interpreter

PARTIAL = "partials/environment.sh.j2"
HOSTILE = (
    *("a b", "it's", 'say "hi"', "$(touch PWNED)", "`touch PWNED`", "; touch PWNED;", "&& touch PWNED"),
    *("two\nlines\ntouch PWNED", "'; touch PWNED; '", '"; touch PWNED; "', "back\\", "ünï 日本", "\x1b[31m"),
    *("${PATH}", "#", "-n", "", "\udcff bytes"),
)


def script(project: Path, interpreter: Interpreter | None = None, **launch: Any) -> str:
    """Return the rendered section for keys of `launch` and of `make_job_environment`."""
    given = {key: launch.pop(key) for key in ("python_path", "slurm_version") if key in launch}
    given = {"run_dir": "/run dir", "workdir": "/work dir", **given}
    found = interpreter or Interpreter(("python3",), ("python3",))
    environment = make_job_environment(LaunchConfig(**launch), found, **given)
    return render(PARTIAL, {"environment": environment}, project)


def bash(cwd: Path, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script in bash with an almost empty environment."""
    (cwd / "script").write_bytes(os.fsencode(text))
    options = {"encoding": "utf-8", "errors": "surrogateescape", "timeout": 30, "cwd": cwd}
    return run_program("bash", "script", env={"PATH": os.environ["PATH"], **environ}, **options)


def reports_failure(done: subprocess.CompletedProcess[str]) -> None:
    """Check that a script failed without output, and compare its last line on stderr with the table."""
    assert (done.returncode, done.stdout) == (2, "")
    said(done.stderr.splitlines()[-1])


def variables(cwd: Path, text: str, **environ: str) -> dict[str, str]:
    """Return the environment that a process would have after a script."""
    done = bash(cwd, f"{text}\nenv -0\n", **environ)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def test_values_arrive_as_they_are_and_nothing_is_executed(tmp_path):
    given = {f"V{number}": value for number, value in enumerate(HOSTILE)}
    found = variables(tmp_path, script(tmp_path, env=given, python_path=[*HOSTILE[:6], "/last"]))
    assert {name: found[name] for name in given} == given
    assert found["PYTHONPATH"] == ":".join([*HOSTILE[:6], "/last"])
    done = bash(tmp_path, script(tmp_path, env={"A; touch PWNED; B": "1", "$(touch PWNED)": "1"}))
    assert "not a valid identifier" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["script"]


def test_rank_of_another_job_is_forgotten(tmp_path):
    found = variables(tmp_path, script(tmp_path), RANK="3", MASTER_PORT="1", WORLD_SIZE="4", MINE="x")
    assert not {"RANK", "MASTER_PORT", "WORLD_SIZE"} & set(found)
    assert found["MINE"] == "x"


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [
        ((), {"SLURM_CPUS_PER_TASK": "6", "SRUN_CPUS_PER_TASK": "99"}, "6"),
        ((21, 8, 8), {"SLURM_CPUS_PER_TASK": "6"}, None),
        ((22, 5, 0), {"SLURM_CPUS_PER_TASK": "6"}, "6"),
        ((23, 2, 7), {"SLURM_CPUS_PER_TASK": "6"}, "6"),
        ((23, 2, 7), {}, None),
        ((23, 11, 0), {"SLURM_CPUS_PER_TASK": "6", "SRUN_CPUS_PER_TASK": "99"}, None),
    ],
)
def test_cpus_per_task(tmp_path, version, given, expected):
    found = variables(tmp_path, script(tmp_path, slurm_version=version), **given)
    assert found.get("SRUN_CPUS_PER_TASK") == expected


def test_what_the_job_writes_is_private(tmp_path):
    bash(tmp_path, script(tmp_path) + "touch file\nmkdir folder\n")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


def test_snapshot_comes_before_any_other_pythonpath(tmp_path):
    text = script(tmp_path, python_path=["/code", "/code/src"], env={"PYTHONPATH": "/configured"})
    said(variables(tmp_path, text)["PYTHONPATH"])
    text = script(tmp_path, python_path=["/code"])
    assert variables(tmp_path, text, PYTHONPATH="/inherited")["PYTHONPATH"] == "/code:/inherited"
    assert variables(tmp_path, text)["PYTHONPATH"] == "/code"


def test_virtual_environment(tmp_path):
    folder = tmp_path / "it's; an env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = f"{folder}/bin/python"
    text = script(tmp_path, Interpreter((python,), (python,), venv=str(folder)))
    done = bash(tmp_path, f"{text}\npython -c 'import sys; print(sys.prefix)'", VIRTUAL_ENV="/other")
    assert (done.stdout, done.stderr) == (f"{folder}\n", "")


def test_virtual_environment_that_is_gone(tmp_path):
    text = script(tmp_path, Interpreter(("p",), ("p",), venv="/gone/$(touch PWNED)"))
    reports_failure(bash(tmp_path, f"{text}\necho not reached"))
    assert [path.name for path in tmp_path.iterdir()] == ["script"]


class TestModules:
    """Tests a stand-in for the `module` function, found where a cluster would define the real one."""

    @pytest.fixture
    def home(self, tmp_path: Path) -> str:
        write(tmp_path, "home/init/bash")
        text = "false\nmodule() { [[ $2 != missing ]] && printf '<%s>' \"$@\"; }\nfalse\n"
        (tmp_path / "home" / "init" / "bash").write_text(text)
        return str(tmp_path / "home")

    def test_loaded_in_order_by_name(self, tmp_path, home):
        text = script(tmp_path, modules=["cuda/12", "a;touch PWNED", "$(touch PWNED)"])
        done = bash(tmp_path, f"set -e\n{text}", MODULESHOME=home)
        assert (done.returncode, done.stderr) == (0, "")
        said(done.stdout)
        assert not (tmp_path / "PWNED").exists()

    def test_function_of_the_shell_is_used(self, tmp_path):
        text = script(tmp_path, modules=["cuda"])
        environ = {"BASH_FUNC_module%%": "() { echo inherited $*; }"}
        assert bash(tmp_path, text, **environ).stdout == "inherited load cuda\n"

    def test_one_that_cannot_be_loaded_ends_the_job(self, tmp_path, home):
        reports_failure(bash(tmp_path, script(tmp_path, modules=["missing", "cuda"]), MODULESHOME=home))
        reports_failure(bash(tmp_path, script(tmp_path, modules=["cuda"]), HOSTNAME="node7"))


class TestConda:
    """Tests a stand-in for conda's shell hook."""

    HOOK = "conda() { [[ $2 != missing ]] && printf '<%s>' \"$@\"; }\n"

    @pytest.mark.parametrize(
        ("name", "code", "said"),
        [
            ("/envs/a b;$(touch PWNED)", 0, "<activate></envs/a b;$(touch PWNED)>"),
            ("missing", 2, "trainkit: cannot activate missing\n"),
        ],
    )
    def test_by_its_script(self, tmp_path, name, code, said):
        file = tmp_path / "it's conda.sh"
        file.write_text(self.HOOK)
        found = Interpreter(("p",), ("p",), conda=name, conda_script=str(file))
        done = bash(tmp_path, script(tmp_path, found))
        assert (done.returncode, done.stdout + done.stderr) == (code, said)

    def test_by_the_program_that_a_module_has_brought(self, tmp_path):
        found = Interpreter(("python",), ("python",), conda="mine")
        reports_failure(bash(tmp_path, script(tmp_path, found), HOSTNAME="node7"))
        program = tmp_path / "conda"
        program.write_text(f"#!/bin/bash\n[[ $* == 'shell.bash hook' ]] && cat <<'X'\n{self.HOOK}X\n")
        program.chmod(0o755)
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        assert bash(tmp_path, script(tmp_path, found), **environ).stdout == "<activate><mine>"


class TestSetup:
    def test_lines_are_the_users_own_shell(self, tmp_path):
        lines = [
            *(
                "if true; then  ",
                '  export A="$(echo one)"',
                "fi",
                "cat <<X\n\n\nkept   \nX",
                "yes | head -1",
            ),
            *("[ -f nowhere ] && echo unlikely", "! true", "echo \\\ncontinued"),
            *("source ./bashrc", "false || true"),
        ]
        (tmp_path / "bashrc").write_text("false\nexport B=2\n")
        done = bash(tmp_path, f"set -e -o pipefail\n{script(tmp_path, setup=lines)}\necho $A $B")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "\n\nkept   \ny\ncontinued\none 2\n"

    @pytest.mark.parametrize(
        "line", ["source gone.sh", "(exit 7)", 'ls "$SECRET"', "mine() { return 3; }; mine"]
    )
    def test_one_that_fails_ends_the_job(self, tmp_path, line):
        reports_failure(bash(tmp_path, script(tmp_path, setup=[line, "echo not reached"]), SECRET="hidden"))

    def test_a_failure_after_the_lines_does_not_end_the_job(self, tmp_path):
        done = bash(tmp_path, script(tmp_path, setup=["echo reached"]) + "false\necho on")
        assert (done.returncode, done.stdout) == (0, "reached\non\n")

    def test_runs_behind_everything_else(self, tmp_path):
        given = {"env": {"A": "1"}, "python_path": ["/code"], "setup": ["echo $A $PYTHONPATH; umask 022"]}
        assert bash(tmp_path, script(tmp_path, **given) + "\numask").stdout == "1 /code\n0022\n"

    def test_a_shell_that_somebody_sits_at_stays_open(self, tmp_path):
        (tmp_path / "rc").write_text(script(tmp_path, setup=["false"]))
        done = run_program("bash", "--rcfile", "rc", "-i", "-c", "false; echo alive", cwd=tmp_path)
        assert done.stdout == "alive\n"
        assert "launch.setup failed" in done.stderr
