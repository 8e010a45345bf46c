"""Which cluster slurm.conf names."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.slurm.conf_file import cluster_name, conf_file


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
