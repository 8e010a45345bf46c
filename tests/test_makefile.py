"""`make` and the environment that it makes, with small scripts in the place of Python and apt-get."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Stands for the Python of the machine and, copied by its own `-m venv`, for that of .venv.
FAKE_PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >> "$FAKE/log"
case "$*" in
    *print*) cat "$FAKE/version" ;;
    *'sys.exit'*) [ "$(cat "$FAKE/version")" != 3.9 ] ;;
    *'import ensurepip'*) [ -e "$FAKE/has-ensurepip" ] ;;
    '-m venv '*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/has-pip" ;;
    '-m pip --version') [ -e .venv/has-pip ] ;;
    '-m ensurepip') exit 1 ;;
    '-m pip install '*) touch .venv/installed && [ ! -e "$FAKE/no-network" ] ;;
esac
"""
FAKE_APT_GET = '#!/bin/sh\necho "apt-get $*" >> "$FAKE/log"\ntouch "$FAKE/has-ensurepip"\n'
FAKE_ID = '#!/bin/sh\ncat "$FAKE/user"\n'


class Checkout:
    """The files that make an environment, on a machine of small scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a b;'$(x)"
        self.fake = folder / "fake"
        self.fake.mkdir()
        for name in (".ci/make-venv", "constraints.txt", "setup.cfg", "pyproject.toml"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        for name, text in (("python3", FAKE_PYTHON), ("apt-get", FAKE_APT_GET), ("id", FAKE_ID)):
            (self.fake / name).write_text(text)
            (self.fake / name).chmod(0o755)
        self.set(version="3.11", user="1000", has_ensurepip="")

    def set(self, **state: str) -> None:
        """Change what the scripts see."""
        for name, text in state.items():
            (self.fake / name.replace("_", "-")).write_text(text)

    def make_venv(self, *extra: str, **env: str) -> subprocess.CompletedProcess[str]:
        self.set(log="")
        environ = {"PATH": f"{self.fake}:/usr/bin:/bin", "FAKE": str(self.fake), **env}
        return subprocess.run(
            [str(self.folder / ".ci/make-venv"), *extra],
            cwd="/",
            env=environ,
            capture_output=True,
            text=True,
            timeout=30,
        )

    def installs(self) -> list[str]:
        lines = (self.fake / "log").read_text().splitlines()
        return [line.rpartition(" ")[2] for line in lines if "pip install" in line]

    def made_venv(self) -> bool:
        return "-m venv" in (self.fake / "log").read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_installs_once_and_again_when_an_input_changes(checkout: Checkout) -> None:
    done = checkout.make_venv()
    assert (done.returncode, checkout.installs()) == (0, ["."]), done.stderr
    log = (checkout.fake / "log").read_text()
    assert "python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ." in log
    assert checkout.make_venv().returncode == 0
    assert checkout.installs() == []
    assert checkout.make_venv("test").returncode == 0
    assert (checkout.installs(), checkout.made_venv()) == ([".[test]"], False)
    for extra in ((), ("test",)):
        assert checkout.make_venv(*extra).returncode == 0
        assert checkout.installs() == []
    with (checkout.folder / "constraints.txt").open("a") as stream:
        stream.write("numpy==2.0\n")
    assert checkout.make_venv().returncode == 0
    assert (checkout.installs(), checkout.made_venv()) == (["."], False)
    assert checkout.make_venv("test").returncode == 0
    assert checkout.installs() == [".[test]"]


def test_interrupted_install_is_not_taken_for_a_finished_one(checkout: Checkout) -> None:
    checkout.set(no_network="")
    assert checkout.make_venv("test").returncode == 1
    (checkout.folder / ".venv" / "half").touch()
    (checkout.fake / "no-network").unlink()
    done = checkout.make_venv("test")
    assert done.stdout.startswith(".venv was never finished: making it again\n")
    assert (done.returncode, checkout.installs()) == (0, [".[test]"])
    assert not (checkout.folder / ".venv" / "half").exists()
    assert checkout.make_venv("test").stdout == ""


def test_interrupted_update_is_started_afresh(checkout: Checkout) -> None:
    checkout.make_venv()
    checkout.set(no_network="")
    (checkout.folder / "setup.cfg").write_text("changed\n")
    assert checkout.make_venv().returncode == 1
    (checkout.fake / "no-network").unlink()
    assert checkout.make_venv().returncode == 0
    assert checkout.made_venv()


@pytest.mark.parametrize("files", [[], ["bin/python"]])
def test_venv_without_pip_is_made_again(checkout: Checkout, files: list[str]) -> None:
    (checkout.folder / ".venv/bin").mkdir(parents=True)
    for name in files:
        shutil.copy(checkout.fake / "python3", checkout.folder / ".venv" / name)
    assert checkout.make_venv().returncode == 0
    assert checkout.made_venv()
    assert checkout.installs() == ["."]


def test_venv_made_by_hand_is_kept(checkout: Checkout) -> None:
    (checkout.folder / ".venv/bin").mkdir(parents=True)
    shutil.copy(checkout.fake / "python3", checkout.folder / ".venv/bin/python")
    for name in ("has-pip", "mine"):
        (checkout.folder / ".venv" / name).touch()
    assert checkout.make_venv().returncode == 0
    assert (checkout.made_venv(), checkout.installs()) == (False, ["."])
    assert (checkout.folder / ".venv/mine").exists()


def test_missing_venv_module_is_installed_by_root_only(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.fake / "has-ensurepip").unlink()
    checkout.set(user="0")
    # Only the Python of the distribution gets a package of the distribution.
    done = checkout.make_venv()
    assert (done.returncode, done.stderr) == (
        2,
        "error: python3 cannot make a virtual environment: its module ensurepip is missing\n\n"
        "hint: take another Python: PYTHON=/usr/bin/python3 make demo\n",
    )
    script = checkout.folder / ".ci/make-venv"
    script.write_text(script.read_text().replace("^(/usr)?/bin/", f"^{checkout.fake}/"))
    checkout.set(user="1000")
    done = checkout.make_venv()
    assert (done.returncode, done.stderr) == (
        2,
        "error: python3 cannot make a virtual environment: python3.11-venv is missing\n\n"
        "hint: type: sudo sh -c 'apt-get update && apt-get install -y python3.11-venv'\n",
    )
    checkout.set(user="0")
    done = checkout.make_venv()
    assert done.returncode == 0, done.stderr
    assert "apt-get update\napt-get install -y python3.11-venv\n" in (checkout.fake / "log").read_text()


def test_python_that_is_too_old_or_not_there(checkout: Checkout) -> None:
    checkout.set(version="3.9")
    done = checkout.make_venv()
    assert (done.returncode, done.stderr) == (
        2,
        "error: python3 is Python 3.9, and trainkit needs 3.10 or newer\n\n"
        "hint: name a newer one: PYTHON=/path/to/python3 make demo\n",
    )
    done = checkout.make_venv(PYTHON="python9")
    assert (done.returncode, done.stderr) == (
        2,
        "error: there is no python9\n\n"
        "hint: install Python 3.10 or newer, or name one: PYTHON=/path/to/python3 make demo\n",
    )
    assert not (checkout.folder / ".venv").exists()


def test_another_python_than_that_of_the_venv_is_refused(checkout: Checkout) -> None:
    checkout.make_venv()
    other = checkout.fake / "python3.12"
    other.write_text("#!/bin/sh\necho 3.12\n")
    other.chmod(0o755)
    done = checkout.make_venv(PYTHON="python3.12")
    assert (done.returncode, done.stderr) == (
        2,
        "error: you asked for python3.12, and .venv is of Python 3.11\n\n"
        "hint: `make clean` removes it; then try again\n",
    )
    assert checkout.make_venv(PYTHON="python3").returncode == 0


def make(*args: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", *args], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_make_alone_lists_what_can_be_made() -> None:
    targets = [line.split()[1] for line in make().splitlines()]
    assert targets == ["help", "demo", "test", "test-fast", "lint", "parity", "bench", "cluster", "clean"]
    assert make("help") == make()


def test_demo_is_the_quickstart_on_two_nodes() -> None:
    recipe = make("--dry-run", "demo").splitlines()
    assert recipe[0] == ".ci/make-venv"
    assert recipe[1] == ".venv/bin/trainkit submit configs/quickstart.yaml --nodes 2 --follow"


def test_ci_runs_all_tests() -> None:
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test"
    tests = ".venv/bin/python -m pytest --numprocesses 2 --dist loadgroup"
    assert tests in make("--dry-run", "test").splitlines()
