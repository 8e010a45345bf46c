"""Part `world` of `benchmarks.gpu`: what one GPU shows about training on many.

    python -m benchmarks.world MODE FOLDER RANK DEVICE      one rank, whose config and plan are in FOLDER

Six functions write the rows, in the order of their worth:

    simulated_ranks   one rank of 8 to 512 with the kernels, memory and schedule of a real rank; collectives
                      return at once, and the gathers and reductions of FSDP copy the rank's own shard
    two_ranks         two ranks against one process; the ranks share a GPU over gloo, or have a GPU each over
                      NCCL
    emulated_network  the same rank, where each gather and reduction of FSDP also takes the time that its
                      bytes need on a link
    staging           a save of the state of one rank of 8 during training
    interruptions     `trainkit drill` with two ranks, and a stopped rank, which the diagnosis must name
    several_gpus      with two or more GPUs: tests of the layouts, `doctor` and `bench layouts`

On a CPU, the models are tiny, and the memory is measured by PyTorch's memory tracker.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainkit.capabilities.simulation.simulated_job import simulate, simulated_plan
from trainkit.capabilities.simulation.worker import simulated_world, training_step
from trainkit.config import LoadedConfig, dump_effective, load_config, read_effective
from trainkit.config.schema import RunConfig
from trainkit.errors import TrainkitError
from trainkit.plan.gpus import find_gpu, peak_flops
from trainkit.plan.keep import KeepRule
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.memory import rank_memory
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.plan.step_cost import cost_of, rank_flops
from trainkit.plan.step_work import StepWork, bubble_fraction, compiles, work_of
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.build import BuiltModel, build, build_task
from trainkit.trainer.causal_lm import Microbatch
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest
from trainkit.trainer.checkpoint.state import StateTensors
from trainkit.trainer.distributed import World
from trainkit.trainer.metrics import LocalGradient
from trainkit.trainer.models.model import local_tensor
from trainkit.trainer.optimizers import make_optimizer
from trainkit.trainer.optimizers.interface import ShardedOptimizer
from trainkit.trainer.parallel import data_parallel
from trainkit.trainer.progress import Progress
from trainkit.trainer.torch_private import DispatchMode, memory_tracker

if TYPE_CHECKING:
    from benchmarks.gpu_parts import Bench

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
NUM_STEPS, WARM_UP = 3, 2
MODES = ("none", "selective", "full")
GPU = (
    *("model.preset=8b", "data.seq_len=8192", "train.device_batch_size=1", "precision.dtype=bf16"),
    *("train.global_batch_size=null", "train.eval_every=null", "data.val_fraction=0"),
)
TINY = (
    *("model.preset=nano", "model.num_layers=4", "model.dim=128", "model.ffn_dim=384", "model.num_heads=8"),
    *("model.num_kv_heads=8", "model.vocab_size=1024", "data.seq_len=64", "train.device_batch_size=2"),
    *("precision.dtype=bf16", "train.global_batch_size=null", "train.eval_every=null", "data.val_fraction=0"),
)
"""The config values of the measured model on a GPU and on a CPU."""
SIZES = (8, 64, 512)
"""Numbers of GPUs of the runs that a measured rank belongs to."""
Values = tuple[str, ...]
RANKS, PAIR, NETWORK, SAVES, INTERRUPTED, SEVERAL, MEASURED, FAILED = (
    "One rank of many; collectives return at once",
    "Two ranks against one process",
    "Communication of FSDP on an emulated link",
    "A save of the state of one rank during training",
    "Interruptions of two ranks",
    "Several GPUs",
    "Layouts on several GPUs, measured by `trainkit bench layouts`",
    "Functions that failed",
)
"""The tables of the record."""
LINKS = {"cuda": (450e9, 50e9), "cpu": (1e9, 1e8)}
"""Bandwidths in bytes per second of NVLink and of a network port, and of links for tiny models."""
RANK_LIMIT_S = 300.0
"""Limit of a process that measures a rank or runs a command."""
NO_FLOAT8 = TrainkitError("no GPU, or no torchao", "")
SCENARIOS = ("signal", "rank", "mid-save")
"""The scenarios of `trainkit drill` to try; each stops the ranks in a different way."""


def layouts(num_gpus: int, device: str) -> dict[str, Values]:
    """Return the config values of each layout on a number of GPUs."""
    copies, long, batch = num_gpus // 8, 65_536 if device == "cuda" else 128, 8 if device == "cuda" else 4
    whole = ("parallel.dp_replicate=8", "parallel.dp_shard=1", "optimizer.state_dtype=bf16")
    hybrid = (f"parallel.dp_replicate={copies}", "parallel.dp_shard=8")
    stages = (
        f"train.device_batch_size={batch}",
        f"parallel.pp_microbatches={batch}",
        "parallel.pp_schedule=1f1b",
    )
    return {
        "FSDP": ("parallel.dp_shard=-1",),
        "replicate": whole if copies == 1 else hybrid,
        "TP 8": ("parallel.tp=8", "parallel.dp_shard=-1"),
        "CP 8": ("parallel.cp=8", "parallel.dp_shard=-1", f"data.seq_len={long}"),
        "PP 4": ("parallel.pp=4", "parallel.dp_shard=-1", *stages),
        "gather": ("parallel.dp_shard=-1", "precision.float8=gather"),
    }


@dataclass
class Link:
    """A network that takes the time of its bytes on the stream that communicates, and counts the bytes."""

    device: torch.device
    bytes_per_s: float | None = None
    """None if communication takes no time."""
    cycles_per_s: float = 0.0
    """Cycles that one second of `torch.cuda._sleep` takes; measured before the steps."""
    num_bytes: int = 0

    def send(self, num_bytes: int) -> None:
        """Take the time that sending these bytes needs."""
        self.num_bytes += num_bytes
        if self.bytes_per_s is None:
            return
        seconds = num_bytes / self.bytes_per_s
        if self.device.type == "cuda":
            torch.cuda._sleep(round(seconds * self.cycles_per_s))
        else:
            time.sleep(seconds)

    def calibrate(self) -> None:
        """Measure how many cycles of `torch.cuda._sleep` take one second."""
        if self.device.type == "cuda":
            num_cycles = 100_000_000
            torch.cuda._sleep(num_cycles)
            began_s = synchronized_s(self.device)
            torch.cuda._sleep(num_cycles)
            self.cycles_per_s = num_cycles / (synchronized_s(self.device) - began_s)


@dataclass
class Emulated:
    """The gathers and reductions of FSDP on one rank, whose peers have the same values as this rank."""

    link: Link

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class EmulatedGather(Emulated):
    """Copies the shard of this rank to the places of all ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        ranks = group.size()
        # The input is a part of the output.
        output_tensor.view(ranks, -1).copy_(input_tensor.flatten().clone())
        self.link.send(input_tensor.nbytes * (ranks - 1))


