"""Tests the installation of packages: which ones, the message if that is impossible, and skipped tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.support.said import said
from tools.slurm_cluster import packages, releases

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


def test_only_what_is_missing_is_installed_and_nothing_is_started(machine):
    assert packages.missing() == ["iproute2", "util-linux"]
    packages.install_missing()
    calls = [line.split() for line in (machine / "log").read_text().splitlines()]
    # The package lists are fetched only if the installation fails without them.
    assert [call[-3:] for call in calls[::2]] == [["install", "iproute2", "util-linux"]] * 2
    assert calls[1][-1] == "update"
    assert (packages.missing(), (machine / "policy-rc.d").exists()) == ([], False)
    with packages.no_daemons_started(machine / "policy-rc.d"):
        assert subprocess.run([machine / "policy-rc.d"]).returncode == 101
    packages.install_missing()
    assert len((machine / "log").read_text().splitlines()) == 3


def test_what_is_missing_is_named(machine, monkeypatch):
    (machine / "apt-get").unlink()
    with pytest.raises(packages.NotPossible) as error:
        packages.install_missing()
    said(str(error.value))
    said(error.value.hint)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(packages.NotPossible, match="only root can create the namespaces of its hosts"):
        packages.require()


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


def test_a_download_of_another_version_that_fails_is_named_and_leaves_nothing(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(releases, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(releases, "path_with_sbin", lambda: str(machine))
    monkeypatch.setenv("PATH", f"{machine}:/usr/bin:/bin")
    for name, text in (
        ("slurmctld", "echo slurm-wlm 23.02.7"),
        (
            "apt-get",
            'case "$*" in *indextargets*) echo Debian http://mirror.example/debian/ ;; *) exit 100 ;; esac',
        ),
    ):
        (machine / name).write_text(f"#!/bin/sh\n{text}\n")
        (machine / name).chmod(0o755)
    assert releases.find(None) is releases.find("23.02") is None, "it is installed"
    assert not releases.CACHE.exists()
    with pytest.raises(packages.NotPossible) as error:
        releases.find("24.11")
    assert error.value.hint == releases.MIRROR
    assert [path.name for path in releases.CACHE.iterdir()] == ["lock"]
    with pytest.raises(packages.NotPossible, match=r"Slurm 21\.08"):
        releases.find("21.08")
    (releases.CACHE / "slurm-24.11").mkdir()
    assert releases.find("24.11") == releases.CACHE / "slurm-24.11", "it is not unpacked again"
