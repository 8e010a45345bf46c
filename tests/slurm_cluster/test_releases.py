"""Tests that another version of Slurm is unpacked once, and that a failure is explained."""

from pathlib import Path

import pytest

from tools.slurm_cluster import releases
from tools.slurm_cluster.packages import NotPossible

APT_GET = """#!/bin/sh
echo "$*" >> "$FAKE/log"
case "$*" in
    *indextargets*) cat "$FAKE/targets" ;;
    *update*) echo "E: there is no such release" >&2; exit 100 ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a machine with Slurm 23.02, an empty cache, and an apt-get that finds no release."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apt-get").write_text(APT_GET)
    (folder / "slurmctld").write_text("#!/bin/sh\necho slurm-wlm 23.02.7\n")
    (folder / "targets").write_text("Other http://other.example/\nDebian http://mirror.example/debian/\n")
    for file in folder.iterdir():
        file.chmod(0o755)
    monkeypatch.setattr(releases, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(releases, "path_with_sbin", lambda: str(folder))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE", str(folder))
    return folder


def test_the_installed_version_needs_no_packages(machine):
    assert releases.find(None) is None
    assert releases.find("23.02") is None
    assert not releases.is_installed("24.11")
    assert not releases.CACHE.exists()
    (machine / "slurmctld").unlink()
    assert not releases.is_installed("23.02")
    assert releases.is_installed(None)


def test_a_download_that_fails_is_named_and_leaves_nothing(machine):
    with pytest.raises(NotPossible, match="there is no such release") as error:
        releases.find("24.11")
    assert error.value.hint == releases.MIRROR
    assert [path.name for path in releases.CACHE.iterdir()] == ["lock"]
    with pytest.raises(NotPossible, match=r"Slurm 21\.08"):
        releases.find("21.08")
    (releases.CACHE / "slurm-24.11").mkdir()
    assert releases.find("24.11") == releases.CACHE / "slurm-24.11", "it is not unpacked again"


def test_every_part_of_the_cluster_is_of_the_version(cluster, slurm_version):
    programs = ("sbatch", "srun", "scontrol", "sacct", "slurmd")
    shown = [cluster.run([name, "-V"], check=True).stdout for name in programs]
    shown += cluster.run(["srun", "-N4", "srun", "-V"], check=True).stdout.splitlines(keepends=True)
    assert len(set(shown)) == 1, shown
    assert slurm_version is None or shown[0].startswith(f"slurm-wlm {slurm_version}.")