class EmulatedReduction(Emulated):
    """Averages the parts of this rank's gradient, which takes the memory traffic of a reduction."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        ranks = group.size()
        torch.mean(input_tensor.view(ranks, -1), 0, out=output_tensor.flatten())
        self.link.send(output_tensor.nbytes * (ranks - 1))


class HostSyncs(DispatchMode):
    """Counts the operations that read a floating-point value, for which the host waits on a GPU.

    Integers are not counted, because the keys of `Linear` are on the host even if the model is on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def count_syncs(step: Callable[[], object], device: torch.device) -> int:
    """Return how often the host waits for the device in a step."""
    if device.type == "cpu":
        with HostSyncs() as mode:
            step()
        return mode.count
    torch.set_warn_always(True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(item.message) for item in found)


def synchronized_s(device: torch.device) -> float:
    """Return the time at which the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def step_times(step: Callable[[], object], device: torch.device, num_steps: int) -> tuple[float, float]:
    """Return the median seconds of a step, and the median seconds until the host has enqueued a step."""
    whole_s, host_s = [], []
    for _ in range(num_steps):
        began_s = synchronized_s(device)
        step()
        host_s.append(time.perf_counter() - began_s)
        whole_s.append(synchronized_s(device) - began_s)
    return statistics.median(whole_s), statistics.median(host_s)


@dataclass(frozen=True)
class Rank:
    """One rank of a larger run, built with real tensors."""

    step: Callable[[], object]
    link: Link
    work: StepWork
    built: BuiltModel
    optimizer: ShardedOptimizer


@contextmanager
def one_rank(config: RunConfig, plan: LaunchPlan, rank: int, device: torch.device) -> Iterator[Rank]:
    """Build one rank of a run, whose other ranks are simulated."""
    task, link = build_task(config), Link(device)
    link.calibrate()
    with simulated_world(plan, rank, device=device) as world:
        built = build(task, plan, world, Progress(), LocalGradient())
        compiled = compiles(config.parallel, plan.layout, device.type)
        optimizer = make_optimizer(built.weights, config.optimizer, world, compiled=compiled)
        copies = plan.layout.dp_replicate

        def all_reduced(gradient: Tensor) -> None:
            link.send(2 * gradient.nbytes * (copies - 1) // copies)

        for module in (found for part in built.model_parts for found in part.modules()):
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(EmulatedGather(link))
                module.set_custom_reduce_scatter(EmulatedReduction(link))
                if copies > 1:
                    module.set_all_reduce_hook(all_reduced)
        sizes = (plan.batch.device_batch_size, config.data.seq_len + 1)
        tokens = torch.randint(0, task.shape.vocab_size, sizes, device=device)
        keys = torch.zeros(sizes[0], dtype=torch.int32, device=device)
        micro = Microbatch(tokens[:, :-1], tokens[:, 1:], keys)
        built.update_scales()
        step = training_step(config, plan, built, optimizer, micro)
        work = work_of(config, task.shape, plan.layout, plan.batch, device=device.type)
        yield Rank(step, link, work, built, optimizer)


def measure_rank(config: RunConfig, plan: LaunchPlan, rank: int, device: torch.device) -> Row:
    """Return the speed and the memory of one rank without communication."""
    graph_breaks = torch._dynamo.utils.counters["graph_break"]
    graph_breaks.clear()
    with one_rank(config, plan, rank, device) as found:
        for _ in range(WARM_UP - 1):
            found.step()
        if device.type == "cuda":
            found.step()
            torch.cuda.reset_peak_memory_stats()
            found.step()
            peak = torch.cuda.max_memory_allocated()
        else:
            tracker = memory_tracker()
            masters = [weight.param for weight in found.built.weights if weight.cast is not None]
            averages = [tensor for _, tensor in found.optimizer.state_tensors()]
            tracker.track_external(*found.built.model_parts, *masters, *averages)
            for _ in range(2):
                with tracker:
                    found.step()
            peak = tracker.get_tracker_snapshot("peak")[device]["Total"]
        step_s, host_s = step_times(found.step, device, NUM_STEPS)
        work, pp_rank = found.work, plan.layout.place(rank).pp
        bubble = bubble_fraction(work.parallel.pp_schedule, plan.layout.pp, work.passes_per_step)
        rate = peak_flops(torch.cuda.get_device_name(), "bf16") if device.type == "cuda" else None
        mfu = None if rate is None else rank_flops(work, pp_rank) * (1 - bubble) / step_s / rate
        planned = rank_memory(work, pp_rank).peak
        return {
            "rank": rank,
            "recomputation": config.parallel.activation_checkpointing,
            "compute ms": round(1000 * step_s, 1),
            "host ms": round(1000 * host_s, 1),
            "MFU at most": None if mfu is None else round(mfu, 3),
            "peak GB": round(peak / 1e9, 3),
            "plan GB": round(planned / 1e9, 3),
            "plan / peak": round(planned / peak, 3),
            "graph breaks": sum(graph_breaks.values()),
            "host syncs": count_syncs(found.step, device),
        }


def measure_network(config: RunConfig, plan: LaunchPlan, rank: int, device: torch.device) -> Iterator[Row]:
    """Yield a row for each bandwidth: the time by which the communication of FSDP lengthens a step."""
    gpu = find_gpu(torch.cuda.get_device_name() if device.type == "cuda" else "h100")
    assert gpu is not None
    # Each block of a tiny model is a unit of FSDP too.
    unit_bytes = data_parallel.MIN_UNIT_BYTES if device.type == "cuda" else 1
    with (
        patch.object(data_parallel, "MIN_UNIT_BYTES", unit_bytes),
        one_rank(config, plan, rank, device) as found,
    ):
        for _ in range(WARM_UP):
            found.step()
        alone_s, _ = step_times(found.step, device, NUM_STEPS)
        for bandwidth in LINKS[device.type]:
            found.link.bytes_per_s, found.link.num_bytes = bandwidth, 0
            step_s, _ = step_times(found.step, device, NUM_STEPS)
            emulated = gpu._replace(node_bandwidth=bandwidth, network_bandwidth=bandwidth)
            cost = cost_of(found.work, emulated, plan.world_size)
            yield {
                "link GB/s": bandwidth / 1e9,
                "step ms": round(1000 * step_s, 1),
                "exposed ms": round(1000 * (step_s - alone_s), 1),
                "plan exposed ms": round(1000 * cost.exposed_s["dp"], 1),
                "sent GB": round(found.link.num_bytes / NUM_STEPS / 1e9, 3),
                "plan sent GB": round(cost.sent["dp"] / 1e9, 3),
            }


def measure_staging(
    config: RunConfig, plan: LaunchPlan, rank: int, device: torch.device, folder: Path
) -> Iterator[Row]:
    """Yield how long a save of one rank's state blocks training, and how it slows the next step."""
    with one_rank(config, plan, rank, device) as found:
        for _ in range(WARM_UP):
            found.step()
        alone_s, _ = step_times(found.step, device, NUM_STEPS)
        whole = StateTensors(found.built.weights, found.optimizer, found.built.saved_buffers).tensors
        state = {name: local_tensor(tensor).detach() for name, tensor in whole.items()}
        size = sum(tensor.nbytes for tensor in state.values())
        free = shutil.disk_usage(folder).free
        if free < 2 * size:
            yield {"skipped": f"needs {2 * size / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB"}
            return
        attempt = RunDir(folder).attempt(1)
        attempt.create()
        saver = CheckpointSaver(attempt, World(0, 1, device, None, None), state, KeepRule(last=1))
        saver.allocate_buffers()
        update = found.optimizer.step

        def update_when_staged(*args: Any) -> None:
            saver.wait_until_staged()  # as in the trainer
            update(*args)

        with patch.object(found.optimizer, "step", update_when_staged):
            for number in (1, 2):  # the first save may wait for its buffers
                began_s = time.perf_counter()
                saver.save(SaveRequest(number, {}, is_best=False, reason="bench"), blocking=False)
                blocked_s = time.perf_counter() - began_s
                during_s, _ = step_times(found.step, device, 1)
                saver.finish()
                saver.require_saved(number)
                yield {
                    "case": f"save {number}",
                    "GB": round(size / 1e9, 3),
                    "blocked ms": round(1000 * blocked_s, 1),
                    "step ms": round(1000 * alone_s, 1),
                    "step with staging ms": round(1000 * during_s, 1),
                    "saved after s": round(time.perf_counter() - began_s, 2),
                }
        saver.close()


