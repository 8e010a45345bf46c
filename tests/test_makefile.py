"""Tests `make` and the environment that it creates, with small scripts as Python and apt-get."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.support.said import said
from tools import demo

ROOT = Path(__file__).resolve().parents[1]
# Replaces the Python of the machine and, copied by its `-m venv`, the Python of .venv.
FAKE_PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >> "$FAKE/log"
case "$*" in
    *print*) cat "$FAKE/version" ;;
    *'sys.exit'*) [ "$(cat "$FAKE/version")" != 3.9 ] ;;
    *'import ensurepip'*) [ -e "$FAKE/has-ensurepip" ] ;;
    '-m venv '*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/has-pip" "$3/pyvenv.cfg" ;;
    '-m pip --version') [ -e "$(dirname "$0")/../has-pip" ] ;;
    '-m ensurepip') exit 1 ;;
    '-m pip install '*) [ ! -e "$FAKE/no-network" ] ;;
esac
"""
FAKE_APT_GET = '#!/bin/sh\necho "apt-get $*" >> "$FAKE/log"\ntouch "$FAKE/has-ensurepip"\n'
FAKE_ID = '#!/bin/sh\ncat "$FAKE/user"\n'


class Checkout:
    """The files that create an environment, on a machine of small scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a b;'$(x)"
        self.fake = folder / "fake"
        self.fake.mkdir()
        files = ".ci/make-venv constraints.txt constraints-oldest.txt setup.cfg pyproject.toml"
        for name in files.split():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        for name, text in (("python3", FAKE_PYTHON), ("apt-get", FAKE_APT_GET), ("id", FAKE_ID)):
            (self.fake / name).write_text(text)
            (self.fake / name).chmod(0o755)
        self.set(version="3.11", user="1000", has_ensurepip="")

    def set(self, **state: str) -> None:
        """Change the values that the scripts read."""
        for name, text in state.items():
            (self.fake / name.replace("_", "-")).write_text(text)

    def make_venv(self, *extra: str, **env: str) -> subprocess.CompletedProcess[str]:
        self.set(log="")
        environ = {"PATH": f"{self.fake}:/usr/bin:/bin", "FAKE": str(self.fake), **env}
        return run_program(str(self.folder / ".ci/make-venv"), *extra, cwd="/", env=environ)

    def refused(self, *extra: str, **env: str) -> str:
        done = self.make_venv(*extra, **env)
        assert done.returncode == 2
        return done.stderr

    def installs(self) -> list[str]:
        lines = (self.fake / "log").read_text().splitlines()
        return [line.rpartition(" ")[2] for line in lines if "pip install" in line]

    def made_venv(self) -> bool:
        return "-m venv" in (self.fake / "log").read_text()

    def made(self, *extra: str) -> tuple[list[str], bool]:
        """Return what a successful call installs, and whether it makes an environment."""
        done = self.make_venv(*extra)
        assert done.returncode == 0, done.stderr
        return self.installs(), self.made_venv()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("place", [(), ("disk 2/oldest", "constraints-oldest.txt")])
def test_installs_once_and_again_when_an_input_changes(checkout: Checkout, place: tuple[str, ...]) -> None:
    base, tests = ".[tensorboard,watch]", ".[tensorboard,watch,test]"
    folder, constraints = place or (".venv", "constraints.txt")
    typed = ("test", *([str(checkout.folder.parent / folder), constraints] if place else []))
    assert checkout.made() == ([base], True)
    assert checkout.made(*typed) == ([tests], bool(place))
    *_, pip, compiles = (checkout.fake / "log").read_text().splitlines()
    options = shlex.split(pip.partition(" -m pip install ")[2])
    assert options == [
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
        "-c",
        constraints,
        "-e",
        tests,
    ]
    assert compiles.startswith("python -m compileall ")
    for again in ((), typed):
        assert checkout.made(*again) == ([], False)
    with (checkout.folder / constraints).open("a") as stream:
        stream.write("numpy==2.0\n")
    assert checkout.made() == ([] if place else [base], False)
    assert checkout.made(*typed) == ([tests], False)


def test_interrupted_install_is_not_taken_for_a_finished_one(checkout: Checkout) -> None:
    for text in ("first", "changed"):  # the first install, and an update
        (checkout.folder / "setup.cfg").write_text(f"{text}\n")
        checkout.set(no_network="")
        assert checkout.make_venv("test").returncode == 1
        (checkout.folder / ".venv" / "half").touch()
        (checkout.fake / "no-network").unlink()
        done = checkout.make_venv("test")
        said(done.stdout.splitlines()[0])
        assert (done.returncode, checkout.made_venv()) == (0, True)
        assert checkout.installs() == [".[tensorboard,watch,test]"]
        assert not (checkout.folder / ".venv" / "half").exists()
        assert checkout.make_venv("test").stdout == ""


@pytest.mark.parametrize("target", [".venv-docs", ".venv-dist"])
def test_an_interrupted_environment_of_the_makefile_is_installed_again(tmp_path: Path, target: str) -> None:
    requirements = {".venv-docs": "docs/requirements.txt", ".venv-dist": "tools/dist-requirements.txt"}[
        target
    ]
    for name in ("Makefile", requirements):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python, pip = tmp_path / "python3", tmp_path / "pip"
    python.write_text(f'#!/bin/sh\nmkdir -p "$4/bin" && cp "{pip}" "$4/bin/pip"\n')
    python.chmod(0o755)

    def make(pip_exits_with: int) -> tuple[int, bool]:
        pip.write_text(f"#!/bin/sh\ntouch installs\nexit {pip_exits_with}\n")
        pip.chmod(0o755)
        (tmp_path / "installs").unlink(missing_ok=True)
        done = run_program("make", target, cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
        return done.returncode, (tmp_path / "installs").exists()

    assert make(1) == (2, True)
    assert make(0) == (0, True)
    assert make(0) == (0, False)
    os.utime(tmp_path / requirements, (2**31, 2**31))
    assert make(0) == (0, True)


@pytest.mark.parametrize(
    ("files", "is_kept"), [([], False), (["python3"], False), (["python3", "has-pip", "mine"], True)]
)
def test_a_venv_without_pip_is_made_again(checkout: Checkout, files: list[str], is_kept: bool) -> None:
    """An environment that was made by hand is kept."""
    (checkout.folder / ".venv/bin").mkdir(parents=True)
    for name in files:
        (checkout.fake / name).touch()
        place = "bin/python" if name == "python3" else name
        shutil.copy(checkout.fake / name, checkout.folder / ".venv" / place)
    assert checkout.made() == ([".[tensorboard,watch]"], not is_kept)
    assert (checkout.folder / ".venv/mine").exists() == is_kept


def test_missing_venv_module_is_installed_by_root_only(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.fake / "has-ensurepip").unlink()
    checkout.set(user="0")
    # Only the Python of the distribution gets the distribution's packages.
    said(checkout.refused())
    script = checkout.folder / ".ci/make-venv"
    script.write_text(script.read_text().replace("^(/usr)?/bin/", f"^{checkout.fake}/"))
    checkout.set(user="1000")
    said(checkout.refused())
    checkout.set(user="0")
    done = checkout.make_venv()
    assert done.returncode == 0, done.stderr
    assert "apt-get update\napt-get install -y python3.11-venv\n" in (checkout.fake / "log").read_text()


def test_python_that_is_too_old_or_not_there(checkout: Checkout) -> None:
    checkout.set(version="3.9")
    said(checkout.refused())
    said(checkout.refused(PYTHON="python9"))
    assert not (checkout.folder / ".venv").exists()


def test_another_python_than_that_of_the_venv_is_refused(checkout: Checkout) -> None:
    checkout.make_venv()
    other = checkout.fake / "python3.12"
    other.write_text("#!/bin/sh\necho 3.12\n")
    other.chmod(0o755)
    said(checkout.refused(PYTHON="python3.12"))
    assert checkout.make_venv(PYTHON="python3").returncode == 0


def test_a_folder_of_something_else_is_kept(checkout: Checkout) -> None:
    data = checkout.folder.parent / "data"
    data.mkdir()
    (data / "mine").touch()
    said(checkout.refused("test", str(data), "constraints-oldest.txt"))
    assert list(data.iterdir()) == [data / "mine"]


def make(*args: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = run_program("make", *args, cwd=ROOT, env=env, check=True)
    return done.stdout


def test_make_alone_lists_the_targets() -> None:
    targets = [line.split()[1] for line in make().splitlines()]
    tests = "test test-all test-fast test-changed test-oldest test-newest"
    others = "docs docs-serve dist lint parity bench gpu cluster lock clean"
    assert targets == f"help demo {tests} {others}".split()
    assert make("help") == make()


def test_demo_needs_the_package_alone() -> None:
    recipe = make("--dry-run", "demo").splitlines()
    assert recipe == [".ci/make-venv", ".venv/bin/python -m tools.demo"]


@pytest.mark.parametrize("release", ["oldest", "newest"])
def test_the_ends_of_torch_are_tested_in_folders_of_their_own(release: str) -> None:
    install, *tests = make("--dry-run", f"test-{release}", f"{release.upper()}=/scratch/a b").splitlines()
    assert install == f'.ci/make-venv test "/scratch/a b" constraints-{release}.txt'
    [run] = "".join(tests).replace("\\", " ").split("\n")
    assert run.startswith('"/scratch/a b/bin/python" -m pytest ')
    files = [word for word in run.split() if word.startswith("tests/")]
    assert "tests/trainer" in files
    assert [name for name in files if not (ROOT / name).exists()] == []


TRAINER = """
import json, os, time
from pathlib import Path

