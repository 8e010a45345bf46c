"""Parts of `benchmarks.gpu`. Each part runs in a separate process.

    python -m benchmarks.gpu_parts PART DEVICE FOLDER USABLE_BYTES

A part appends each row to FOLDER/rows.jsonl as soon as the row is known, so that the finished rows of an
interrupted part are kept.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import async_save
from torch.profiler import ProfilerActivity, profile

from benchmarks.training_loop import (
    MAX_CHUNK_LOGITS,
    OPPONENTS,
    Loop,
    hand_written_loop,
    make_attempt,
    start_group_of_one,
)
from benchmarks.world import measure_world
from trainkit.config import read_effective
from trainkit.config.running import ParallelConfig, Recomputation
from trainkit.config.training import ModelConfig
from trainkit.job.signals import StopRequest
from trainkit.plan import step_work
from trainkit.plan.gpus import peak_flops
from trainkit.plan.keep import KeepRule
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.memory import block_bytes, memory_of
from trainkit.plan.model_shape import ModelShape, flops_per_token, num_params, resolve_model_shape
from trainkit.plan.step_work import StepWork
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir
from trainkit.trainer import build
from trainkit.trainer.build import build_task
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest
from trainkit.trainer.distributed import ONE_PROCESS, World
from trainkit.trainer.loop import Trainer as OwnTrainer
from trainkit.trainer.parallel.context import Attend, cudnn_attention_to_last, masked_attention_to_last
from trainkit.trainer.profiler import summary_of
from trainkit.trainer.progress import Progress
from trainkit.trainer.torch_private import flash_attention_to_last

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
MODES: tuple[Recomputation, ...] = get_args(Recomputation)


@dataclass(frozen=True)
class Bench:
    """The device of a part, and the file of its rows."""

    device: str
    folder: Path
    usable_bytes: int
    """Memory of the GPU that a plan may use."""

    @property
    def has_gpu(self) -> bool:
        return self.device == "cuda"

    def emit(self, row: Row) -> None:
        """Append a row to the file that `benchmarks.gpu` reads."""
        with (self.folder / "rows.jsonl").open("a") as stream:
            stream.write(json.dumps(row) + "\n")

    def skip(self, model: str, loop: str, needed_bytes: int) -> None:
        """Append a row with the reason why a loop was not measured."""
        needs, usable = (f"{number / 2**30:.1f} GiB" for number in (needed_bytes, self.usable_bytes))
        self.emit({"model": model, "loop": loop, "skipped": f"needs {needs}, usable are {usable}"})


class TestRows:
    """A pytest plugin that appends a row after each test."""

    __test__ = False

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("::")[2]
            self._bench.emit({"test": name, "result": report.outcome, "seconds": round(report.duration, 1)})


def run_tests(bench: Bench) -> None:
    """Run the tests of tests/gpu and write a row for each test."""
    os.environ["TEST_DEVICE"] = bench.device
    argv = ["-q", "-p", "no:cacheprovider", "--tb=short", str(ROOT / "tests" / "gpu")]
    pytest.main([*argv, *(("--numprocesses", "4") if bench.has_gpu else ())], plugins=[TestRows(bench)])


@dataclass(frozen=True)
class Case:
    """A model to train, with the trainkit options."""

    preset: str
    seq_len: int
    batch_size: int
    vocab_size: int
    accumulation: int = 1
    has_float32_averages: bool = True
    """True if trainkit keeps running averages in float32, else in bf16."""
    steps: int = 12

    @property
    def shape(self) -> ModelShape:
        return resolve_model_shape(ModelConfig(preset=self.preset, vocab_size=self.vocab_size), 1)  # type: ignore[arg-type]

    def work(self, recompute: Recomputation) -> StepWork:
        """Return the properties of a step that the planner needs."""
        parallel = ParallelConfig(activation_checkpointing=recompute)
        sizes = self.seq_len, self.batch_size, self.accumulation
        averages = 8 if self.has_float32_averages else 4
        return StepWork(self.shape, ONE_PROCESS, parallel, *sizes, optimizer_bytes=averages)

    def mode(self, usable_bytes: int) -> Recomputation | None:
        """Return the least recomputation that lets trainkit fit into memory, or None if no mode does."""
        fits = (mode for mode in MODES if memory_of(self.work(mode)).peak <= usable_bytes)
        return next(fits, None)

    def bytes_of(self, loop: str, recompute: Recomputation = "none") -> int:
        """Return the estimated peak bytes of trainkit, or of a loop of `OPPONENTS`, which recomputes nothing.

        For the opponents, the sum includes weights, gradients, averages and bf16 copies, the activations, and
        the logits in float32 with their log-probabilities and gradients.
        """
        work = self.work(recompute)
        if loop == "trainkit":
            return memory_of(work).peak
        a_param = 2 + 2 + 4 if loop == "bound" else 4 + 4 + 8 + 2
        logits = work.tokens_per_pass * self.vocab_size
        kept = min(logits, MAX_CHUNK_LOGITS) if loop == "careful" else logits
        activations = self.shape.num_layers * block_bytes(self.work("none"))
        return a_param * num_params(self.shape) + activations + kept * (2 + 3 * 4)

    def bytes_together(self, peaks: dict[str, int]) -> int:
        """Return the peak bytes of alternating loops, which keep only weights and averages between steps."""
        averages = 8 if self.has_float32_averages else 4
        kept = {"trainkit": 2 + 4 + averages, "careful": 4 + 8, "autocast": 4 + 8, "bound": 2 + 4}
        states = {name: kept[name] * num_params(self.shape) for name in peaks}
        return sum(states.values()) + max(peak - states[name] for name, peak in peaks.items())


CASES: dict[str, tuple[Case, ...]] = {
    "350m": (Case("350m", 2048, 8, 32000, steps=20),),
    "1b": (Case("1b", 4096, 4, 128256), Case("1b", 4096, 2, 128256)),
    "large": (
        Case("8b", 4096, 1, 128256, accumulation=8, has_float32_averages=False, steps=6),
        Case("3b", 4096, 1, 128256, accumulation=8, steps=6),
        Case("3b", 4096, 1, 128256, accumulation=8, has_float32_averages=False, steps=6),
    ),
}
"""Maps a part to its cases, largest first; the first case that fits is measured."""
TINY = Case("nano", 32, 2, 320, steps=4)
TINY_SUMMED = replace(TINY, accumulation=2, has_float32_averages=False)
WARM_UP = 2


class Choice(NamedTuple):
    """A case that fits into memory."""

    case: Case
    recompute: Recomputation
    opponents: tuple[str, ...]
    """The loops of `OPPONENTS` that also fit into memory."""
    fit_together: bool
    """True if trainkit and these opponents fit into memory at the same time."""


def choose(part: str, bench: Bench) -> Choice | None:
    """Return the first case of a part that fits into memory with an opponent, or else with trainkit alone.

    Without a GPU, the chosen case is reduced to a tiny size. Writes a row with the reason for each opponent
    that does not fit. Returns None, and writes a row with the reason, if no case fits.
    """
    modes = [(case, case.mode(bench.usable_bytes)) for case in CASES[part]]
    found = []
    for case, mode in modes:
        if mode is None:
            continue
        opponents = tuple(name for name in OPPONENTS if case.bytes_of(name) <= bench.usable_bytes)
        peaks = {name: case.bytes_of(name, mode) for name in ("trainkit", *opponents)}
        found.append(Choice(case, mode, opponents, case.bytes_together(peaks) <= bench.usable_bytes))
    if not found:
        least = CASES[part][-1]
        bench.skip(least.preset, "trainkit", least.bytes_of("trainkit", "full"))
        return None
    best = next((choice for choice in found if choice.opponents), found[0])
    for name in OPPONENTS:
        if name not in best.opponents:
            bench.skip(best.case.preset, name, best.case.bytes_of(name))
    if bench.has_gpu:
        return best
    return best._replace(case=TINY if best.case.accumulation == 1 else TINY_SUMMED)


MakeLoop = Callable[[], Iterator[Loop]]


@dataclass
class Times:
    """The measurements of a loop."""

    first_s: float = 0.0
    """Duration of the first step, which includes compilation."""
    steps_s: list[float] = field(default_factory=list)
    """Durations of the steps after `WARM_UP` steps."""
    updates_s: list[float] = field(default_factory=list)
    """Durations of the weight update in additional steps; the host synchronizes with the device around each
    update."""
    peak_gb: float | None = None
    """Peak tensor memory in GB of this loop alone."""
    conditions: list[Row] = field(default_factory=list)
    """The state of the GPU after each of the steps."""


def measure_in_turns(
    loops: dict[str, MakeLoop], num_steps: int, device: str, *, together: bool
) -> dict[str, Times]:
    """Measure loops that take turns, so that changes in the GPU's speed affect all loops equally.

    If the loops fit into memory `together`, they alternate after every step. Otherwise, each loop is built
    and measured twice, in the order A, B, A, B.
    """
    found = {name: Times() for name in loops}
    groups = [loops] if together else [{name: make} for name, make in loops.items()] * 2
    for group in groups:
        measure_group(group, found, num_steps if together else -(-num_steps // 2), device)
    return found


def measure_group(group: dict[str, MakeLoop], found: dict[str, Times], num_steps: int, device: str) -> None:
    """Measure loops that alternate after every step; their models are freed when this function returns."""
    reset_peak(device)
    with ExitStack() as stack:
        made = {}
        for name, make in group.items():
            before_gb = start_peak(device)
            made[name] = stack.enter_context(contextmanager(make)())
            warm_s = [timed(made[name].step, device) for _ in range(WARM_UP)]
            found[name].first_s = max(warm_s[0], found[name].first_s)
            if before_gb is not None:
                found[name].peak_gb = round(torch.cuda.max_memory_allocated() / 1e9 - before_gb, 1)
        for number in range(num_steps):
            for name in list(made) if number % 2 else reversed(made):
                found[name].steps_s.append(timed(made[name].step, device))
                found[name].conditions.append(conditions(device))
        for name, loop in made.items():
            found[name].updates_s += time_updates(loop, device)


def conditions(device: str) -> Row:
    """Return the clocks in MHz and the temperature of the GPU; empty on a CPU or a slice of a GPU."""
    if device == "cpu" or "MIG" in torch.cuda.get_device_name():
        return {}
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    return {
        "SM MHz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "memory MHz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
        "°C": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    }


def time_updates(loop: Loop, device: str, num_steps: int = 2) -> list[float]:
    """Return the durations of the weight update in additional steps, in seconds."""
    times_s: list[float] = []
    update = loop.optimizer.step

    def timed_update(*args: Any) -> None:
        times_s.append(timed(partial(update, *args), device))

    loop.optimizer.step = timed_update
    for _ in range(num_steps):
        loop.step()
    loop.optimizer.step = update
    return times_s


def train_model(part: str, bench: Bench) -> None:
    """Measure the steps of trainkit and of the hand-written loops for one model; write one row per loop."""
    choice = choose(part, bench)
    if choice is None:
        return
    case, mode, device = choice.case, choice.recompute, bench.device
    loops: dict[str, MakeLoop] = {"trainkit": partial(trainkit_loop, case, bench, mode)}
    loops |= {name: partial(opponent_loop, name, case, device) for name in choice.opponents}
    if part == "350m":
        loops["trainkit, eager"] = partial(trainkit_loop, case, bench, mode, compiled=False)
    emit_speeds(bench, case, mode, loops, together=choice.fit_together)
    if part == "350m":
        measure_float32(replace(case, batch_size=case.batch_size // 2), bench, mode)


def emit_speeds(
    bench: Bench, case: Case, mode: Recomputation, loops: dict[str, MakeLoop], *, together: bool
) -> None:
    """Measure loops in turns, and write one row per loop."""
    with process_group(bench.device) if set(OPPONENTS) & set(loops) else nullcontext():
        for name, times in measure_in_turns(loops, case.steps, bench.device, together=together).items():
            bench.emit(speed_row(case, bench, name, "none" if name in OPPONENTS else mode, times))


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Make this process the only rank of a process group."""
    start_group_of_one(device)
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()  # gloo's threads may otherwise abort the process at its end