def plan_that_fits(
    bench: Bench, num_gpus: int, values: Values
) -> tuple[LoadedConfig, LaunchPlan] | TrainkitError:
    """Return the config and the plan with the least recomputation that fits into memory, or the reason."""
    sizes = GPU if bench.has_gpu else TINY
    needed = 0
    for mode in MODES:
        overrides = [f"device={bench.device}", *sizes, *values, f"parallel.activation_checkpointing={mode}"]
        loaded = load_config(None, overrides=overrides, environ={}, cwd=bench.folder)
        plan = simulated_plan(loaded, num_gpus)
        shape = resolve_model_shape(loaded.config.model, 0)
        work = work_of(loaded.config, shape, plan.layout, plan.batch, device=bench.device)
        needed = max(rank_memory(work, stage).peak for stage in {0, plan.layout.pp - 1})
        if needed <= bench.usable_bytes:
            return loaded, plan
    return TrainkitError(
        f"needs {needed / 2**30:.1f} GiB, usable are {bench.usable_bytes / 2**30:.1f} GiB", ""
    )


def run_rank(bench: Bench, mode: str, loaded: LoadedConfig, plan: LaunchPlan, rank: int) -> Iterator[Row]:
    """Yield the rows of one rank, which runs in its own process; a rank that fails yields its last error."""
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    (folder / "config.yaml").write_text(dump_effective(loaded.config))
    (folder / "plan.json").write_text(plan.to_text())
    argv = [sys.executable, "-m", "benchmarks.world", mode, str(folder), str(rank), bench.device]
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=RANK_LIMIT_S)
    except subprocess.TimeoutExpired:
        yield {"result": "failed", "error": f"did not end within {RANK_LIMIT_S:.0f} s"}
        return
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        yield {"result": "failed", "error": (done.stderr.splitlines() or ["no output"])[-1][:200]}


