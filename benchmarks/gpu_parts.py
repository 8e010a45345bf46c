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
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import async_save
from torch.profiler import ProfilerActivity, profile

from benchmarks.training_loop import make_attempt
from trainkit.config import read_effective
from trainkit.config.running import ParallelConfig, Recomputation
from trainkit.config.training import ModelConfig
from trainkit.job.signals import StopRequest
from trainkit.plan import step_work
from trainkit.plan.gpus import peak_flops
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
from trainkit.trainer.models.decoder import INIT_STD, Decoder
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
    """True if trainkit keeps running averages in float32; otherwise the hand-written loop keeps all values in
    bf16."""
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

    def hand_written_bytes(self) -> int:
        """Return the peak bytes of the hand-written loop, which recomputes nothing and keeps all logits.

        The sum includes weights, gradients and averages with the copies made by autocast, the activations,
        and the logits in float32 with their log-probabilities and gradients.
        """
        work = self.work("none")
        a_param = 4 + 4 + 8 + 2 if self.has_float32_averages else 2 + 2 + 4
        logits = work.tokens_per_pass * self.vocab_size * (2 + 3 * 4)
        return a_param * num_params(self.shape) + self.shape.num_layers * block_bytes(work) + logits


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
    has_hand_written: bool
    """True if the hand-written loop also fits into memory."""


def choose(part: str, bench: Bench) -> Choice | None:
    """Return the first case of a part for which both loops, or at least trainkit, fit into memory.

    Without a GPU, the chosen case is reduced to a tiny size. Returns None, and writes a row with the reason,
    if no case fits.
    """
    modes = [(case, case.mode(bench.usable_bytes)) for case in CASES[part]]
    found = [
        Choice(case, mode, case.hand_written_bytes() <= bench.usable_bytes)
        for case, mode in modes
        if mode is not None
    ]
    if not found:
        least = CASES[part][-1]
        bench.skip(least.preset, "trainkit", memory_of(least.work("full")).peak)
        return None
    best = next((choice for choice in found if choice.has_hand_written), found[0])
    if not best.has_hand_written:
        bench.skip(best.case.preset, "hand-written", best.case.hand_written_bytes())
    if bench.has_gpu:
        return best
    return best._replace(case=TINY if best.case.accumulation == 1 else TINY_SUMMED)


class Loop(NamedTuple):
    """A training loop: a step function, and the function for the weight update within a step."""

    step: Callable[[], object]
    optimizer: Any


MakeLoop = Callable[[], Iterator[Loop]]


@dataclass
class Times:
    """The measurements of a loop."""

    steps_s: list[float]
    updates_s: list[float]
    """Durations of the weight update in additional steps; the host synchronizes with the device around each
    update."""
    peak_gb: float | None = None


def measure(make: MakeLoop, num_steps: int, device: str) -> Times:
    """Measure a single loop; its model is freed when this function returns."""
    reset_peak(device)
    with contextmanager(make)() as loop:
        found = Times([timed(loop.step, device) for _ in range(num_steps)], time_updates(loop, device))
        found.peak_gb = peak_gb(device)
    return found