def measure_float32(case: Case, bench: Bench, mode: Recomputation) -> None:
    """Measure trainkit's steps in float32, with matrix products in float32 or in TF32."""

    def make(has_tf32: bool) -> Iterator[Loop]:
        precision = "high" if has_tf32 else "highest"  # as in the ranks of a run
        torch.set_float32_matmul_precision(precision)
        options = "precision.dtype=fp32", f"precision.tf32={json.dumps(has_tf32)}"
        yield from trainkit_loop(case, bench, mode, options=options)

    loops = {f"trainkit, {name}": partial(make, name == "TF32") for name in ("float32", "TF32")}
    for name, times in measure_in_turns(loops, case.steps, bench.device, together=False).items():
        # The MFU would be based on the peak performance in bf16.
        bench.emit({**speed_row(case, bench, name, mode, times), "MFU": None, "MFU, causal": None})


def measure_options(bench: Bench) -> None:
    """Measure trainkit's steps on 1b with other attention kernels, on short texts, and with float8."""
    choice = choose("1b", bench)
    if choice is None:
        return
    texts = bench.folder / "texts"
    texts.mkdir()
    for number in range(100):
        (texts / f"{number}.txt").write_text("text " * 204 + "\n")
    masked = f"data.source={texts}", "data.tokenizer=bytes", "data.document_mask=true"

    def loop(name: str, *options: str) -> Iterator[Loop]:
        computes = step_work.attends_in_blocks if "read" not in name else lambda *_: False
        with patch.object(build, "attends_in_blocks", computes):
            made = trainkit_loop(choice.case, bench, choice.recompute, options=options)
            first = next(made)
        yield first
        yield from made

    masks = {f"trainkit, mask of documents, {way}": masked for way in ("computed", "read")}
    types: dict[str, tuple[str, ...]] = {"trainkit, bf16": ()}
    if bench.has_gpu and importlib.util.find_spec("torchao") is not None:
        types |= {"trainkit, float8": ("precision.float8=true",)}
        types |= {"trainkit, float8, rowwise": ("precision.float8=rowwise",)}
    else:
        types = {}
        bench.emit({"model": "1b", "loop": "trainkit, float8", "skipped": "no GPU, or no torchao"})
    for options in filter(None, (masks, types)):
        loops = {name: partial(loop, name, *values) for name, values in options.items()}
        emit_speeds(bench, choice.case, choice.recompute, loops, together=False)