def simulated_ranks(bench: Bench, sizes: Sequence[int] = SIZES, names: Sequence[str] = ()) -> None:
    """Measure one rank of each layout, and compare its memory with the plan and with the simulation."""
    has_float8 = bench.has_gpu and importlib.util.find_spec("torchao") is not None
    # The simulations need a core of the host each, which the measured rank does not use.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 8)) as pool:
        cases = []
        for num_gpus in sizes:
            for name, values in layouts(num_gpus, bench.device).items():
                if names and name not in names:
                    continue
                found = (
                    plan_that_fits(bench, num_gpus, values) if name != "gather" or has_float8 else NO_FLOAT8
                )
                if isinstance(found, TrainkitError):
                    bench.emit({"table": RANKS, "layout": name, "GPUs": num_gpus, "skipped": str(found)})
                    continue
                for rank in [0, num_gpus - 1] if found[1].layout.pp > 1 else [0]:
                    cases.append((num_gpus, name, rank, found, pool.submit(simulate, *found, rank)))
        for num_gpus, name, rank, (loaded, plan), future in cases:
            for row in run_rank(bench, "rank", loaded, plan, rank):
                simulated = {"simulation GB": round(future.result().peak_bytes["total"] / 1e9, 3)}
                bench.emit({"table": RANKS, "layout": name, "GPUs": num_gpus, **row, **simulated})


