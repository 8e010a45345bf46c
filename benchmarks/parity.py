"""Train one small model with every kind of layout, and compare the loss curves with a single process.

    make parity                     or: python -m benchmarks.parity [--steps 20] [--only NAME …]

All layouts start from the same checkpoint, written by a single process, and train for 20 optimizer steps in
float32, with samples of different lengths and two accumulated microbatches. The table shows the largest
difference in loss, gradient norm or validation loss of any step; for values above 1, the difference is
relative. A difference of more than 1e-5 is a failure. The backend is gloo.

For models with experts, the table also shows how many of the router's choices differ: a token whose two best
scores are nearly equal may go to another expert on another layout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.support.parity import Case, moved_choices, run_cases, worst_difference

TOLERANCE = 1e-5
SEED_STEPS = 2
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
COMPILE = {"compile": True}
PLAIN_TP = {"sequence_parallel": False, "loss_parallel": False}

CASES = [
    Case("compile", 1, COMPILE),
    Case("recompute", 1, FULL),
    Case("replicate 2", 2, {"dp_replicate": 2}),
    Case("shard 2", 2, {"dp_shard": 2}),
    Case("shard 2, zero 2", 2, {"dp_shard": 2, "zero": 2}),
    Case("shard 2, offload", 2, {"dp_shard": 2, "offload": True}),
    Case("shard 2, compile, selective", 2, {"dp_shard": 2, **COMPILE, **SELECTIVE}),
    Case("tp 2", 2, {"tp": 2}),
    Case("tp 2, no sequence, no loss", 2, {"tp": 2, **PLAIN_TP}),
    Case("tp 2, compile, recompute", 2, {"tp": 2, **COMPILE, **FULL}),
    Case("cp 2", 2, {"cp": 2}),
    Case("cp 2, compile, recompute", 2, {"cp": 2, **COMPILE, **FULL}),
    Case("pp 2 gpipe", 2, {"pp": 2, "pp_schedule": "gpipe"}),
    Case("pp 2 1f1b, compile", 2, {"pp": 2, **COMPILE}),
    Case("pp 2 interleaved_1f1b", 2, {"pp": 2, "pp_schedule": "interleaved_1f1b"}),
    Case("pp 2 interleaved_zero_bubble", 2, {"pp": 2, "pp_schedule": "interleaved_zero_bubble"}),
    Case("pp 2 zbv, recompute", 2, {"pp": 2, "pp_schedule": "zbv", **FULL}),
    Case("pp 2 dualpipe_v", 2, {"pp": 2, "pp_schedule": "dualpipe_v"}),
    Case("shard 4", 4, {"dp_shard": 4}),
    Case("replicate 2 x shard 2", 4, {"dp_replicate": 2, "dp_shard": 2}),
    Case("replicate 2 x tp 2", 4, {"dp_replicate": 2, "tp": 2}),
    Case("shard 2 x tp 2, compile", 4, {"dp_shard": 2, "tp": 2, **COMPILE}),
    Case("tp 4", 4, {"tp": 4}),
    Case("cp 2 x tp 2", 4, {"cp": 2, "tp": 2}),
    Case("shard 2 x cp 2", 4, {"dp_shard": 2, "cp": 2}),
    Case("pp 4 1f1b", 4, {"pp": 4}),
    Case("pp 2 x shard 2", 4, {"pp": 2, "dp_shard": 2}),
    Case("pp 2 zbv x tp 2", 4, {"pp": 2, "tp": 2, "pp_schedule": "zbv"}),
    Case("replicate 2 x shard 2 x tp 2", 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    Case("pp 2 x shard 2 x tp 2", 8, {"pp": 2, "dp_shard": 2, "tp": 2}),
    Case("pp 2 x replicate 2 x tp 2, recompute", 8, {"pp": 2, "dp_replicate": 2, "tp": 2, **SELECTIVE}),
    Case("shard 2 x cp 2 x tp 2", 8, {"dp_shard": 2, "cp": 2, "tp": 2}),
    Case("pp 2 interleaved x cp 2 x tp 2", 8, {"pp": 2, "cp": 2, "tp": 2, "pp_schedule": "interleaved_1f1b"}),
    Case("shard 2 x tp 4", 8, {"dp_shard": 2, "tp": 4}),
]
TIED = ("model.tie_embeddings=true",)
UNEVEN = ("model.vocab_size=323",)
"""Overrides for a model whose vocabulary size is not divisible by any number of shards."""
WIDE = ("model.dim=512", "model.num_layers=6", "optimizer.lr=0.00003")
"""Overrides for a model with several sharded units, so that one unit is gathered while another unit computes.