def context_attention(bench: Bench) -> None:
    """Measure attention with more keys than queries, as in the ranks of 8b with `parallel.cp`."""
    shape = resolve_model_shape(ModelConfig(preset="8b"), 0)
    dtype = torch.bfloat16 if bench.has_gpu else torch.float32
    on_gpu = {"flash": flash_attention_to_last, "cuDNN, merged": cudnn_attention_to_last}
    ways = on_gpu if bench.has_gpu else {"mask": masked_attention_to_last}
    for seq_len, cp in ((8192, 2), (32768, 4), (65536, 8)) if bench.has_gpu else ((256, 2),):
        size = seq_len // (2 * cp)
        for num_chunks in (cp, cp + 1, 2 * cp):
            sizes = (shape.num_heads, size), *2 * [(shape.num_kv_heads, num_chunks * size)]
            inputs = [
                torch.randn(1, heads, length, shape.head_dim, device=bench.device, dtype=dtype)
                for heads, length in sizes
            ]
            times_s: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(WARM_UP + 10):
                for name, attend in ways.items():
                    times_s[name].append(timed(partial(attention_passes, attend, inputs), bench.device))
            found = {name: statistics.median(values[WARM_UP:]) for name, values in times_s.items()}
            bench.emit(
                {"sequence": f"{seq_len}, cp {cp}", "queries": size, "keys": num_chunks * size}
                | {f"{name} ms": round(1000 * seconds, 2) for name, seconds in found.items()}
            )