PAIRS: dict[str, dict[str, object]] = {
    "FSDP": {"dp_shard": 2},
    "ZeRO-2": {"dp_shard": 2, "zero": 2},
    "replicate": {"dp_replicate": 2},
    "TP": {"tp": 2},
    "CP": {"cp": 2},
    "FSDP, compiled": {"dp_shard": 2, "compile": True},
}
"""Maps the name of a layout of two ranks to its values of the section `parallel`."""
EXACT = ("train.deterministic=true", "train.steps=6")
CHAINS = {
    "2, 1 and 2 ranks": (2, 1, 2),
    "2, 1 and 2 ranks, again": (2, 1, 2),
    "2 ranks, resumed twice": (2, 2, 2),
}
"""Maps the name of a run of six steps to its number of ranks in each third of the run."""
SAME_BITS = {"2, 1 and 2 ranks, again": "2, 1 and 2 ranks", "2 ranks, resumed twice": "FSDP"}
"""Maps the name of a run to the run whose losses and gradient norms must be equal."""


def train_exactly(rank: int, attempt: AttemptDir) -> None:
    """Train as one rank, with the kernels that the ranks of a run select."""
    from tests.support.parity import train
    from trainkit.trainer.worker import fix_kernels

    config, plan = read_effective(attempt.config_file), LaunchPlan.read(attempt.plan_file)
    fix_kernels(plan, config.train.deterministic)
    train(rank, attempt)


