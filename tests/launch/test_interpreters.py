"""Tests which interpreter, environment and container a run uses, and problems of these keys."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import write
from tests.support.said import said
from tests.support.torch_builds import make_torch
from trainkit import DISTRIBUTION, __version__
from trainkit.config.running import LaunchConfig
from trainkit.job.processes import PYTHON_OPTIONS
from trainkit.launch.environment import (
    absolute_image,
    container_problems,
    container_program,
    find_interpreter,
    launch_problems,
)
from trainkit.launch.packages import NoAnswer, Packages, find_packages, own_packages, package_problem
from trainkit.plan.facts import Interpreter

SUBMITTING = sys.executable
BARE = {"PATH": "/nowhere"}


def find(cwd: Path, environ: dict[str, str] | None = None, **launch: Any) -> Interpreter:
    """Return the interpreter for a config without problems."""
    found, problems = find_interpreter(LaunchConfig(**launch), cwd, environ or BARE)
    assert problems == []
    return found


def say_wrong(cwd: Path, environ: dict[str, str] | None = None, **launch: Any) -> None:
    """Compare the only problem of a config, with its key and hint, with the table."""
    [problem] = find_interpreter(LaunchConfig(**launch), cwd, environ or BARE)[1]
    said("\n".join(problem))


def make_python(folder: Path, version: str = "3.10") -> str:
    """Create a virtual environment with an interpreter, whose content is never read."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / f"python{version}").touch(mode=0o755)
    (folder / "bin" / "python").symlink_to(f"python{version}")
    (folder / "bin" / "activate").touch()
    return str(folder / "bin" / "python")


def test_nothing_asked_for_is_the_submitting_interpreter(tmp_path):
    assert find(tmp_path) == Interpreter(
        (SUBMITTING,), (SUBMITTING,), options=PYTHON_OPTIONS, host_options=PYTHON_OPTIONS
    )


def test_an_older_python_is_not_given_what_it_does_not_know(tmp_path):
    assert find(tmp_path, python=make_python(tmp_path / "old", "3.10")).options == ("-u",)
    assert find(tmp_path, python=make_python(tmp_path / "new", "3.13")).options == ("-u", "-P")
    (tmp_path / "mine").touch(mode=0o755)
    assert find(tmp_path, python="./mine").options == ("-u",)


def test_what_is_not_a_path_is_a_problem_of_its_key(tmp_path):
    for key in ("venv", "uv", "conda", "python"):
        say_wrong(tmp_path, **{key: "${ENVS}/a"})


def test_virtual_environment_that_is_none(tmp_path):
    say_wrong(tmp_path, venv="gone")
    Path(make_python(tmp_path / "half")).with_name("activate").unlink()
    say_wrong(tmp_path, venv="half")


def test_what_stands_besides_an_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_python(tmp_path / "v")
    assert find(Path("/"), venv="~/v").venv == f"{tmp_path}/v"
    other = make_python(tmp_path / "x")
    found = find(tmp_path, venv="v", python=other)
    assert (found.argv, found.venv) == ((other,), f"{tmp_path}/v")
    say_wrong(tmp_path, venv="v", conda="c", modules=["conda"])


def test_interpreter_by_path_and_by_name(tmp_path):
    make_python(tmp_path / "x")
    assert find(tmp_path, python="x/bin/python").argv == (f"{tmp_path}/x/bin/python",)
    environ = {"PATH": f"{tmp_path}/x/bin"}
    assert find(tmp_path, environ, python="python3.10").argv == ("python3.10",)
    say_wrong(tmp_path, python="python3.10")
    assert find(tmp_path, python="python3.10", modules=["python/3.10"]).argv == ("python3.10",)


def make_project(folder: Path, environment: str = "") -> None:
    (folder / environment).mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    if environment:
        make_python(folder / environment, "3.12")
        (folder / environment / "pyvenv.cfg").touch()


def test_the_environment_of_a_uv_project(tmp_path):
    make_project(tmp_path / "w", ".venv")
    found = find(tmp_path, uv="w")
    assert (found.argv, found.venv) == ((f"{tmp_path}/w/.venv/bin/python",), f"{tmp_path}/w/.venv")
    assert found.options == ("-u", "-P")
    make_project(tmp_path / "w/packages/member")  # of a workspace
    assert find(tmp_path, uv="w/packages/member").venv == f"{tmp_path}/w/.venv"
    make_project(tmp_path / "p", "elsewhere")
    environ = {**BARE, "UV_PROJECT_ENVIRONMENT": "elsewhere"}
    assert find(tmp_path, environ, uv="p").venv == f"{tmp_path}/p/elsewhere"
    say_wrong(tmp_path, uv="p")
    say_wrong(tmp_path, uv="no-project")


