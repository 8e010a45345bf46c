"""Tests the environment of a submission, and which cluster slurm.conf names."""

import pytest

from trainkit.slurm.environment import cluster_name, conf_file, other_cluster, scrubbed

OWN_WORDS = """
HOME=/home/me PATH=/usr/bin SLURM_CONF=/etc/slurm.conf SLURM_CONF_SERVER=ctl:6817 SLURM_JWT=token
SLURM_CLUSTERS=west OMP_NUM_THREADS=4 NCCL_SOCKET_IFNAME=ib0 OMPI_MCA_btl_tcp_if_include=eth0
RANKING=mine SLURMISH=mine CUDA_VISIBLE_DEVICES=1
"""
OWN = dict(pair.split("=") for pair in OWN_WORDS.split())
INHERITED = """
SLURM_JOB_ID SLURM_PROCID SLURM_NTASKS_PER_NODE SLURM_EXPORT_ENV SLURM_EXIT_ERROR SLURMD_NODENAME
SBATCH_PARTITION SRUN_CPUS_PER_TASK SALLOC_QOS PMI_RANK PMIX_RANK PMI2_FD OMPI_COMM_WORLD_RANK
MV2_COMM_WORLD_RANK RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT
TORCHELASTIC_RUN_ID TRAINKIT_JOB_AGENT_PID TRAINKIT_JOB_RANK_PID
"""


def test_inside_a_job_and_on_a_login_node():
    kept = {name: value for name, value in OWN.items() if name != "CUDA_VISIBLE_DEVICES"}
    assert scrubbed({**OWN, **dict.fromkeys(INHERITED.split(), "7")}) == kept
    assert scrubbed(OWN) == OWN
    # The cluster that sbatch was given is the cluster of every command.
    assert scrubbed({"SBATCH_CLUSTERS": "east"}) == {"SLURM_CLUSTERS": "east"}
    assert scrubbed({"SBATCH_CLUSTERS": "east", "SLURM_CLUSTERS": "west"}) == {"SLURM_CLUSTERS": "west"}


CONFIGS = {
    "ClusterName=west\n": "west",
    "# ClusterName=old\nControlMachine=a\n  clustername = West # ours\n": "west",
    **dict.fromkeys(["SlurmctldHost=a\n", "MyClusterName=west\n", ""]),
}


@pytest.mark.parametrize("text", CONFIGS)
def test_name(tmp_path, text):
    file = tmp_path / "slurm.conf"
    assert cluster_name({"SLURM_CONF": str(file)}) is None  # it cannot be read
    file.write_text(text)
    assert conf_file({"SLURM_CONF": str(file)}) == file
    assert cluster_name({"SLURM_CONF": str(file)}) == CONFIGS[text]


def test_another_cluster_that_jobs_are_sent_to(tmp_path):
    """A job id means something on its own cluster only."""
    (tmp_path / "slurm.conf").write_text("ClusterName=west\n")
    here = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    one, several = {**here, "SLURM_CLUSTERS": "east"}, {**here, "SLURM_CLUSTERS": "north,east"}
    assert cluster_name({**here, "SBATCH_CLUSTERS": "east"}) == cluster_name(one) == "east"
    assert cluster_name(several) is None
    found = [other_cluster("east", each) for each in (here, one, several, {"PATH": ""})]
    assert found == ["east", None, "east", None]
    assert other_cluster("west", here) is other_cluster(None, here) is None


@pytest.mark.parametrize("place", ["etc/slurm.conf", "etc/slurm/slurm.conf"])
def test_the_file_of_a_slurm_below_a_prefix_of_its_own(tmp_path, place, monkeypatch):
    monkeypatch.setattr("trainkit.slurm.environment.CONFIG_FILES", ())
    names = ("slurm-24/bin/sbatch", "bin/sbatch", f"slurm-24/{place}")
    sbatch, link, file = (tmp_path / name for name in names)
    for each in (sbatch, link, file):
        each.parent.mkdir(parents=True)
    sbatch.touch(0o755)
    link.symlink_to(sbatch)
    assert conf_file({"PATH": str(link.parent)}) is None
    file.write_text("ClusterName=west\n")
    assert cluster_name({"PATH": str(link.parent)}) == "west"
