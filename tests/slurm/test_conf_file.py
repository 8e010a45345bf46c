"""Which cluster slurm.conf names."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.slurm.environment import cluster_name, conf_file, other_cluster


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ClusterName=west\n", "west"),
        ("# ClusterName=old\nControlMachine=a\n  clustername = West # ours\n", "west"),
        ("SlurmctldHost=a\n", None),
        ("MyClusterName=west\n", None),
        ("", None),
    ],
)
def test_name(tmp_path: Path, text: str, name: str | None) -> None:
    file = tmp_path / "slurm.conf"
    file.write_text(text)
    assert conf_file({"SLURM_CONF": str(file)}) == file
    assert cluster_name({"SLURM_CONF": str(file)}) == name


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert cluster_name({"SLURM_CONF": str(tmp_path / "nope")}) is None


def test_another_cluster_that_jobs_are_sent_to(tmp_path: Path) -> None:
    file = tmp_path / "slurm.conf"
    file.write_text("ClusterName=west\n")
    environ = {"SLURM_CONF": str(file)}
    assert cluster_name({**environ, "SBATCH_CLUSTERS": "east"}) == "east"
    assert cluster_name({**environ, "SLURM_CLUSTERS": "north"}) == "north"
    assert cluster_name({**environ, "SLURM_CLUSTERS": "north,east"}) == "west"


@pytest.mark.parametrize("place", ["etc/slurm.conf", "etc/slurm/slurm.conf"])
def test_the_file_of_a_slurm_below_a_prefix_of_its_own(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.slurm.environment.CONFIG_FILES", ())
    sbatch, link = tmp_path / "slurm-24/bin/sbatch", tmp_path / "bin/sbatch"
    for file in (sbatch, link):
        file.parent.mkdir(parents=True)
    sbatch.write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    link.symlink_to(sbatch)
    assert conf_file({"PATH": str(link.parent)}) is None
    file = tmp_path / "slurm-24" / place
    file.parent.mkdir(parents=True)
    file.write_text("ClusterName=west\n")
    assert cluster_name({"PATH": str(link.parent)}) == "west"


def test_a_job_id_means_something_on_its_own_cluster(tmp_path: Path) -> None:
    file = tmp_path / "slurm.conf"
    file.write_text("ClusterName=west\n")
    here = {"SLURM_CONF": str(file)}
    assert other_cluster("west", here) is None
    assert other_cluster("east", here) == "east"
    assert other_cluster("east", {**here, "SLURM_CLUSTERS": "east"}) is None
    assert other_cluster("east", {**here, "SLURM_CLUSTERS": "north,east"}) is None
    assert other_cluster(None, here) is None
    assert other_cluster("east", {"PATH": ""}) is None