class TestConda:
    @pytest.fixture
    def base(self, tmp_path: Path) -> Path:
        base = tmp_path / "conda"
        make_python(base)
        make_python(base / "envs" / "mine", "3.12")
        (base / "bin" / "conda").touch(mode=0o755)
        write(base, "etc/profile.d/conda.sh")
        return base

    def test_by_name(self, tmp_path, base):
        found = find(tmp_path, {"PATH": f"{base}/bin"}, conda="mine")
        python, options = (f"{base}/envs/mine/bin/python",), ("-u", "-P")
        assert found == Interpreter(
            *(python, python),
            **{"options": options, "host_options": options},
            **{"conda": "mine", "conda_script": f"{base}/etc/profile.d/conda.sh"},
        )
        assert find(tmp_path, {"CONDA_EXE": f"{base}/bin/conda", **BARE}, conda="mine") == found
        assert find(tmp_path, {"PATH": f"{base}/bin"}, conda="base").argv == (f"{base}/bin/python",)

    def test_by_name_elsewhere(self, tmp_path, base):
        make_python(tmp_path / "shared" / "theirs")
        environ = {"PATH": f"{base}/bin", "HOME": str(tmp_path)}
        say_wrong(tmp_path, environ, conda="theirs")
        (tmp_path / ".conda").mkdir()
        (tmp_path / ".conda/environments.txt").write_text(f"{tmp_path}/shared/theirs\n")
        assert find(tmp_path, environ, conda="theirs").argv == (f"{tmp_path}/shared/theirs/bin/python",)

    def test_by_folder(self, tmp_path, base):
        python = make_python(tmp_path / "env")
        found = find(tmp_path, {"PATH": f"{base}/bin"}, conda="./env")
        assert (found.argv, found.conda) == ((python,), f"{tmp_path}/env")
        say_wrong(tmp_path, {"PATH": f"{base}/bin"}, conda="./gone")
        say_wrong(tmp_path, {"PATH": f"{base}/bin"}, conda="mine", container="x.sif")

    def test_a_module_may_bring_it(self, tmp_path):
        found = find(tmp_path, conda="mine", modules=["miniforge"])
        assert (found.argv, found.conda, found.conda_script) == (("python",), "mine", None)
        say_wrong(tmp_path, conda="mine")


def test_container(tmp_path):
    found = find(tmp_path, container="x.sif")
    assert found == Interpreter(("python3",), (SUBMITTING,), options=("-u",), host_options=PYTHON_OPTIONS)
    assert find(tmp_path, container="x.sif", python="python3.12").argv == ("python3.12",)
    # The interpreter is in the image, which cannot be read from this host.
    found = find(tmp_path, container="x.sif", venv="/opt/env")
    assert (found.argv, found.venv) == (("/opt/env/bin/python",), None)


def test_packages_that_the_trainer_needs(tmp_path):
    packages = tmp_path / "packages"
    write(packages, "torch.py")
    (packages / "trainkit.py").touch()
    python = (str(getattr(sys, "_base_executable", sys.executable)), "-S")

    def problem(path: str) -> str | None:
        found = find_packages(python, ["torch", "trainkit"], {**BARE, "PYTHONPATH": path}, tmp_path)
        why = package_problem(found, python[0])
        return None if why is None else why[0]

    said(problem(""))
    with_both = str(packages)
    assert problem(with_both) == f"imports another package called trainkit from {packages / 'trainkit.py'}"
    ours = f"DISTRIBUTION = {DISTRIBUTION!r}\n"
    (packages / "trainkit.py").write_text(f"{ours}__version__ = '0.0.1'")
    assert problem(with_both) == f"has trainkit 0.0.1, but this is trainkit {__version__}"
    (packages / "trainkit.py").write_text(f"{ours}__version__ = {__version__!r}  # another size")
    assert problem(with_both) is None
    (packages / "torch.py").unlink()
    write(packages, "torch/__init__.py")
    (packages / "torch" / "version.py").write_text("__version__ = '2.10.0+cu128'\n")
    said(problem(with_both))
    (packages / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
    assert problem(with_both) is None
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'no such library' >&2; exit 127")
    broken.chmod(0o755)
    with pytest.raises(NoAnswer, match=r"^no such library$"):
        find_packages([str(broken)], ["torch"], {}, tmp_path)
    with pytest.raises(NoAnswer, match="missing does not run: No such file"):
        find_packages([str(tmp_path / "missing")], ["torch"], {}, tmp_path)


def with_torch(folder: Path) -> Packages:
    return Packages("3.11", "python", {"torch": str(folder / "__init__.py")}, {})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("__version__ = '2.4.0'\ncuda = None\nhip = None\n", "2.4.0"),
        ("cuda = None\n", "of unknown version"),
        ("__version__ = '2.4.0'\n", None),  # an unknown kind of build counts as suitable
        ("cuda = make_version()\n", None),
        ("cuda: Optional[str]\n", None),
        ("no Python", None),
        (None, None),
    ],
)
def test_other_version_files(tmp_path, text, found):
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    problem = with_torch(tmp_path).torch.problem()
    assert (None if problem is None else problem[0].split(" torch ")[1].split(" of python")[0]) == found


