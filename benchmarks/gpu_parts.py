"""The parts of `benchmarks.gpu`, each of which runs in a process of its own.

    python -m benchmarks.gpu_parts PART DEVICE FOLDER

writes its rows to FOLDER/rows.json.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from torch.distributed.checkpoint import async_save
from torch.profiler import ProfilerActivity, profile

from benchmarks.training_loop import make_attempt
from trainkit.config import read_effective
from trainkit.config.training import ModelConfig
from trainkit.job.signals import StopRequest
from trainkit.plan.gpus import peak_flops
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.model_shape import flops_per_token, resolve_model_shape
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir
from trainkit.trainer.build import build_task
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest
from trainkit.trainer.distributed import World
from trainkit.trainer.models.decoder import INIT_STD, Decoder
from trainkit.trainer.profiler import summary_of
from trainkit.trainer.progress import Progress
from trainkit.trainer.worker import build_trainer

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


def run_tests(name: str, device: str, folder: Path) -> list[Row]:
    """The tests of tests/gpu, one row each."""
    report = folder / "tests.xml"
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "tests/gpu",
    ]
    if device == "cuda" and importlib.util.find_spec("xdist") is not None:
        argv += ["--numprocesses", "4"]
    subprocess.run(argv, cwd=ROOT, env={**os.environ, "TEST_DEVICE": device})

    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        failed = [kind for kind in ("failure", "error") if case.find(kind) is not None]
        result = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
        rows.append({"test": case.get("name"), "result": result, "seconds": float(case.get("time") or 0)})
    return rows


@dataclass(frozen=True)
class Case:
    """A model to train, with the options of trainkit that fit it on one GPU."""

    preset: str
    seq_len: int
    batch_size: int
    vocab_size: int
    options: tuple[str, ...] = ()
    has_float32_state: bool = True
    """Whether the hand-written loop has float32 weights and averages."""
    alternates: bool = False
    """Whether all loops fit in memory together and take turns, step by step."""
    steps: int = 12


CASES = {
    "350m": Case("350m", 2048, 8, 32000, alternates=True, steps=20),
    "1b": Case("1b", 4096, 4, 128256),
    "8b": Case("8b", 4096, 1, 128256, ("optimizer.state_dtype=bf16",), has_float32_state=False, steps=8),
}
TINY = Case("nano", 32, 2, 320, alternates=True, steps=4)
TINY_IN_TURN = Case("nano", 32, 2, 320, ("optimizer.state_dtype=bf16",), has_float32_state=False, steps=4)
WARM_UP = 3


def train_model(name: str, device: str, folder: Path) -> list[Row]:
    """Steps of trainkit and of the hand-written loop on one model, one row per loop."""
    case = CASES[name]
    if device == "cpu":
        case = TINY if case.alternates else TINY_IN_TURN
    loops: dict[str, Callable[[], Iterator[Callable[[], None]]]] = {
        "trainkit": lambda: trainkit_step(case, device, folder / "compiled", ()),
        "trainkit, eager": lambda: trainkit_step(case, device, folder / "eager", ("parallel.compile=false",)),
        "hand-written": lambda: hand_written_step(case, device),
    }
    times_s: dict[str, list[float]] = {loop: [] for loop in loops}
    peaks: dict[str, float | None] = {}
    if case.alternates:
        contexts = [contextmanager(loop)() for loop in loops.values()]
        steps = dict(zip(loops, [context.__enter__() for context in contexts], strict=True))
        for number in range(case.steps):
            for loop in list(steps) if number % 2 else reversed(steps):
                times_s[loop].append(timed(steps[loop], device))
        for context in contexts:
            context.__exit__(None, None, None)
        steps.clear()  # and with them the models
    else:
        for loop, make in loops.items():
            reset_peak(device)
            with contextmanager(make)() as step:
                times_s[loop] = [timed(step, device) for _ in range(case.steps)]
            peaks[loop] = peak_gb(device)
    if not name.startswith("8b") and importlib.util.find_spec("transformers") is not None:
        # Its state would not fit for 8B. It has its own loop, so that it cannot take turns.
        reset_peak(device)
        times_s["Hugging Face Trainer"] = hugging_face_times(case, device, folder / "hugging-face")
        peaks["Hugging Face Trainer"] = peak_gb(device)
    return [speed_row(case, device, loop, steps_s, peaks.get(loop)) for loop, steps_s in times_s.items()]


def speed_row(case: Case, device: str, loop: str, times_s: list[float], peak: float | None) -> Row:
    """The median speed of a loop after its first steps, which compile."""
    step_s = statistics.median(times_s[min(WARM_UP, len(times_s) - 1) :])
    tokens_per_s = case.batch_size * case.seq_len / step_s
    peak_rate = peak_flops(torch.cuda.get_device_name(), "bf16") if device == "cuda" else None
    flops = flops_per_token(shape_of(case), case.seq_len)
    mfu = None if peak_rate is None else round(tokens_per_s * flops / peak_rate, 3)
    return {
        "loop": loop,
        "tokens/s": round(tokens_per_s),
        "MFU": mfu,
        "step ms": round(1000 * step_s, 1),
        "peak GB": peak,
        "first step s": round(times_s[0], 1),
    }


def shape_of(case: Case) -> Any:

    return resolve_model_shape(ModelConfig(preset=case.preset, vocab_size=case.vocab_size), 1)


def trainkit_step(
    case: Case, device: str, folder: Path, options: tuple[str, ...]
) -> Iterator[Callable[[], None]]:
    """One step of trainkit's trainer, without validation and saves."""
    folder.mkdir()
    overrides = [
        *(f"device={device}", f"model.preset={case.preset}", f"model.vocab_size={case.vocab_size}"),
        *(f"data.seq_len={case.seq_len}", f"train.device_batch_size={case.batch_size}"),
        *("train.global_batch_size=null", "train.steps=1000", "train.eval_every=null"),
        *("checkpoint.every_steps=null", "checkpoint.async=false", "logging.tensorboard=false"),
        f"precision.dtype={'bf16' if device == 'cuda' else 'fp32'}",
        *case.options,
        *options,
    ]
    attempt = make_attempt(folder, overrides, 1)
    config = read_effective(attempt.config_file)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    world = World(0, 1, torch.device(device), None, None)
    task, stop = build_task(config), StopRequest()
    trainer = build_trainer(attempt, config, plan, world, task, stop, Progress())

    def step() -> None:
        trainer.step()

    yield step
    trainer.batches.close()
    trainer.saver.close()


