"""What a submission inherits, and what not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainkit.slurm.environment import KEPT, is_inherited, scrubbed

OWN = {
    "HOME": "/home/me",
    "PATH": "/usr/bin",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_CONF_SERVER": "ctl:6817",
    "SLURM_JWT": "token",
    "SLURM_CLUSTERS": "west",
    "OMP_NUM_THREADS": "4",
    "NCCL_SOCKET_IFNAME": "ib0",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "RANKING": "mine",
    "SLURMISH": "mine",
    "CUDA_VISIBLE_DEVICES": "1",
}
INHERITED = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_EXIT_ERROR": "5",
    "SLURMD_NODENAME": "n1",
    "SBATCH_PARTITION": "debug",
    "SRUN_CPUS_PER_TASK": "4",
    "SALLOC_QOS": "x",
    "PMI_RANK": "0",
    "PMIX_RANK": "0",
    "PMI2_FD": "3",
    "OMPI_COMM_WORLD_RANK": "0",
    "MV2_COMM_WORLD_RANK": "0",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "8",
    "NODE_RANK": "0",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}


def test_inside_a_job() -> None:
    kept = {name: value for name, value in OWN.items() if name != "CUDA_VISIBLE_DEVICES"}
    assert scrubbed({**OWN, **INHERITED}) == kept


def test_on_a_login_node_the_choice_of_gpus_is_the_users_own() -> None:
    assert scrubbed(OWN) == OWN


def test_the_cluster_that_sbatch_was_given_is_that_of_every_command() -> None:
    assert scrubbed({"SBATCH_CLUSTERS": "east"}) == {"SLURM_CLUSTERS": "east"}
    assert scrubbed({"SBATCH_CLUSTERS": "east", "SLURM_CLUSTERS": "west"}) == {"SLURM_CLUSTERS": "west"}


@given(st.dictionaries(st.sampled_from(sorted(OWN | INHERITED)), st.text()))
def test_scrubbing_twice_is_scrubbing_once(environ: dict[str, str]) -> None:
    clean = scrubbed(environ)
    assert scrubbed(clean) == clean
    assert not any(is_inherited(name) for name in clean)
    assert all(clean[name] == environ[name] for name in KEPT & environ.keys())
