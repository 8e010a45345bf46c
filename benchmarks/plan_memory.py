"""Compare the memory that `trainkit plan` predicts with the peak that torch's MemTracker measures.

    python -m benchmarks.plan_memory [--only MODEL …]

The models have their full size, and each model has its own layout on 1 to 512 GPUs. One rank at a time runs
two steps of the trainer under MemTracker, with tensors that have shapes but no values (`trainkit check
--simulate-world`). The benchmark compares the peak of the second step. With pipeline parallelism, the
benchmark simulates the ranks that `plan` considers, and compares the highest peak of the simulation with the
highest peak of the plan. Both the plan and the simulation assume the CPU kernels, which need more memory than
GPU kernels. A difference of more than 10 % is a failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainkit.capabilities.simulation.simulated_job import simulate, simulated_plan
from trainkit.config import LoadedConfig, load_config
from trainkit.plan.launch import LaunchPlan, Layout
from trainkit.plan.memory import extreme_ranks, memory_of
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.plan.step_work import StepWork, work_of

TOLERANCE = 0.1
GIB = 2**30
NAMES = {"pp": "pp", "dp_replicate": "replicate", "dp_shard": "shard", "cp": "cp", "tp": "tp", "ep": "ep"}


@dataclass(frozen=True)
class Pair:
    """A model and a layout."""

    model: str
    gpus: int
    parallel: dict[str, object]
    """Values of the config section `parallel`."""
    samples: int = 1
    """Number of samples per microbatch."""
    passes: int = 1
    """Number of microbatches per step."""
    seq_len: int = 4096
    dtype: str = "bf16"
    options: tuple[str, ...] = ()

    def load(self) -> LoadedConfig:
        """Return the loaded config of this pair."""
        parallel = {"activation_checkpointing": "none", **self.parallel}
        degrees = [int(str(parallel.get(name, 1))) for name in ("tp", "pp", "cp")]
        ranks = self.gpus // (degrees[0] * degrees[1] * degrees[2])
        values = {
            "model.preset": self.model,
            "data.seq_len": self.seq_len,
            "train.device_batch_size": self.samples,
            "train.global_batch_size": self.samples * self.passes * ranks,
            "precision.dtype": self.dtype,
            **{f"parallel.{key}": value for key, value in parallel.items()},
        }
        overrides = [*(f"{key}={value}" for key, value in values.items()), *self.options]
        return load_config(None, overrides=overrides, environ={}, cwd=Path.cwd())


PAIRS = [
    Pair("350m", 8, {"dp_replicate": 8, "dp_shard": 1}, samples=4, passes=2, seq_len=2048, dtype="fp32"),
    Pair(
        "8b", 1, {"activation_checkpointing": "selective"}, passes=2, options=("optimizer.state_dtype=bf16",)
    ),
    Pair("8b", 8, {}, seq_len=8192),
    Pair("7b", 8, {}),
    Pair("7b", 8, {"activation_checkpointing": "full"}, samples=2, passes=4),
    Pair("7b", 16, {"pp": 4, "pp_schedule": "zbv", "pp_microbatches": 8}, samples=8),
    Pair("7b", 64, {"dp_replicate": 8, "dp_shard": 8, "activation_checkpointing": "selective"}, samples=2),
    Pair("13b", 16, {"tp": 8}, samples=2),
    Pair("13b", 32, {"cp": 4, "activation_checkpointing": "full"}, seq_len=16_384),
    Pair("13b", 64, {"pp": 4, "tp": 4, "pp_schedule": "interleaved_1f1b", "pp_microbatches": 8}, samples=8),
    Pair("70b", 512, {"activation_checkpointing": "full"}),
    Pair(
        "70b",
        512,
        {"pp": 8, "tp": 8, "pp_microbatches": 16, "activation_checkpointing": "selective"},
        samples=16,
    ),
]


def main() -> int:
    """Print one row per pair; return 1 if any difference is too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", metavar="MODEL", help="models whose pairs are tried")
    only = parser.parse_args().only
    pairs = [pair for pair in PAIRS if not only or pair.model in only]
    print("| model | GPUs | layout | type | recompute | samples | plan GiB | tracker GiB | difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    differences = []
    for pair in pairs:
        loaded = pair.load()
        plan = simulated_plan(loaded, pair.gpus)
        work = _work(loaded, plan)
        foretold, tracked = memory_of(work).peak, max(_peaks(loaded, plan, work))
        differences.append(foretold / tracked - 1)
        cells = [
            *(pair.model, str(pair.gpus), _layout(work), pair.dtype),
            *(work.parallel.activation_checkpointing, _samples(work)),
            *(f"{foretold / GIB:.2f}", f"{tracked / GIB:.2f}", f"{differences[-1]:+.1%}"),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
    worst = max(differences, key=abs)
    print(f"\n{len(pairs)} pairs, the largest difference is {worst:+.1%}; {TOLERANCE:.0%} is allowed")
    return int(abs(worst) > TOLERANCE)


def _work(loaded: LoadedConfig, plan: LaunchPlan) -> StepWork:
    shape = resolve_model_shape(loaded.config.model, 1)
    return work_of(loaded.config, shape, plan.layout, plan.batch, device="cpu")


def _peaks(loaded: LoadedConfig, plan: LaunchPlan, work: StepWork) -> Iterator[int]:
    """Return the peak bytes of each simulated rank, as measured by MemTracker."""
    layout = plan.layout
    for pp_rank in extreme_ranks(work):
        yield simulate(loaded, plan, pp_rank * layout.world_size // layout.pp).peak_bytes["total"]


def _layout(work: StepWork) -> str:
    layout: Layout = work.layout
    degrees = {name: getattr(layout, key) for key, name in NAMES.items()}
    words = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one GPU"
    return words if layout.pp == 1 else f"{words}, {work.parallel.pp_schedule}"


def _samples(work: StepWork) -> str:
    """Return the samples per pass x passes per step, and the tokens per sample, as text."""
    return f"{work.samples_per_pass} x {work.passes_per_step} of {work.seq_len}"


if __name__ == "__main__":
    sys.exit(main())
