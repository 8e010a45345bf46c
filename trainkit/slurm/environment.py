"""What a submission must not inherit: a job that is submitted from inside another one is a job of its own."""

from __future__ import annotations

from collections.abc import Mapping

KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"})
"""Which cluster is meant and how to get in. Slurm sets none of them inside a job."""
_PREFIXES = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SPANK_"),
    *("PMI_", "PMI2_", "PMIX_", "PALS_", "TORCHELASTIC_"),
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_MCA_ess", "OMPI_MCA_orte_", "PRTE_", "ORTE_"),
    *("MV2_COMM_WORLD_", "MPI_LOCAL"),
)
_RANK_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *(
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "ROLE_RANK",
            "ROLE_WORLD_SIZE",
            "ROLE_NAME",
            "CROSS_RANK",
            "CROSS_SIZE",
        ),
    }
)
_DEVICES_OF_A_JOB = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
    }
)


def is_inherited(name: str) -> bool:
    """Whether a variable belongs to the job, step or launcher around us, and not to the user."""
    return name not in KEPT and (name.startswith(_PREFIXES) or name in _RANK_NAMES)


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch and salloc: without another job's variables and without `SBATCH_*`.

    `SBATCH_*` would beat the lines of the script: what is shown would not be what runs. The GPUs that the job
    around us was bound to go too. SBATCH_CLUSTERS becomes SLURM_CLUSTERS, which every command understands.
    """
    inside_a_job = "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ
    clean = {
        name: value
        for name, value in environ.items()
        if not is_inherited(name) and not (inside_a_job and name in _DEVICES_OF_A_JOB)
    }
    if "SBATCH_CLUSTERS" in environ:
        clean.setdefault("SLURM_CLUSTERS", environ["SBATCH_CLUSTERS"])
    return clean