def hand_written_step(case: Case, device: str) -> Iterator[Callable[[], None]]:
    """One step of a careful hand-written loop with the same model and batch."""
    uses_gpu = device == "cuda"
    with torch.device(device):
        model = Decoder(shape_of(case), case.seq_len)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=INIT_STD)
    if not case.has_float32_state:
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
    has_autocast = case.has_float32_state and uses_gpu

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=has_autocast):
            logits = model(tokens[:, :-1], keys)
        loss_of(logits, tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield step


def hugging_face_times(case: Case, device: str, folder: Path) -> list[float]:
    """Seconds of each step of a Llama of transformers, which its Trainer compiles and trains."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    shape = shape_of(case)
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
    uses_gpu = device == "cuda"
    tokens = torch.randint(0, 256, (case.batch_size * case.steps, case.seq_len))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    options: Any = TrainingArguments(
        output_dir=str(folder),
        max_steps=case.steps,
        per_device_train_batch_size=case.batch_size,
        bf16=uses_gpu,
        torch_compile=uses_gpu,
        use_cpu=not uses_gpu,
        optim="adamw_torch_fused",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    times_s: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began_s = synchronized_s(device)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times_s.append(synchronized_s(device) - self.began_s)

    Trainer(model, options, train_dataset=samples, callbacks=[Clock()]).train()
    return times_s


def synchronized_s(device: str) -> float:
    """The time, once the device has finished what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(step: Callable[[], None], device: str) -> float:
    """Seconds of a step until the device has finished it."""
    started_s = synchronized_s(device)
    step()
    return synchronized_s(device) - started_s


def reset_peak(device: str) -> None:

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device: str) -> float | None:

    return round(torch.cuda.max_memory_allocated() / 1e9, 1) if device == "cuda" else None


def save_state(name: str, device: str, folder: Path) -> list[Row]:
    """How long saves of a large state block training, one row per way to save."""
    num_tensors, elements = (40, 1 << 26) if device == "cuda" else (4, 1 << 16)
    state = {f"model.layer{index}": torch.randn(elements, device=device) for index in range(num_tensors)}
    work = torch.randn((8192, 8192) if device == "cuda" else (64, 64), device=device)
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
        future: Any = async_save(state, checkpoint_id=str(folder / f"dcp-{number}"), no_dist=True)
        return lambda: bool(future.done())

    def with_trainkit(number: int) -> Callable[[], bool]:
        saver.save(SaveRequest(number, {}, is_best=False, reason="bench"), blocking=False)
        saver.wait_until_staged()

        def is_saved() -> bool:
            saver.poll()
            return saver.last_step == number

        return is_saved

    ways = {"torch.save and fsync": with_torch, "DCP async_save": with_dcp, "trainkit": with_trainkit}
    compute_s = statistics.median(timed(compute, device) for _ in range(20))
    rows = {way: Row() for way in ways}
    for number in (1, 2):  # the first save allocates
        for way, save in ways.items():
            started = time.perf_counter()
            is_saved = save(number)
            call_s = time.perf_counter() - started
            during_s = [timed(compute, device)]
            while not is_saved():
                during_s.append(timed(compute, device))
            rows[way] = {
                "way": way,
                "GB": round(4 * elements * num_tensors / 1e9, 3),
                "blocked s": round(call_s, 4),
                "saved after s": round(time.perf_counter() - started, 2),
                "step during the save": round(statistics.median(during_s) / compute_s, 2),
            }
    saver.close()
    return list(rows.values())


def profile_steps(name: str, device: str, folder: Path) -> list[Row]:
    """Where the time of three steps goes, by kind of kernel."""
    case, num_steps = (CASES["350m"], 3) if device == "cuda" else (TINY, 3)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with contextmanager(trainkit_step)(case, device, folder / "profiled", ()) as step:
        for _ in range(WARM_UP):
            timed(step, device)
        with profile(activities=activities) as profiler:
            wall_s = sum(timed(step, device) for _ in range(num_steps))
    found = summary_of(profiler.events(), num_steps, wall_s, cuda=device == "cuda")["seconds_per_step"]
    return [{"kind": kind, "ms per step": round(1000 * seconds, 2)} for kind, seconds in found.items()]


PARTS: dict[str, Callable[[str, str, Path], list[Row]]] = {
    "tests": run_tests,
    "8b": train_model,
    "1b": train_model,
    "350m": train_model,
    "save": save_state,
    "profile": profile_steps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="One part of `benchmarks.gpu`.")
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    rows = PARTS[args.part](args.part, args.device, args.folder)
    (args.folder / "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