def attention_passes(attend: Attend, inputs: list[Tensor]) -> None:
    """Run attention forward and backward."""
    leaves = [item.detach().requires_grad_() for item in inputs]
    out = attend(*leaves)
    torch.autograd.grad(out, leaves, leaves[0].detach())


def speed_row(case: Case, bench: Bench, loop: str, mode: Recomputation, times: Times) -> Row:
    """Return the median speed of a loop with its 95 % interval, both kinds of MFU, and the GPU's state."""
    step_s = statistics.median(times.steps_s)
    low_s, high_s = median_interval(times.steps_s)
    tokens = case.accumulation * case.batch_size * case.seq_len
    peak_rate = peak_flops(torch.cuda.get_device_name(), "bf16") if bench.has_gpu else None
    whole, causal = (flops_per_token(case.shape, case.seq_len, causal=half) for half in (False, True))
    mfu = [
        None if peak_rate is None else round(tokens / step_s * one / peak_rate, 3) for one in (whole, causal)
    ]
    found = times.conditions
    medians = {key: round(statistics.median(item[key] for item in found)) for key in (found or [{}])[0]}
    return {
        "model": f"{case.preset}, {case.accumulation} x {case.batch_size} x {case.seq_len}",
        "loop": loop,
        "recomputation": mode,
        "tokens/s": round(tokens / step_s),
        "95 %": f"{tokens / high_s:.0f} to {tokens / low_s:.0f}",
        "MFU": mfu[0],
        "MFU, causal": mfu[1],
        "step ms": round(1000 * step_s, 1),
        "of it update ms": round(1000 * statistics.median(times.updates_s), 1) if times.updates_s else None,
        "peak GB": times.peak_gb,
        "first step s": round(times.first_s, 1),
        **medians,
        "steps_ms": [round(1000 * seconds, 2) for seconds in times.steps_s],
    }


