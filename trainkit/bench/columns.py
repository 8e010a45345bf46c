"""The columns of summary.csv, each with what it says; light, for the help to show it."""

from __future__ import annotations

COLUMNS = {
    "layout": "as --layout takes it: degrees above 1, and what else was asked for",
    "dp_replicate": "degree",
    "dp_shard": "degree",
    "tp": "degree",
    "pp": "degree",
    "cp": "degree",
    "device_batch_size": "samples that a process reads at once",
    "pp_microbatches": "parts that these are cut into; empty without a pipeline",
    "steps": "steps that were measured: without those to warm up and those profiled",
    "samples_per_s": "of all processes; this and what follows is the median over these steps",
    "tokens_per_s": "of all processes",
    "tokens_per_s_per_gpu": "of one process where there are no GPUs",
    "mfu": "model FLOPs utilization, 0 to 1; empty where the peak of the device is not known, as of CPUs",
    "step_s": "seconds of an optimizer step",
    "data_wait_s": "seconds a step that waited for data, the mean over all ranks",
    "mem_gib_peak": "GiB at most, on rank 0 only: of its GPU, else resident memory of the process",
    "exposed_comm_s": "seconds a step that a rank waited for communication, with nothing to compute "
    "meanwhile: the mean over up to 4 ranks, in the last two steps, which the profiler slows; empty where no "
    "profile was written",
    "loss": "of the last step",
    "status": "finished, failed, or what else became of the run",
    "verdict": "what failed first; empty for what finished",
    "run": "its folder in that of the bench",
}