def two_ranks(
    bench: Bench, pairs: Sequence[str] = tuple(PAIRS), chains: Sequence[str] = tuple(CHAINS)
) -> None:
    """Compare six steps of two ranks with one process, and resume on other numbers of ranks."""
    from tests.support.parity import Case, curve, run_cases, worst_difference

    os.environ["TEST_DEVICE"] = bench.device
    folder = bench.folder / "two-ranks"
    folder.mkdir()
    num_gpus = torch.cuda.device_count() if bench.has_gpu else 0
    limit = 1e-4 if bench.has_gpu else 1e-5

    def train(name: str, num_procs: int, values: dict[str, object], *options: str) -> None:
        case = Case(name, num_procs, {"compile": False, **values}, options)
        run_cases(folder, [case], [f"device={bench.device}", *EXACT], function=train_exactly)

    train("alone", 1, {})
    for name in (*pairs, *chains):
        row: Row = {"table": PAIR, "backend": "nccl" if num_gpus > 1 else "gloo", "device": bench.device}
        try:
            if name in PAIRS:
                train(name, 2, PAIRS[name])
            for third, num_procs in enumerate(CHAINS.get(name, ()), 1):
                stop = (f"train.stop_at_step={2 * third}",) if third < 3 else ()
                train(name, num_procs, {"dp_shard": num_procs}, *stop)
            other = SAME_BITS.get(name, "alone")
            found = worst_difference(folder / name, folder / other)
            same = curve(folder / name) == curve(folder / other)
            is_good = same if name in SAME_BITS else found <= limit
            row |= {"case": name, "compared with": other, "largest difference": found, "equal bits": same}
            bench.emit({**row, "result": "passed" if is_good else "failed"})
        except (TrainkitError, RuntimeError, AssertionError, ValueError, OSError) as error:
            bench.emit({**row, "case": name, "result": "failed", "error": str(error)[:200]})


def emulated_network(bench: Bench, names: Sequence[str] = ()) -> None:
    """Measure the communication that a step of FSDP does not hide, on links of two bandwidths."""
    summed = f"train.global_batch_size={2 * 8 * (1 if bench.has_gpu else 2)}"
    cases = {
        "FSDP, ZeRO-3": ("parallel.dp_shard=8", "parallel.zero=3", summed),
        "FSDP, ZeRO-2": ("parallel.dp_shard=8", "parallel.zero=2", summed),
        "replicate 2 x shard 4": ("parallel.dp_replicate=2", "parallel.dp_shard=4", summed),
    }
    for name, values in cases.items():
        if names and name not in names:
            continue
        found = plan_that_fits(bench, 8, values)
        rows: Iterable[Row] = (
            [{"skipped": str(found)}]
            if isinstance(found, TrainkitError)
            else run_rank(bench, "network", *found, 0)
        )
        for row in rows:
            bench.emit({"table": NETWORK, "layout": name, "GPUs": 8, **row})


def staging(bench: Bench) -> None:
    """Measure a save of the state of one rank of 8 during training."""
    found = plan_that_fits(bench, 8, ("parallel.dp_shard=8",))
    skipped = isinstance(found, TrainkitError)
    for row in [{"skipped": str(found)}] if skipped else run_rank(bench, "staging", *found, 0):
        bench.emit({"table": SAVES, **row})


def interruptions(bench: Bench, scenarios: Sequence[str] = SCENARIOS) -> None:
    """Interrupt a run with two ranks, and stop one of two ranks, which the diagnosis must name."""
    from benchmarks.hangs import Case, run_case

    device = "cuda" if bench.has_gpu and torch.cuda.device_count() > 1 else "cpu"
    base: Row = {"table": INTERRUPTED, "backend": "nccl" if device == "cuda" else "gloo"}
    only = [word for name in scenarios for word in ("--only", name)]
    found = trainkit(
        bench, "drill", "quickstart", "--nproc", "2", "--steps", "24", f"--set=device={device}", *only
    )
    for item in found["scenarios"]:
        bench.emit({**base, "case": item["scenario"], "result": item["state"], "found": item["message"]})
    verdict, text = run_case(Case("stopped", "trainer", 2, (1,), device))
    result = "passed" if verdict == "right" else "failed"
    bench.emit({**base, "case": "SIGSTOP of rank 1", "result": result, "found": text})


