"""Tests the installation of packages: which ones, the message if that is impossible, and skipped tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.support.said import said
from tools.slurm_cluster import packages

ROOT = Path(__file__).resolve().parents[2]
APT_GET = """#!/bin/sh
echo "$DEBIAN_FRONTEND $*" >> "$FAKE/log"
case "$*" in
    *update*) touch "$FAKE/has-lists" ;;
    *) [ -e "$FAKE/has-lists" ] || { echo "no lists"; exit 100; }
       cd "$FAKE"
       for name in ip nsenter unshare mount; do echo '#!/bin/sh' > $name; chmod +x $name; done ;;
esac
"""
ASK = """
def test_one(cluster): raise AssertionError("must not run")
def test_two(cluster): raise AssertionError("must not run")
def test_other(): pass
"""
NOBODY = "import os, sys; os.geteuid = lambda: 1000; import pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a machine of root without the programs of two packages, and with an apt-get that has them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {name for names in packages.PROGRAMS.values() for name in names}
    for name in programs - {"ip", "nsenter", "unshare", "mount"}:
        (folder / name).write_text("#!/bin/sh\n")
    (folder / "apt-get").write_text(APT_GET)
    for file in folder.iterdir():
        file.chmod(0o755)
    monkeypatch.setattr(packages, "path_with_sbin", lambda: f"{folder}:{tmp_path}/shell")
    monkeypatch.setattr(packages, "POLICY", folder / "policy-rc.d")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{folder}:{tmp_path}/shell")
    monkeypatch.setenv("FAKE", str(folder))
    # The fake apt-get itself needs a shell and these programs.
    (tmp_path / "shell").mkdir()
    for name in ("sh", "touch", "chmod"):
        (tmp_path / "shell" / name).symlink_to(f"/bin/{name}")
    return folder


def test_only_what_is_missing_is_installed_and_nothing_is_started(machine, capfd):
    assert packages.missing() == ["iproute2", "util-linux"]
    packages.install_missing()
    options = (
        "noninteractive --yes --quiet --no-install-recommends -o=Dpkg::Use-Pty=0 -o=DPkg::Lock::Timeout=60"
    )
    install = f"{options} install iproute2 util-linux"
    # The package lists are fetched only if the installation fails without them.
    assert (machine / "log").read_text().splitlines() == [install, f"{options} update", install]
    assert packages.missing() == []
    assert capfd.readouterr().err.startswith(
        "installing iproute2 util-linux, for the tests on a Slurm cluster\n"
    )
    assert not (machine / "policy-rc.d").exists()
    packages.install_missing()
    assert len((machine / "log").read_text().splitlines()) == 3


def test_daemons_are_forbidden_while_packages_are_installed(tmp_path):
    policy = tmp_path / "policy-rc.d"
    with packages.no_daemons_started(policy):
        assert subprocess.run([policy]).returncode == 101
    assert not policy.exists()
    policy.write_text("mine")
    with packages.no_daemons_started(policy):
        assert policy.read_text() == "mine"
    assert policy.read_text() == "mine"


def test_what_is_missing_is_named(machine, monkeypatch):
    (machine / "apt-get").unlink()
    with pytest.raises(packages.NotPossible) as error:
        packages.install_missing()
    said(str(error.value))
    said(error.value.hint)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(packages.NotPossible, match="only root can create the namespaces of its hosts"):
        packages.require()


def pytest_as_nobody(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_ask.py").write_text(ASK)
    options = ["-p", "tools.slurm_cluster.plugin", "-p", "no:cacheprovider", "-q", "-rs"]
    options += ["-c", f"{ROOT}/pyproject.toml"]
    return run_program(
        *(sys.executable, "-c", NOBODY, *options, *args, str(folder)),
        cwd=ROOT,
        env={**{name: value for name, value in os.environ.items() if name != "CI"}, **env},
    )


def test_without_root_one_loud_line_and_in_ci_a_failure(tmp_path):
    done = pytest_as_nobody(tmp_path)
    why = "only root can create the namespaces of its hosts"
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"NOTHING WAS TESTED ON SLURM: {why} (run this as root)\n" in done.stdout
    assert done.stdout.count("SKIPPED") == 1
    assert "SKIPPED [2] tools/slurm_cluster/plugin.py" in done.stdout
    assert "1 passed, 2 skipped" in done.stdout
    done = pytest_as_nobody(tmp_path, CI="true")
    assert done.returncode == 1
    assert f"CI=true requires the Slurm tests, but no cluster can run: {why}" in done.stdout
    assert "1 passed, 2 errors" in done.stdout


def test_fast_tests_start_no_cluster(tmp_path):
    done = pytest_as_nobody(tmp_path, "-m", "not slow", CI="true")
    assert (done.returncode, "1 passed, 2 deselected" in done.stdout) == (0, True), done.stdout