run, attempt = Path(os.environ["TRAINKIT_JOB_RUN_DIR"]), int(os.environ["TRAINKIT_JOB_ATTEMPT"])
saved = run / "checkpoints"
saved.mkdir(exist_ok=True)
first = max((int(path.name[5:]) for path in saved.iterdir()), default=0)
for step in range(first + 1, 49) if os.environ["RANK"] == "0" else ():
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": step, "loss": 1 / step, "attempt": attempt}) + chr(10))
    if step % 12 == 0:
        (saved / f"step-{step:08}").mkdir()
    if (step, attempt, run.name) == (20, 1, "quickstart-2"):
        time.sleep(600)  # until it is killed
"""


@pytest.mark.slow
def test_demo_kills_a_run_and_shows_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replace the training by a script; `test_docs.py` trains with the same commands of the README."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    trainkit = tmp_path / "trainkit"
    driver = [sys.executable, str(ROOT / "tests/cli/driver.py"), str(tmp_path / "trainer.py")]
    trainkit.write_text(f'#!/bin/sh\nexec {shlex.join(driver)} "$@"\n')
    trainkit.chmod(0o755)
    monkeypatch.setattr(demo, "TRAINKIT", trainkit)
    monkeypatch.chdir(tmp_path)
    demo.main()
    shown = capsys.readouterr().out
    assert ["20", "13"] in [re.findall(r"\d+", line) for line in shown.splitlines()]
    table = re.findall(r"^ +(\d+) +(\S+) +(\S+)$", shown, re.MULTILINE)
    assert table == [(str(step), repr(1 / step), repr(1 / step)) for step in range(1, 49)]


def test_all_tests_are_all() -> None:
    assert chosen("test-fast") == "not slow"
    assert chosen("test") == "not slow or smoke"
    assert chosen("test-all") is None
    [lint] = {line for line in make("--dry-run", "test-all").splitlines() if line.endswith(" -m mypy")}
    assert lint in make("--dry-run", "test")


def chosen(target: str) -> str | None:
    """Return the `-m` selection of a target's pytest. None selects everything."""
    [line] = [line for line in make("--dry-run", target).splitlines() if "--numprocesses" in line]
    return line.partition(' -m "')[2].rstrip('"') or None


@pytest.mark.parametrize("code", [0, 2])
def test_ci_runs_all_tests_and_fails_as_they_do(tmp_path: Path, code: int) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "make $* in $PWD"\nexit {code}\n')
    (tmp_path / "make").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run_program(tmp_path / ".ci/run", env=environ, cwd="/")
    assert (done.stdout, done.returncode) == (f"make test-all in {tmp_path}\n", code)