def trainkit_loop(
    case: Case,
    bench: Bench,
    mode: Recomputation,
    *,
    compiled: bool = True,
    options: tuple[str, ...] = (),
) -> Iterator[Loop]:
    """Yield trainkit's trainer without validation and saves; on a GPU in bf16, unless `options` differ."""
    device, folder = bench.device, Path(tempfile.mkdtemp(dir=bench.folder))
    compiles = json.dumps(compiled and device == "cuda")
    overrides = [
        *(f"device={device}", f"model.preset={case.preset}", f"model.vocab_size={case.vocab_size}"),
        *(f"data.seq_len={case.seq_len}", f"train.device_batch_size={case.batch_size}"),
        f"train.global_batch_size={case.batch_size * case.accumulation}",
        *("train.steps=1000", "train.eval_every=null", "checkpoint.every_steps=null"),
        *("checkpoint.async=false", "logging.tensorboard=false"),
        f"precision.dtype={'bf16' if device == 'cuda' else 'fp32'}",
        *(f"parallel.activation_checkpointing={mode}", f"parallel.compile={compiles}"),
        *(() if case.has_float32_averages else ("optimizer.state_dtype=bf16",)),
        *options,
    ]
    attempt = make_attempt(folder, overrides, 1)
    config = read_effective(attempt.config_file)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    world = World(0, 1, torch.device(device), None, None)
    trainer = OwnTrainer(attempt, plan, world, build_task(config), StopRequest(), Progress())
    # The ranks of a run also enable this option, but the hand-written loop does not.
    fixed = torch._inductor.config.patch(deterministic=True)
    yield Loop(fixed(trainer.step), trainer.optimizer)
    trainer.batches.close()
    trainer.saver.close()