The learning rate is low, because AdamW's first updates are as large for rounding errors as for real
gradients, and a higher rate would amplify the errors in the gradient norm.
"""
EXPERTS = ("model.moe={num_experts: 8, top_k: 2, expert_ffn_dim: 64, num_shared: 1, first_dense: 1}",)
OTHER_MODELS = [
    (
        "tied",
        TIED,
        ("tp 2", "pp 2 1f1b, compile", "pp 2 dualpipe_v", "pp 2 zbv x tp 2", "pp 2 x shard 2 x tp 2"),
    ),
    ("uneven", UNEVEN, ("shard 4", "replicate 2 x shard 2", "shard 2 x cp 2")),
    (
        "wide",
        WIDE,
        (
            "shard 2",
            "shard 2, zero 2",
            "shard 2, compile, selective",
            "replicate 2 x shard 2",
            "pp 2 x shard 2",
        ),
    ),
]
MUON = ("optimizer.name=muon", "optimizer.lr=0.003")
"""Overrides for Muon, which gathers whole matrices; its reference is a run of one process with Muon."""
GEMMA = (
    "train.z_loss=0.1",
    "model={sliding_window: 5, full_attention_every: 3, rope_local_theta: 100, attention_soft_cap: 0.5, "
    "logit_soft_cap: 1, activation: gelu_tanh, post_norms: true, zero_centered_norms: true, "
    "scale_embeddings: true, qk_norm: true, tie_embeddings: true}",
)
"""Overrides for the blocks of Gemma and the z-loss."""
OTHER_MODELS += [
    (
        "gemma",
        GEMMA,
        ("compile", "tp 2", "cp 2, compile, recompute", "pp 2 zbv, recompute", "pp 2 zbv x tp 2"),
    ),
    (
        "muon",
        MUON,
        (
            "replicate 2",
            "shard 2",
            "tp 2",
            "cp 2",
            "pp 2 zbv, recompute",
            "shard 4",
            "replicate 2 x shard 2",
            "replicate 2 x tp 2",
            "shard 2 x tp 2, compile",
            "pp 2 x shard 2",
            "replicate 2 x shard 2 x tp 2",
            "pp 2 x shard 2 x tp 2",
            "pp 2 x replicate 2 x tp 2, recompute",
        ),
    ),
]
CASES += [
    Case(f"{word}: {case.name}", case.num_procs, case.parallel, overrides)
    for word, overrides, names in OTHER_MODELS
    for case in CASES
    if case.name in names
]
CASES += [
    Case(f"experts: {name}", num_procs, parallel, EXPERTS)
    for name, num_procs, parallel in (
        ("shard 2", 2, {"dp_shard": 2}),
        ("ep 2", 2, {"dp_shard": 2, "ep": 2}),
        ("ep 2, compile, selective", 2, {"dp_shard": 2, "ep": 2, **COMPILE, **SELECTIVE}),
        ("cp 2 x ep 2, recompute", 2, {"cp": 2, "ep": 2, **FULL}),
        ("shard 4 x ep 2", 4, {"dp_shard": 4, "ep": 2}),
        ("shard 4 x ep 4, selective", 4, {"dp_shard": 4, "ep": 4, **SELECTIVE}),
        ("replicate 2 x ep 2", 4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
        ("pp 2 x ep 2", 4, {"pp": 2, "dp_shard": 2, "ep": 2}),
        ("tp 2 x ep 2", 2, {"tp": 2, "ep": 2}),
        ("ep 2 x tp 2", 4, {"dp_shard": 2, "tp": 2, "ep": 2}),
        ("ep 2 x tp 2, selective", 4, {"dp_shard": 2, "tp": 2, "ep": 2, **SELECTIVE}),
        ("ep 2 x tp 2, compile, recompute", 4, {"dp_shard": 2, "tp": 2, "ep": 2, **COMPILE, **FULL}),
        ("ep 4 x tp 2, compile", 4, {"dp_shard": 2, "tp": 2, "ep": 4, **COMPILE}),
        ("replicate 2 x tp 2 x ep 2", 4, {"dp_replicate": 2, "tp": 2, "ep": 2}),
        ("tp 4 x ep 2", 4, {"tp": 4, "ep": 2}),
        ("pp 2 x tp 2 x ep 2, selective", 4, {"pp": 2, "tp": 2, "ep": 2, **SELECTIVE}),
        ("shard 2 x cp 2 x tp 2 x ep 4", 8, {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}),
        (
            "pp 2 zbv x cp 2 x ep 4, recompute",
            8,
            {"pp": 2, "dp_shard": 2, "cp": 2, "ep": 4, "pp_schedule": "zbv", **FULL},
        ),
        ("replicate 2 x shard 4 x ep 2", 8, {"dp_replicate": 2, "dp_shard": 4, "ep": 2}),
    )
]
CASES += [
    Case(f"muon, experts: {name}", num_procs, parallel, (*MUON, *EXPERTS))
    for name, num_procs, parallel in (
        ("replicate 2", 2, {"dp_replicate": 2}),
        ("shard 2", 2, {"dp_shard": 2}),
        ("tp 2", 2, {"tp": 2}),
        ("ep 2", 2, {"dp_shard": 2, "ep": 2}),
        ("shard 4 x ep 2", 4, {"dp_shard": 4, "ep": 2}),
        ("replicate 2 x ep 2", 4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
        ("pp 2 x ep 2", 4, {"pp": 2, "dp_shard": 2, "ep": 2}),
        ("replicate 2 x shard 4 x ep 2", 8, {"dp_replicate": 2, "dp_shard": 4, "ep": 2}),
    )
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", help="names, or parts of names, of the layouts to run")
    args = parser.parse_args()
    os.environ["TEST_COMPILER"] = "inductor"
    cases = [case for case in CASES if not args.only or any(part in case.name for part in args.only)]
    folder = Path(tempfile.mkdtemp(prefix="parity-"))
    failed = compare(folder, cases, args.steps)
    if failed:
        print(f"{len(failed)} of {len(cases)} layouts differ or fail: {', '.join(failed)}; see {folder}")
        return 1
    print(f"{len(cases)} layouts, none differs from one process by more than {TOLERANCE}")
    shutil.rmtree(folder)
    return 0


def compare(folder: Path, cases: list[Case], steps: int) -> list[str]:
    """Print one line per layout, and return the names of the layouts that fail."""
    first = (f"train.steps={SEED_STEPS + steps}", f"train.eval_every={steps // 2}")
    failed = []
    for kind in dict.fromkeys(case.overrides for case in cases):
        base = folder / ("+".join(override.partition("=")[0] for override in kind) or "adamw")
        base.mkdir()
        seed, alone = (
            Case("seed", 1, {}, (*kind, f"train.stop_at_step={SEED_STEPS}")),
            Case("alone", 1, {}, kind),
        )
        run_cases(base, [seed], first)
        run_cases(base, [alone], first, base / "seed")
        for case in cases:
            if case.overrides != kind:
                continue
            began_s = time.monotonic()
            try:
                run_cases(base, [case], first, base / "seed")
                worst = worst_difference(base / case.name, base / "alone")
                words = f"{worst:.1e}" if worst <= TOLERANCE else f"{worst:.1e}  DIFFERS"
                moved = moved_choices(base / case.name, base / "alone")
                if moved is not None:
                    words += f"  {sum(moved)} choices moved"
            except (RuntimeError, AssertionError, ValueError) as error:
                worst, words = float("inf"), f"FAILED: {error}"
            if worst > TOLERANCE:
                failed.append(case.name)
            print(
                f"{case.num_procs:2d}  {case.name:42s} {words}  ({time.monotonic() - began_s:.0f} s)",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