def several_gpus(bench: Bench) -> None:
    """Run the layouts, `doctor` and `bench layouts` on two or more GPUs, or on two processes of a CPU."""
    num_ranks = torch.cuda.device_count() if bench.has_gpu else 2
    if num_ranks < 2:
        bench.emit({"table": SEVERAL, "case": "all", "skipped": "needs two GPUs, this machine has one"})
        return
    where = "--nproc", str(num_ranks), f"--set=device={bench.device}"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/gpu"]
    environ = {**os.environ, "TEST_DEVICE": bench.device}
    done = subprocess.run(
        [*argv, "-k", "layouts"], cwd=ROOT, env=environ, stdout=sys.stderr, timeout=RANK_LIMIT_S
    )
    bench.emit({"table": SEVERAL, "case": "layouts", "result": "failed" if done.returncode else "passed"})
    for check in trainkit(bench, "doctor", "quickstart", *where)["checks"]:
        result = "failed" if check["state"] == "failure" else check["state"]
        found = {"case": f"doctor: {check['name']}", "result": result, "found": check["value"]}
        bench.emit({"table": SEVERAL, **found})
    ways = [f"--layout={key}={num_ranks}" for key in ("dp_shard", "dp_replicate", "tp", "cp")]
    config = ("models/1b",) if bench.has_gpu else ("quickstart", "--set=model.num_kv_heads=4")
    for row in trainkit(bench, "bench", "layouts", *config, "--steps", "10", *ways, *where)["rows"]:
        bench.emit({"table": MEASURED, **{name: value for name, value in row.items() if value is not None}})


def trainkit(bench: Bench, *argv: str) -> Any:
    """Return what a command of trainkit prints with `--json`."""
    command = [sys.executable, "-m", "trainkit", *argv, "--json"]
    done = subprocess.run(command, cwd=bench.folder, capture_output=True, text=True, timeout=RANK_LIMIT_S)
    print(done.stderr, file=sys.stderr)
    return json.loads(done.stdout)


def measure_world(bench: Bench) -> None:
    """Write all rows, the most informative ones first; a function that fails is a row, and the others run."""
    parts: dict[str, Callable[[Bench], None]] = {
        "simulated_ranks, 8 GPUs": lambda bench: simulated_ranks(bench, SIZES[:1]),
        "two_ranks": two_ranks,
        "emulated_network": emulated_network,
        "staging": staging,
        "interruptions": interruptions,
        "several_gpus": several_gpus,
        "simulated_ranks, more GPUs": lambda bench: simulated_ranks(
            bench, SIZES[1:] if bench.has_gpu else ()
        ),
    }
    for name, part in parts.items():
        try:
            part(bench)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"[:200]
            bench.emit({"table": FAILED, "function": name, "result": "failed", "error": text})


def rows_of_rank(mode: str, folder: Path, rank: int, kind: str) -> Iterable[Row]:
    """Return the rows of the rank whose config and plan are in `folder`, on a device of a kind."""
    config = read_effective(folder / "config.yaml", executes=False)
    plan = LaunchPlan.read(folder / "plan.json", executes=False)
    device = torch.device(kind)
    if mode == "network":
        return measure_network(config, plan, rank, device)
    if mode == "staging":
        return measure_staging(config, plan, rank, device, folder)
    return [measure_rank(config, plan, rank, device)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("rank", "network", "staging"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("device", choices=("cuda", "cpu"))
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    for row in rows_of_rank(args.mode, args.folder, args.rank, args.device):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