def measure_in_turns(loops: dict[str, MakeLoop], num_steps: int, device: str) -> dict[str, Times]:
    """Measure loops that fit into memory together, alternating between their steps."""
    contexts = [contextmanager(make)() for make in loops.values()]
    made = dict(zip(loops, [context.__enter__() for context in contexts], strict=True))
    found = {name: Times([], []) for name in loops}
    for number in range(num_steps):
        for name in list(made) if number % 2 else reversed(made):
            found[name].steps_s.append(timed(made[name].step, device))
    for name, loop in made.items():
        found[name].updates_s = time_updates(loop, device)
    for context in contexts:
        context.__exit__(None, None, None)
    return found


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
    """Measure the steps of trainkit and of the hand-written loop for one model; write one row per loop."""
    choice = choose(part, bench)
    if choice is None:
        return
    case, mode = choice.case, choice.recompute
    device = bench.device
    loops: dict[str, MakeLoop] = {
        "trainkit": lambda: trainkit_loop(case, device, bench.folder / "compiled", mode),
        "hand-written": lambda: hand_written_loop(case, device),
    }
    if not choice.has_hand_written:
        del loops["hand-written"]
    if part == "350m":
        eager = bench.folder / "eager"
        loops["trainkit, eager"] = lambda: trainkit_loop(case, device, eager, mode, compiled=False)
        for name, times in measure_in_turns(loops, case.steps, device).items():
            bench.emit(speed_row(case, bench, name, mode, times))
        measure_float32(replace(case, batch_size=case.batch_size // 2), bench, mode)
        return
    for name, make in loops.items():
        times = measure(make, case.steps, device)
        bench.emit(speed_row(case, bench, name, mode if name == "trainkit" else "none", times))


def measure_float32(case: Case, bench: Bench, mode: Recomputation) -> None:
    """Measure trainkit's steps in float32, with matrix products in float32 or in TF32."""
    for name, has_tf32 in (("float32", False), ("TF32", True)):
        torch.set_float32_matmul_precision("high" if has_tf32 else "highest")  # as in the ranks of a run
        options = "precision.dtype=fp32", f"precision.tf32={json.dumps(has_tf32)}"
        make = partial(trainkit_loop, case, bench.device, bench.folder / name, mode, options=options)
        row = speed_row(case, bench, f"trainkit, {name}", mode, measure(make, case.steps, bench.device))
        bench.emit({**row, "MFU": None})  # the MFU is based on the peak performance in bf16


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
    options = {"mask of documents, computed": masked, "mask of documents, read": masked}
    if bench.has_gpu and importlib.util.find_spec("torchao") is not None:
        options |= {"float8": ("precision.float8=true",), "float8, rowwise": ("precision.float8=rowwise",)}
    else:
        bench.emit({"model": "1b", "loop": "trainkit, float8", "skipped": "no GPU, or no torchao"})
    for name, values in options.items():
        make = partial(
            *(trainkit_loop, choice.case, bench.device, bench.folder / name, choice.recompute),
            options=values,
        )
        computes = step_work.attends_in_blocks
        with patch.object(build, "attends_in_blocks", computes if "read" not in name else lambda *_: False):
            times = measure(make, choice.case.steps, bench.device)
        bench.emit(speed_row(choice.case, bench, f"trainkit, {name}", choice.recompute, times))


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
    """Return the median speed of a loop, excluding the first steps, which include compilation."""
    step_s = statistics.median(times.steps_s[WARM_UP:])
    tokens_per_s = case.accumulation * case.batch_size * case.seq_len / step_s
    peak_rate = peak_flops(torch.cuda.get_device_name(), "bf16") if bench.has_gpu else None
    flops = flops_per_token(case.shape, case.seq_len)
    update_s = statistics.median(times.updates_s) if times.updates_s else None
    return {
        "model": f"{case.preset}, {case.accumulation} x {case.batch_size} x {case.seq_len}",
        "loop": loop,
        "recomputation": mode,
        "tokens/s": round(tokens_per_s),
        "MFU": None if peak_rate is None else round(tokens_per_s * flops / peak_rate, 3),
        "step ms": round(1000 * step_s, 1),
        "of it update ms": None if update_s is None else round(1000 * update_s, 1),
        "peak GB": times.peak_gb,
        "first step s": round(times.steps_s[0], 1),
    }


def trainkit_loop(
    case: Case,
    device: str,
    folder: Path,
    mode: Recomputation,
    *,
    compiled: bool = True,
    options: tuple[str, ...] = (),
) -> Iterator[Loop]:
    """Yield trainkit's trainer without validation and saves; on a GPU in bf16, unless `options` differ."""
    folder.mkdir()
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


def hand_written_loop(case: Case, device: str) -> Iterator[Loop]:
    """Yield a carefully optimized hand-written loop with the same model and batch."""
    uses_gpu = device == "cuda"
    with torch.device(device):
        model = Decoder(case.shape, case.seq_len).to(device)  # the host computes a table of angles
    for param in model.parameters():
        nn.init.normal_(param, std=INIT_STD)
    if not case.has_float32_averages:
        for param in model.parameters():
            param.data = param.data.bfloat16()
    if uses_gpu:
        for block in model.layers:
            block.compile()

    def compute_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    loss_of = torch.compile(compute_loss) if uses_gpu else compute_loss
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = torch.randint(0, 256, (case.batch_size, case.seq_len + 1), device=device)
    keys = torch.zeros(case.batch_size, dtype=torch.int32, device=device)
    has_autocast = case.has_float32_averages and uses_gpu

    def step() -> None:
        for _ in range(case.accumulation):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=has_autocast):
                logits = model(tokens[:, :-1], keys)
            (loss_of(logits, tokens[:, 1:]) / case.accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield Loop(step, optimizer)


def hugging_face(bench: Bench) -> None:
    """Measure a Llama model of transformers, which the transformers Trainer compiles and trains."""
    if importlib.util.find_spec("transformers") is None:
        bench.emit({"model": "1b", "loop": "Hugging Face Trainer", "skipped": "no transformers"})
        return
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    choice = choose("1b", bench)
    if choice is None or not choice.has_hand_written:
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
    tokens = torch.randint(0, 256, (case.batch_size * case.steps, case.seq_len))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    options: Any = TrainingArguments(
        output_dir=str(bench.folder / "hugging-face"),
        max_steps=case.steps,
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
    times = Times([], [])

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began_s = synchronized_s(bench.device)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.steps_s.append(synchronized_s(bench.device) - self.began_s)

    Trainer(model, options, train_dataset=samples, callbacks=[Clock()]).train()
    times.peak_gb = peak_gb(bench.device)
    bench.emit(speed_row(case, bench, "Hugging Face Trainer", "none", times))


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
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device: str) -> float | None:
    """Return the peak tensor memory since the last reset, in GB."""
    return round(torch.cuda.max_memory_allocated() / 1e9, 1) if device == "cuda" else None


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
    saver = CheckpointSaver(RunDir(folder).attempt(1), world, state, keep_last=1)
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
    with contextmanager(trainkit_loop)(case, bench.device, bench.folder / "profiled", mode) as loop:
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
