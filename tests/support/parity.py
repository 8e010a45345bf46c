"""Trains one config on many layouts and compares the curves.

All cases with the same number of ranks run in one set of processes.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.ranks import start_ranks, wait_for_all
from tests.support.runs import free_port, make_attempt
from trainkit.run.events import read_metrics
from trainkit.run.manifest import published
from trainkit.run.rundir import AttemptDir, RunDir

GLOBAL_BATCH = 16
ACCUMULATION = 2
MODEL = (
    *("model.num_layers=4", "model.num_kv_heads=4", "data.seq_len=32", "data.num_workers=0"),
    *(f"train.global_batch_size={GLOBAL_BATCH}", "checkpoint.async=false", "checkpoint.best_metric=null"),
    "schedule.warmup_steps=3",
)
TIMEOUT_S = 480.0


@dataclass(frozen=True)
class Case:
    """A layout and its number of processes."""

    name: str
    num_procs: int
    parallel: dict[str, object]
    """The values of the section `parallel`."""
    overrides: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """Return the config of this layout, with gradient accumulation."""
        values = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1, "cp": 1, **self.parallel}
        dp = int(str(values["dp_replicate"])) * int(str(values["dp_shard"]))
        size = GLOBAL_BATCH // (dp * ACCUMULATION)
        values.setdefault("pp_microbatches", max(2, size // 2))
        batch = [f"train.device_batch_size={size}", "train.eval_batches=1"]
        return [*batch, *(f"parallel.{key}={value}" for key, value in values.items()), *self.overrides]


def train(rank: int, attempt: AttemptDir, keep_labels: bool = False) -> None:
    """Train as one rank until the end of the run."""
    trainer = make_trainer(rank, attempt, keep_labels)
    loads = _record_loads(trainer.built.load_balance)
    trainer.train()
    if rank == 0 and loads:
        _loads_file(attempt.path.parents[1]).write_text(json.dumps(loads))
    close(trainer)


def train_whole(rank: int, attempt: AttemptDir) -> None:
    """Train as one rank on samples of their full length."""
    train(rank, attempt, keep_labels=True)


def run_cases(
    folder: Path,
    cases: Sequence[Case],
    common: Sequence[str],
    seed: Path | None = None,
    function: Callable[[int, AttemptDir], None] | None = None,
    keep_labels: bool = False,
) -> None:
    """Call a function as each rank of each case, in a run folder with the case's name.

    All cases start from a checkpoint of the run `seed`. `keep_labels` keeps all labels of the samples. Raises
    RuntimeError if a case fails.
    """
    for num_procs in sorted({case.num_procs for case in cases}):
        attempts = []
        for case in cases:
            if case.num_procs != num_procs:
                continue
            if seed is not None and not (folder / case.name).exists():
                (folder / case.name).mkdir()
                shutil.copytree(seed / "checkpoints", folder / case.name / "checkpoints", symlinks=True)
            attempts.append(
                str(make_attempt(folder / case.name, [*MODEL, *common, *case.options], num_procs).path)
            )
        _train_all(function or (train_whole if keep_labels else train), attempts, num_procs)


def run_chain(
    folder: Path, links: Sequence[tuple[int, dict[str, object]]], common: Sequence[str], steps: int = 2
) -> None:
    """Train `steps` steps of the run `chain` on each layout in turn, and the run `alone` on one process."""
    common = [*common, f"train.steps={steps * len(links)}"]
    for index, (num_procs, parallel) in enumerate(links, 1):
        stop = (f"train.stop_at_step={steps * index}",) if index < len(links) else ()
        run_cases(folder, [Case("chain", num_procs, parallel, stop)], common)
    run_cases(folder, [Case("alone", 1, {})], common)


def curve(run_dir: Path) -> list[tuple[int, float, float, float, int]]:
    """Return step, loss, gradient norm, validation loss (0 if missing) and samples seen, for each step."""
    keys = ("step", "loss", "grad_norm", "val_loss", "samples_seen")
    return [tuple(record.get(key, 0.0) for key in keys) for record in read_metrics(RunDir(run_dir))]  # type: ignore[misc]


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of the run's task for each step."""
    names = ("tokens", "accuracy", "right", "val_loss", "val_accuracy", "val_right")
    records = read_metrics(RunDir(run_dir))
    return [{name: record[name] for name in names if name in record} for record in records]


def saved_tensors(run_dir: Path) -> dict[str, Any]:
    """Return the tensors of the newest checkpoint of a run."""
    import torch
    from torch.distributed.checkpoint import state_dict_loader

    from trainkit.trainer.checkpoint.storage import SafeReader

    reader = SafeReader(published(RunDir(run_dir).checkpoints_dir)[-1].path)
    items: Any = reader.read_metadata().state_dict_metadata.items()
    found = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in items}
    state_dict_loader.load(found, storage_reader=reader, no_dist=True)
    return found


def worst_difference(run_dir: Path, expected: Path) -> float:
    """Return the largest relative difference of loss or gradient norm.

    Raises AssertionError if the steps differ.
    """
    pairs = list(zip(curve(run_dir), curve(expected), strict=True))
    assert [(mine[0], mine[4]) for mine, _ in pairs] == [(other[0], other[4]) for _, other in pairs]
    return max(abs(mine[i] - other[i]) / max(1.0, abs(other[i])) for mine, other in pairs for i in (1, 2, 3))


