"""The variables that jobs, steps and launchers set, and the environment without them."""

from __future__ import annotations

from collections.abc import Mapping

KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"})
"""Variables that select the cluster and authenticate; Slurm sets none of them inside a job."""
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
    """Whether a variable is set by an enclosing job, step or launcher rather than by the user."""
    return name not in KEPT and (name.startswith(_PREFIXES) or name in _RANK_NAMES)


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch and salloc, without an enclosing job's variables and without `SBATCH_*`.

    `SBATCH_*` would override the options in the script. Inside a job, its GPU binding is removed too.
    SBATCH_CLUSTERS becomes SLURM_CLUSTERS, which all commands understand.
    """
    is_in_job = "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ
    clean = {
        name: value
        for name, value in environ.items()
        if not is_inherited(name) and not (is_in_job and name in _DEVICES_OF_A_JOB)
    }
    if "SBATCH_CLUSTERS" in environ:
        clean.setdefault("SLURM_CLUSTERS", environ["SBATCH_CLUSTERS"])
    return clean
