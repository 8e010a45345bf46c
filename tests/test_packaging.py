"""Checks the recipes for images and packages in docker/, conda/ and spack/ against setup.cfg."""

import ast
import re
import shlex
import sys
from collections.abc import Mapping
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import trainkit
from tests.support.programs import run_program
from trainkit.config.running import LaunchConfig
from trainkit.launch.environment import container_problems, container_program

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE, DEFINITION = ROOT / "docker/Dockerfile", ROOT / "docker/trainkit.def"
RECIPE, PACKAGE = ROOT / "conda/recipe.yaml", ROOT / "spack/package.py"
HADOLINT = Path(sys.executable).with_name("hadolint")


def setup_cfg() -> ConfigParser:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def requirements() -> dict[str, Requirement]:
    lines = setup_cfg()["options"]["install_requires"].split("\n")
    return {one.name: one for one in map(Requirement, filter(None, lines))}


def sections() -> Mapping[str, list[str]]:
    """Return the lines of each section of the Apptainer definition; the header is under an empty name."""
    found: dict[str, list[str]] = {"": []}
    for line in DEFINITION.read_text().splitlines():
        if line.startswith("%"):
            found[line[1:]] = []
        elif line.strip() and not line.strip().startswith("#"):
            found[list(found)[-1]].append(line.strip())
    return found


def copied_by_dockerfile() -> dict[str, str]:
    """Map each file and folder that the Dockerfile copies to its path below /src."""
    found = {}
    for line in DOCKERFILE.read_text().splitlines():
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            found |= {one: one if target == "./" else target for one in sources}
    return found


def copied_by_definition() -> dict[str, str]:
    pairs = (line.split() for line in sections()["files"])
    return {source: str(Path(target).relative_to("/src")) for source, target in pairs}


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is installed with the extra `test`")
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = run_program(HADOLINT, DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


def test_both_images_are_built_alike() -> None:
    assert copied_by_dockerfile() == copied_by_definition()
    arguments = dict(line.split("=") for line in sections()["arguments"])
    assert dict(re.findall(r"^ARG (\w+)=(\S+)", DOCKERFILE.read_text(), re.MULTILINE)) == arguments
    first, last = map(int, arguments["PYTHON"].split("."))
    assert f"Python :: {first}.{last}" in setup_cfg()["metadata"]["classifiers"]
    shell = re.sub(r"\{\{ (\w+) \}\}", r"${\1}", " ".join(sections()["post"]).replace(" \\ ", " "))
    install = re.search(r"^RUN (uv pip install .*)", DOCKERFILE.read_text(), re.MULTILINE)
    assert install is not None
    assert shlex.split(install[1]) == shlex.split(shell[shell.index("uv pip install") :])


def test_launch_container_accepts_the_apptainer_image(tmp_path: Path) -> None:
    [image] = set(re.findall(r"launch\.container: (\S+)`", DEFINITION.read_text()))
    assert f"apptainer build {image} docker/trainkit.def" in DEFINITION.read_text()
    (tmp_path / image).touch()
    launch = LaunchConfig(container=image)
    assert container_program(launch) == "apptainer"
    assert list(container_problems(launch, str(tmp_path))) == []
    # The ranks run `python3` of the image.
    assert sections()[""] == ["Bootstrap: docker", "From: python:{{ PYTHON }}-slim"]
    assert any(line.startswith("python3 ") for line in sections()["test"])
    assert set(sections()) == {"", "arguments", "files", "post", "environment", "runscript", "test"}


def test_the_conda_recipe() -> None:
    """rattler-build renders the recipe, which has the same requirements as setup.cfg."""
    rattler_build = pytest.importorskip("rattler_build", reason="installed with the extra `test`")
    [variant] = rattler_build.Stage0Recipe.from_file(RECIPE).render()
    recipe = variant.recipe.to_dict()
    config = setup_cfg()
    assert recipe["package"] == {"name": config["metadata"]["name"], "version": trainkit.__version__}
    assert recipe["about"]["summary"] == config["metadata"]["description"]
    scripts = config["options.entry_points"]["console_scripts"].strip()
    assert recipe["build"]["python"]["entry_points"] == [scripts]
    names = {"pytorch": "torch"}
    python, *others = recipe["requirements"]["run"]
    found = {}
    for line in others:
        name, _, limits = line.partition(" ")
        found[names.get(name, name)] = Requirement(f"{names.get(name, name)}{limits}")
    assert found == requirements()
    assert python == f"python {config['options']['python_requires']}"


def spack_range(requirement: Requirement) -> str:
    """Return a range of versions in Spack's notation, whose upper end is included."""
    limits = {one.operator: one.version for one in requirement.specifier}
    assert limits.keys() <= {">=", "<"}
    *above, last = limits.get("<", "").split(".")
    end = ".".join([*above, str(int(last) - 1)]) if last else ""
    return f"{limits['>=']}:{end}"


def test_the_spack_package() -> None:
    [kind] = (one for one in ast.parse(PACKAGE.read_text()).body if isinstance(one, ast.ClassDef))
    calls = [one.value for one in kind.body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)]
    needed = {}
    for call in calls:
        types = [ast.literal_eval(one.value) for one in call.keywords if one.arg == "type"]
        if ast.unparse(call.func) == "depends_on" and [one.arg for one in call.keywords] == ["type"]:
            name, _, versions = ast.literal_eval(call.args[0]).partition("@")
            if "run" in types[0]:
                needed[name.removeprefix("py-")] = versions
    assert needed.pop("python").startswith(setup_cfg()["options"]["python_requires"].removeprefix(">="))
    assert needed == {name: spack_range(one) for name, one in requirements().items()}
    assert ast.get_docstring(kind) == f"{setup_cfg()['metadata']['description']}."