def moved_choices(run_dir: Path, expected: Path) -> list[int] | None:
    """Return, for each step, how many choices of an expert went to another expert than in the run `expected`.

    The number is computed from the loads of the experts, so it is a lower bound: two tokens that exchange
    their experts are not counted. Returns None if the model has no experts.
    """
    if not _loads_file(expected).exists():
        return None
    mine, other = (json.loads(_loads_file(path).read_text()) for path in (run_dir, expected))
    return [
        sum(abs(a - b) for layer, its in zip(one, two, strict=True) for a, b in zip(layer, its, strict=True))
        // 2
        for one, two in zip(mine, other, strict=True)
    ]


def _loads_file(run_dir: Path) -> Path:
    return run_dir / "expert_loads.json"


def _record_loads(balance: Any) -> list[list[list[int]]]:
    """Return a list to which each step appends the number of tokens of each expert [layers, experts]."""
    loads: list[list[list[int]]] = []
    if balance is not None:
        update = balance.update

        def recorded(sums: Any, skip: Any) -> None:
            loads.append(
                [[round(load) for load in row[:-1]] for row in sums.view(balance._sums.shape).tolist()]
            )
            update(sums, skip)

        balance.update = recorded
    return loads


def assert_same_curves(folder: Path, cases: Sequence[Case], alone: str = "alone") -> None:
    """Check that losses and gradient norms of each case differ from those of one process by rounding only."""
    found = {case.name: worst_difference(folder / case.name, folder / alone) for case in cases}
    assert max(found.values()) < 1e-5, found


def _train_all(function: Callable[..., None], attempts: Sequence[str], num_procs: int) -> None:
    procs = start_ranks(_in_group, num_procs, function, num_procs, free_port(), attempts)
    deadline_s = time.monotonic() + TIMEOUT_S * len(attempts)
    while any(proc.is_alive() for proc in procs) and time.monotonic() < deadline_s:
        procs[0].join(0.2)
        if any(proc.exitcode not in (0, None) for proc in procs):
            break  # the other ranks would wait for it
    codes = wait_for_all(procs, 1.0)
    if codes != [0] * num_procs:
        raise RuntimeError(f"the ranks ended with {codes}")


def _in_group(
    rank: int, function: Callable[..., None], num_procs: int, port: int, attempts: Sequence[str]
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # torch would otherwise only warn, and run the module without compiling it.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif os.environ.get("TEST_COMPILER") != "inductor":
        # Inductor takes most of the time; test_layouts.py and benchmarks/parity.py train with its code.
        torch.compile = partial(torch.compile, backend="aot_eager")
    # NCCL refuses two ranks on one GPU.
    shares_gpu = device.type == "cuda" and torch.cuda.device_count() < num_procs
    dist.init_process_group(
        f"cpu:gloo,cuda:{'gloo' if shares_gpu else 'nccl'}" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_procs,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    for attempt in attempts:
        path = Path(attempt)
        function(rank, RunDir(path.parent.parent).attempt(int(path.name)))


def device_of(rank: int) -> Any:
    """Return the device of a rank: a CPU, or with TEST_DEVICE=cuda one of the GPUs, which ranks may share."""
    import torch

    if os.environ.get("TEST_DEVICE") != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def make_trainer(rank: int, attempt: AttemptDir, keep_labels: bool = False, **precision: object) -> Any:
    """Return the trainer of one rank after the rendezvous. `precision` may require a GPU."""
    import torch

    from trainkit.config import read_effective
    from trainkit.job.signals import StopRequest
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.files import read_json
    from trainkit.trainer.build import build_task
    from trainkit.trainer.distributed import World, make_world
    from trainkit.trainer.loop import Trainer
    from trainkit.trainer.progress import Progress

    config = read_effective(attempt.config_file)
    precision_config = config.precision.model_copy(update=precision)
    config = config.model_copy(update={"precision": precision_config})
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    device = device_of(rank)
    world = World(0, 1, device, None, None)
    if plan.world_size > 1 or config.parallel.wraps_one:
        world = make_world(rank, device, plan.layout)
    torch.compiler.reset()
    trainer = Trainer(attempt, plan, world, build_task(config), StopRequest(), Progress())
    if not (config.has_user_task or config.uses_transformers or keep_labels):
        trainer.batches = _Ragged(trainer.batches)
    return trainer


class _Ragged:
    """Batches whose samples lose labels at their ends. The number of lost labels depends on the sample."""

    def __init__(self, batches: Any) -> None:
        self._batches, self.close = batches, batches.close

    def __next__(self) -> Any:
        from trainkit.trainer.causal_lm import IGNORE_LABEL

        batch = next(self._batches)
        micros = []
        for micro in batch.microbatches:
            labels = micro.labels.clone()
            for row, key in zip(labels, micro.sample_keys.tolist(), strict=True):
                row[1 + key % labels.shape[1] :] = IGNORE_LABEL
            micros.append(type(micro)(micro.tokens, labels, micro.sample_keys))
        num_tokens = sum(int((micro.labels != IGNORE_LABEL).sum()) for micro in micros)
        return type(batch)(micros, num_tokens, batch.num_samples)


def close(trainer: Any) -> None:
    """Close a trainer as a worker does at its end."""
    trainer.rank_records.flush()
    trainer.batches.close()
    trainer.saver.close()
