"""Tests that layouts that split a sample give the curve of one process, and that runs can change layouts."""

import json
from pathlib import Path

import pytest

from tests.support.parity import Case, curve, metrics_of, run_cases, run_chain, train, worst_difference
from trainkit.run.rundir import AttemptDir
from trainkit.trainer import build
from trainkit.trainer.parallel import data_parallel

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parity")]

COMMON = ["model.tie_embeddings=true", "train.steps=4", "train.eval_every=2", "model.vocab_size=322"]
"""A tensor-parallel rank has 161 rows of the embedding, so two shards of them are not equal."""
DROPOUT = "model.dropout=0.1"
TWO_STEPS = (DROPOUT, "train.steps=2")
"""Options of tests whose layouts differ in the gradient of a step. `test_one_curve` has longer runs."""
DATA_PARALLEL = [
    Case("recomputed", 1, {"activation_checkpointing": "full"}),
    Case("pointwise", 1, {"activation_checkpointing": "pointwise"}),
    Case("whole-batch", 1, {}, ("train.device_batch_size=16",)),
    Case("mesh-of-one", 1, {"mesh_of_one": True}),
    Case("replicate", 2, {"dp_replicate": 2, "activation_checkpointing": "pointwise"}),
    Case("shard", 2, {"dp_shard": 2, "activation_checkpointing": "full"}, ("train.device_batch_size=1",)),
    Case("replicate-shard", 4, {"dp_replicate": 2, "dp_shard": 2}),
]
CASES = [
    *DATA_PARALLEL,
    Case("tp", 2, {"tp": 2, "activation_checkpointing": "selective"}),
    Case("plain-tp", 2, {"tp": 2, "sequence_parallel": False, "loss_parallel": False}),
    Case("cp", 2, {"cp": 2, "activation_checkpointing": "pointwise"}),
    Case("pp", 2, {"pp": 2, "activation_checkpointing": "pointwise"}),
    Case("zero-bubble", 2, {"pp": 2, "pp_schedule": "zbv", "activation_checkpointing": "full"}),
    Case("offload", 2, {"dp_shard": 2, "offload": True, "zero": 2}),
    Case("interleaved-tp", 4, {"pp": 2, "tp": 2, "pp_schedule": "interleaved_1f1b"}),
]
LOW = [
    Case(f"{dtype}-{size}", size, {"dp_shard": size}, (f"precision.dtype={dtype}",))
    for dtype in ("bf16", "fp16")
    for size in (1, 2)
]
LOW += [
    Case(f"bf16-{schedule}", 2, {"pp": 2, "pp_schedule": schedule}, ("precision.dtype=bf16",))
    for schedule in ("1f1b", "zbv")
]