def test_packages_are_found_as_a_job_finds_them(tmp_path):
    package = make_torch(tmp_path / "site")
    python = (str(getattr(sys, "_base_executable", sys.executable)), "-S")
    found = find_packages(python, ["torch", "json", "site"], {"PYTHONPATH": str(package.parent)}, tmp_path)
    assert found.files["torch"] == str(package / "__init__.py")
    assert found.files.keys() == {"torch", "json", "site"}, "site is the module, not the folder here"
    own = own_packages("torch", "no_such_package")
    assert (Path(own.files["torch"]).with_name("version.py")).is_file()
    assert "no_such_package" not in own.files
    assert find_packages((sys.executable,), ["torch"], {}).files == own.files


@pytest.mark.parametrize(
    ("image", "available", "expected"),
    [
        ("/images/torch.sif", (), "apptainer"),
        ("docker://pytorch/pytorch:2.13.0", ("pyxis",), "apptainer"),
        ("/images/torch.sqsh", (), "pyxis"),
        ("nvcr.io#nvidia/pytorch:26.01-py3", (), "pyxis"),
        ("pytorch/pytorch:2.13.0", (), None),
        ("pytorch/pytorch:2.13.0", ("pyxis",), "pyxis"),
        ("/images/folder", ("apptainer",), "apptainer"),
        ("/images/folder", ("apptainer", "pyxis"), None),
        (None, (), None),
    ],
)
def test_runtime(image, available, expected):
    assert container_program(LaunchConfig(container=image), available) == expected
    if image is not None:
        assert container_program(LaunchConfig(container=image, container_runtime="pyxis")) == "pyxis"


def problems(cwd: str = "/nowhere", **launch: Any) -> list[str]:
    return [f"{key}: {message}" for key, message, _ in container_problems(LaunchConfig(**launch), cwd)]


def test_an_image_that_is_there_and_one_that_is_gone(tmp_path):
    image = tmp_path / "x.sif"
    image.touch()
    assert problems(container=str(image), container_mounts=["/a", "/a:/b", "/a:/b:ro"]) == []
    assert problems() == []
    image.unlink()
    [problem] = problems(container=str(image))
    said(problem)


@pytest.mark.parametrize(
    "launch",
    [
        *({"container_mounts": ["/a"]}, {"container": "--pwn"}, {"container": "image"}),
        *({"container": "gone.sif"}, {"container": "/a/${USER}.sif"}),
        {"container": "docker://x", "cwd": "/a,b"},
        *(
            {"container": "docker://x", "container_mounts": [mount]}
            for mount in ("data", "/a:", "/a:/b:ro:x", "/a,/b", ":/b")
        ),
    ],
    ids=str,
)
def test_what_is_wrong(launch):
    [problem] = problems(**launch)
    said(problem)


def test_image_is_the_same_wherever_the_step_runs():
    images = ("images/x.sif", "../x.sif", "/x.sif", "docker://a/b:1")
    expected = ["/p/images/x.sif", "/x.sif", "/x.sif", "docker://a/b:1"]
    assert [absolute_image(image, "apptainer", "/p") for image in images] == expected
    images, expected = ("nvcr.io/a/b:1", "./image", "a.sqsh"), ["nvcr.io/a/b:1", "/p/image", "/p/a.sqsh"]
    assert [absolute_image(image, "pyxis", "/p") for image in images] == expected


def wrong(**launch: Any) -> list[tuple[str, str]]:
    """Return the problems of values that may be ones that the config would refuse."""
    made = LaunchConfig.model_construct(**{**dict(LaunchConfig()), **launch})
    return [(key, message) for key, message, _ in launch_problems(made)]


def test_a_good_environment():
    assert wrong() == []
    environ = {"_a1": "two\nlines"}
    assert wrong(modules=["cuda/12.4"], env=environ, setup=["a\nb"], conda="mine", venv="x y") == []


def test_names_of_modules_and_environments():
    for name in ("--force", "", " ", "a b"):
        assert [key for key, _ in wrong(modules=(name,))] == ["launch.modules"]
    [problem] = wrong(conda="-n")
    said(": ".join(problem))


def test_variables_that_are_not_the_users():
    names = ("RANK", "MASTER_ADDR", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SBATCH_QOS", "TRAINKIT_JOB_NONCE")
    found = wrong(env=dict.fromkeys(names, "1"))
    assert [key for key, _ in found] == [f"launch.env.{name}" for name in names]
    [message] = {message for _, message in found}
    said(message)
