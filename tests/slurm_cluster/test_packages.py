"""Tests the installation of packages and of other versions of Slurm, and skipped tests."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tools.slurm_cluster import packages, releases

ROOT = Path(__file__).resolve().parents[2]
APT_GET = """#!/bin/sh
echo "$*" >> "$FAKE/log"
case "$*" in
    *indextargets*) echo Debian http://mirror.example/debian/ ;;
    *Dir::*) exit 100 ;;
    *update*) : > "$FAKE/has-lists" ;;
    *) [ -e "$FAKE/has-lists" ] || exit 100; echo '#!/bin/sh' > "$FAKE/ip"; /bin/chmod +x "$FAKE/ip" ;;
esac
"""
ASK = """
def test_one(cluster): raise AssertionError("must not run")
def test_two(cluster): raise AssertionError("must not run")
def test_other(): pass
"""
NOBODY = "import os, sys; os.geteuid = lambda: 1000; import pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("ci", "code", "counts"), [("", 0, "1 passed, 2 skipped"), ("true", 1, "1 passed, 2 errors")]
)
def test_without_root_one_loud_line_and_in_ci_a_failure(tmp_path, ci, code, counts):
    (tmp_path / "test_ask.py").write_text(ASK)
    options = ["-p", "tools.slurm_cluster.plugin", "-p", "no:cacheprovider", "-q", "-rs"]
    argv = [sys.executable, "-c", NOBODY, *options, "-c", f"{ROOT}/pyproject.toml", str(tmp_path)]
    done = run_program(*argv, cwd=ROOT, env={**os.environ, "CI": ci})
    assert done.returncode == code, done.stdout + done.stderr
    assert counts in done.stdout
    assert done.stdout.count("NOTHING WAS TESTED ON SLURM: ") == done.stdout.count("SKIPPED") == (not ci)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a machine of root with Slurm 23.02, without `ip`, and with an apt-get that has `ip`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in {name for names in packages.PROGRAMS.values() for name in names} - {"ip"}:
        (folder / name).write_text("#!/bin/sh\necho slurm-wlm 23.02.7\n")
    (folder / "apt-get").write_text(APT_GET)
    for file in folder.iterdir():
        file.chmod(0o755)
    monkeypatch.setattr(packages, "path_with_sbin", lambda: str(folder))
    monkeypatch.setattr(packages, "POLICY", folder / "policy-rc.d")
    monkeypatch.setattr(releases, "path_with_sbin", lambda: str(folder))
    monkeypatch.setattr(releases, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE", str(folder))
    return folder


def test_what_is_missing_is_installed(machine):
    assert packages.missing() == ["iproute2"]
    packages.install_missing()
    # The package lists are fetched only if the installation fails without them.
    calls = [line.split()[-1] for line in (machine / "log").read_text().splitlines()]
    assert (calls, packages.missing()) == (["iproute2", "update", "iproute2"], [])


def test_a_download_of_another_version_that_fails_leaves_nothing(machine):
    assert releases.find(None) is releases.find("23.02") is None, "it is installed"
    with pytest.raises(packages.NotPossible) as error:
        releases.find("24.11")
    assert error.value.hint == releases.MIRROR
    assert [path.name for path in releases.CACHE.iterdir()] == ["lock"]
    (releases.CACHE / "slurm-24.11").mkdir()
    assert releases.find("24.11") == releases.CACHE / "slurm-24.11", "it is not unpacked again"