def opponent_loop(kind: str, case: Case, device: str) -> Iterator[Loop]:
    """Yield a loop of `OPPONENTS` with the same model and batch, on a CPU in float32."""
    tokens = torch.randint(0, 256, (case.batch_size, case.seq_len + 1), device=device)
    keys = torch.zeros(case.batch_size, dtype=torch.int32, device=device)
    micros = [(tokens[:, :-1], tokens[:, 1:], keys)] * case.accumulation
    yield hand_written_loop(kind, case.shape, micros, "bf16" if device == "cuda" else "fp32")


def hugging_face(bench: Bench) -> None:
    """Measure a Llama model of transformers, which the transformers Trainer compiles and trains."""
    if importlib.util.find_spec("transformers") is None:
        bench.emit({"model": "1b", "loop": "Hugging Face Trainer", "skipped": "no transformers"})
        return
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    choice = choose("1b", bench)
    if choice is None or "autocast" not in choice.opponents:
        return  # the row contains the reason: this loop needs at least as much memory
    case, shape = choice.case, choice.case.shape
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.dim,
            intermediate_size=shape.ffn_dim,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=case.seq_len,
        )
    )
    num_steps = WARM_UP + case.steps
    tokens = torch.randint(0, 256, (case.batch_size * num_steps, case.seq_len))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    options: Any = TrainingArguments(
        output_dir=str(bench.folder / "hugging-face"),
        max_steps=num_steps,
        per_device_train_batch_size=case.batch_size,
        bf16=bench.has_gpu,
        torch_compile=bench.has_gpu,
        use_cpu=not bench.has_gpu,
        optim="adamw_torch_fused",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    all_s: dict[str, list[float]] = {"trainkit": [], "Hugging Face Trainer": []}
    states: list[Row] = []
    peaks = {name: case.bytes_of(name, choice.recompute) for name in ("trainkit", "autocast")}
    both = case.bytes_together(peaks) <= bench.usable_bytes
    reset_peak(bench.device)
    make = partial(trainkit_loop, case, bench, choice.recompute) if both else no_loop
    with contextmanager(make)() as own:
        before_gb = start_peak(bench.device)

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                all_s["trainkit"].append(timed(own.step, bench.device))
                self.began_s = synchronized_s(bench.device)

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                all_s["Hugging Face Trainer"].append(synchronized_s(bench.device) - self.began_s)
                states.append(conditions(bench.device))

        Trainer(model, options, train_dataset=samples, callbacks=[Clock()]).train()
    for name, steps_s in all_s.items():
        times = Times(steps_s[0], steps_s[WARM_UP:], conditions=states[WARM_UP:])
        if name != "trainkit" and before_gb is not None and not both:
            times.peak_gb = round(torch.cuda.max_memory_allocated() / 1e9 - before_gb, 1)
        if name != "trainkit" or both:
            mode = choice.recompute if name == "trainkit" else "none"
            bench.emit(speed_row(case, bench, name, mode, times))


def no_loop() -> Iterator[Loop]:
    """Yield a loop that does nothing."""
    yield Loop(lambda: None, None)


def synchronized_s(device: str) -> float:
    """Return the time at which the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(step: Callable[[], object], device: str) -> float:
    """Return the duration of a step, including the wait for the device, in seconds."""
    started_s = synchronized_s(device)
    step()
    return synchronized_s(device) - started_s


def reset_peak(device: str) -> None:
    """Free the device memory of earlier loops."""
    torch._dynamo.reset()  # compiled code keeps tensors of the model for which it was compiled
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def start_peak(device: str) -> float | None:
    """Start to measure the peak tensor memory; return the present memory in GB."""
    if device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 1e9


def median_interval(values: Sequence[float], num_resamples: int = 2000) -> tuple[float, float]:
    """Return the middle 95 % of the medians of resamples."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(num_resamples))
    return medians[num_resamples // 40], medians[-1 - num_resamples // 40]


def save_state(bench: Bench) -> None:
    """Measure how long saves of a large state block training; write one row per method of saving."""
    device, folder = bench.device, bench.folder
    num_tensors, elements = (40, 1 << 24) if bench.has_gpu else (4, 1 << 16)
    size = 4 * elements * num_tensors
    free = shutil.disk_usage(folder).free
    if free < 4 * size:  # all methods but the last delete their first save
        gb = f"{4 * size / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB"
        bench.emit({"way": "all", "skipped": f"needs {gb}"})
        return
    state = {f"model.layer{index}": torch.randn(elements, device=device) for index in range(num_tensors)}
    work = torch.randn((8192, 8192) if bench.has_gpu else (64, 64), device=device)
    world = World(0, 1, torch.device(device), None, None)
    saver = CheckpointSaver(RunDir(folder).attempt(1), world, state, KeepRule(last=1))
    saver.allocate_buffers()

    def compute() -> None:
        for _ in range(4):
            work @ work

    def with_torch(number: int) -> Callable[[], bool]:
        with (folder / "plain.pt").open("wb") as stream:
            torch.save(state, stream)
            os.fsync(stream.fileno())
        return lambda: True

    def with_dcp(number: int) -> Callable[[], bool]:
        future: Any = async_save(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
        return lambda: bool(future.done())

    def with_trainkit(number: int) -> Callable[[], bool]:
        saver.save(SaveRequest(number, {}, is_best=False, reason="bench"), blocking=False)
        saver.wait_until_staged()

        def is_saved() -> bool:
            saver.poll()
            return saver.last_step == number

        return is_saved

    ways = {"trainkit": with_trainkit, "torch.save and fsync": with_torch, "DCP async_save": with_dcp}
    compute_s = statistics.median(timed(compute, device) for _ in range(20))
    for number in (1, 2):  # the first save allocates its buffers
        for way, save in ways.items():
            started = time.perf_counter()
            is_saved = save(number)
            call_s = time.perf_counter() - started
            during_s = [timed(compute, device)]
            while not is_saved():
                during_s.append(timed(compute, device))
            row = {
                "way": way,
                "save": "first" if number == 1 else "second",
                "GB": round(size / 1e9, 3),
                "blocked s": round(call_s, 4),
                "saved after s": round(time.perf_counter() - started, 2),
                "step during the save": round(statistics.median(during_s) / compute_s, 2),
            }
            bench.emit(row)
            (folder / "plain.pt").unlink(missing_ok=True)
            shutil.rmtree(folder / "dcp", ignore_errors=True)
    saver.close()


def profile_steps(bench: Bench) -> None:
    """Report the time that three steps of 1b spend in each kind of kernel, and the slowest kernels."""
    choice = choose("1b", bench)
    if choice is None:
        return
    case, mode = choice.case, choice.recompute
    num_steps = 3
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if bench.has_gpu else [])
    with contextmanager(trainkit_loop)(case, bench, mode) as loop:
        for _ in range(WARM_UP + 1):
            timed(loop.step, bench.device)
        with profile(activities=activities) as profiler:
            wall_s = sum(timed(loop.step, bench.device) for _ in range(num_steps))
    found = summary_of(profiler.events(), num_steps, wall_s, cuda=bench.has_gpu)
    for kind, seconds in found["seconds_per_step"].items():
        bench.emit({"kind": kind, "ms per step": round(1000 * seconds, 2)})
    for name, seconds in found["largest_seconds_per_step"].items():
        bench.emit({"kind": f"longest: {name[:90]}", "ms per step": round(1000 * seconds, 2)})


PARTS: dict[str, Callable[[Bench], None]] = {
    "tests": run_tests,
    "1b": partial(train_model, "1b"),
    "profile": profile_steps,
    "large": partial(train_model, "large"),
    "save": save_state,
    "options": measure_options,
    "context": context_attention,
    "350m": partial(train_model, "350m"),
    "hugging-face": hugging_face,
    "world": measure_world,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="One part of `benchmarks.gpu`.")
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("usable_bytes", type=int)
    args = parser.parse_args()
    PARTS[args.part](Bench(args.device, args.folder, args.usable_bytes))


if __name__ == "__main__":
    sys.exit(main())