def epoch(folder: Path) -> list[str]:
    """Return options for one epoch of three steps of 16 samples and one of two, from a separate text."""
    words = "".join(f"line {number} says {number * number}\n" for number in range(1000))
    for name, start, num_samples in (("train", 0, 50), ("val", 5000, 21)):
        (folder / f"{name}.txt").write_text(words[start : start + 32 * num_samples])
    source = f"data.source={folder}/train.txt", f"data.val_source={folder}/val.txt"
    return [*COMMON, *source, "train.steps=null", "train.epochs=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four steps of every case, with ragged samples, dropout, tied ends and validation."""
    folder = tmp_path_factory.mktemp("runs")
    without = Case("without-dropout", 1, {}, ("model.dropout=0",))
    run_cases(folder, [Case("alone", 1, {}), without, *CASES, *LOW], [*epoch(folder), DROPOUT])
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_curve(runs, case):
    limit = 1.5e-6 if case in DATA_PARALLEL else 1e-5
    assert worst_difference(runs / case.name, runs / "alone") < limit
    tokens = [[step["tokens"] for step in metrics_of(runs / name)] for name in ("alone", case.name)]
    assert tokens[0] == tokens[1]
    if case.name in ("recomputed", "pointwise"):
        assert curve(runs / case.name) == curve(runs / "alone"), "recomputation changes no bit"


def test_the_reference_has_a_ragged_end_and_validates(runs):
    steps, losses, _, val_losses, samples = zip(*curve(runs / "alone"), strict=True)
    assert (steps, samples[-1] % 16 in range(1, 4)) == ((1, 2, 3, 4), True), "fewer samples than ranks"
    assert [bool(loss) for loss in val_losses] == [False, True] * 2
    assert losses[-1] < losses[0]
    assert worst_difference(runs / "without-dropout", runs / "alone") > 1e-3, "dropout is on"


@pytest.mark.parametrize("case", LOW, ids=lambda case: case.name)
def test_low_precision_stays_close(runs, case):
    for mine, other in zip(curve(runs / case.name), curve(runs / "alone"), strict=True):
        (_, loss, norm, _, seen), (_, expected, of_norm, _, of_seen) = mine, other
        assert seen == of_seen
        assert loss == pytest.approx(expected, abs=0.02)
        assert loss != expected
        assert norm == pytest.approx(of_norm, rel=0.05)


def test_document_mask(tmp_path):
    rows = "".join(json.dumps({"text": f"line {n} " * (n % 9)}) + "\n" for n in range(300))
    (tmp_path / "rows.jsonl").write_text(rows)
    common = [*COMMON, *TWO_STEPS, f"data.source={tmp_path}/rows.jsonl", "data.val_fraction=0.2"]
    mask = ("data.document_mask=true",)
    tp = Case("tp", 2, {"tp": 2, "activation_checkpointing": "full"}, mask)
    shard = Case("shard", 2, {"dp_shard": 2, "activation_checkpointing": "pointwise"}, mask)
    run_cases(tmp_path, [Case("plain", 1, {}), Case("alone", 1, {}, mask), tp, shard], common)
    assert worst_difference(tmp_path / "plain", tmp_path / "alone") > 1e-4
    for case in (tp, shard):
        assert worst_difference(tmp_path / case.name, tmp_path / "alone") < 1.5e-6


FIXED = ("optimizer.lr=1e-30", "optimizer.weight_decay=0")
SMALL = "train.device_batch_size=4"
BF16 = [
    Case("updated", 1, {}, (SMALL,)),
    Case("updated-mesh-of-one", 1, {"mesh_of_one": True}, (SMALL,)),
    Case("fixed", 1, {}, (*FIXED, SMALL)),
    Case("fixed-shard", 2, {"dp_shard": 2}, FIXED),
    Case("fixed-replicate", 2, {"dp_replicate": 2}, FIXED),
]
"""Options with the same samples in each microbatch, in whose gradients bf16 rounds."""


def test_bf16_computes_the_same_on_one_process_and_under_fsdp(tmp_path):
    """One process has the casts and the residual stream of `fully_shard`, and also sums in float32.

    With fixed weights, only the order of float32 sums differs. With updates, such a difference can round the
    bf16 cast of a weight to its other neighbour, which changes the next steps by more.
    """
    run_cases(tmp_path, BF16, [*COMMON, *TWO_STEPS, "precision.dtype=bf16"])
    assert curve(tmp_path / "updated-mesh-of-one") == curve(tmp_path / "updated")
    for name in ("fixed-shard", "fixed-replicate"):
        assert worst_difference(tmp_path / name, tmp_path / "fixed") < 1e-6


def train_as_if_large(rank: int, attempt: AttemptDir) -> None:
    """Train as one rank with a limit on logits that one sample exceeds, as with a large vocabulary."""
    build.loss_chunks = lambda layout, *_: 3 if layout.tp * layout.pp == 1 else 1
    data_parallel.MIN_UNIT_BYTES = 1
    train(rank, attempt)


UNTIED = ("model.tie_embeddings=false",)
LARGE = [
    Case("parts", 1, {}),
    Case("shard", 2, {"dp_shard": 2}),
    Case("tp", 2, {"tp": 2}),
    Case("pp", 2, {"pp": 2}),
    Case("untied-parts", 1, {}, UNTIED),
    Case("untied-mesh-of-one", 1, {"mesh_of_one": True}, UNTIED),
    Case("untied-replicate", 2, {"dp_replicate": 2}, UNTIED),
    Case("untied-zero-2", 2, {"dp_shard": 2, "zero": 2}, UNTIED),
    Case("untied-cp", 2, {"cp": 2}, UNTIED),
    Case("untied-pp", 2, {"pp": 2}, UNTIED),
    Case("untied-offload", 2, {"dp_shard": 2, "offload": True}, UNTIED),
]


def test_large_vocabularies(tmp_path):
    """The loss is computed in chunks. Embedding and head are separate units unless they are tied."""
    common = [*COMMON, *TWO_STEPS]
    run_cases(tmp_path, [Case("alone", 1, {}), Case("untied-alone", 1, {}, UNTIED)], common)
    run_cases(tmp_path, LARGE, common, function=train_as_if_large)
    found = {
        case.name: worst_difference(
            tmp_path / case.name, tmp_path / ("untied-alone" if case.overrides else "alone")
        )
        for case in LARGE
    }
    assert max(found.values()) < 1e-5, found
    assert found["parts"] > 0, "nothing was split"


CHAIN: list[tuple[int, dict[str, object]]] = [
    (4, {"pp": 2, "dp_shard": 2}),
    (4, {"tp": 2, "dp_replicate": 2}),
    (1, {}),
    (2, {"pp": 2, "pp_schedule": "zbv"}),
    (4, {"dp_shard": 2, "cp": 2}),
]


@pytest.mark.smoke
def test_a_chain_of_five_layouts(tmp_path):
    """The layouts have dropout and tied embeddings, which both ends of a pipeline hold."""
    common = ["model.tie_embeddings=true", "model.dropout=0.1"]
    run_chain(tmp_path, CHAIN, common)
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < 1e-5
