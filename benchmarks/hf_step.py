"""Compare a step of a Hugging Face model in trainkit with the transformers Trainer, accelerate and Fabric.

    pip install -e '.[hf]' accelerate lightning
    python -m benchmarks.hf_step

All four loops train a Llama with the same weights, batch size and data in one process. The data are the
tokens of Python's standard library, read by a shuffling DataLoader with two workers. The loops alternate step
by step in random order, so that changes in machine speed affect all loops equally. All loops use fused AdamW
and clip the gradient. No loop logs metrics or saves checkpoints. The first fifth of the steps is excluded as
warm-up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.training_loop import make_attempt

SEQ_LEN = 256
NUM_WORKERS = 2
"""Number of data workers, the same as trainkit's default."""
NUM_RESAMPLES = 2000
BATCH_SIZE = 8
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": SEQ_LEN,
}
LR = 1e-4
TURN_TIMEOUT_S = 600.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Step = Callable[[], None]


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def new_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)


def trainkit_step(folder: Path, dtype: str, architecture: str) -> Step:
    """Return a function that runs a step of trainkit's trainer."""
    from trainkit.config import read_effective
    from trainkit.job.signals import StopRequest
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.files import read_json
    from trainkit.trainer.build import build_task
    from trainkit.trainer.distributed import World
    from trainkit.trainer.loop import Trainer
    from trainkit.trainer.progress import Progress

    overrides = [
        *(f"model.hf={folder}", f"model.architecture={architecture}", "data.tokenizer=bytes"),
        *(f"data.seq_len={SEQ_LEN}", f"train.device_batch_size={BATCH_SIZE}", "train.global_batch_size=null"),
        *("train.steps=100000", "train.eval_every=null", "checkpoint.every_steps=null", f"optimizer.lr={LR}"),
        *("logging.tensorboard=false", f"precision.dtype={dtype}", "device=cpu", "train.log_every=100000"),
    ]
    attempt = make_attempt(Path(tempfile.mkdtemp(dir=folder.parent)), overrides, 1)
    config = read_effective(attempt.config_file)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    world = World(0, 1, torch.device("cpu"), None, None)
    trainer = Trainer(attempt, plan, world, build_task(config), StopRequest(), Progress())
    return trainer.step


class Tokens(Dataset[dict[str, Tensor]]):
    """The samples that trainkit reads, in the format of transformers."""

    def __init__(self) -> None:
        from trainkit.config import load_config
        from trainkit.task import TokenSamples

        overrides = [f"data.seq_len={SEQ_LEN}", "data.tokenizer=bytes"]
        self._samples = TokenSamples(load_config(None, overrides=overrides, layers=False).config.data)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._samples[index][:SEQ_LEN]
        return {"input_ids": tokens, "labels": tokens}


def new_loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Tokens(), BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, persistent_workers=True)


def accelerate_step(folder: Path, dtype: str) -> Step:
    """Return a function that runs one step of an accelerate loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="no" if dtype == "fp32" else dtype, cpu=True)
    model = load(folder)
    model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), new_loader())
    batches = iter(loader)

    def step() -> None:
        tokens = next(batches)["input_ids"]
        accelerator.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fabric_step(folder: Path, dtype: str) -> Step:
    """Return a function that runs one step of a Lightning Fabric loop."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true" if dtype == "fp32" else "bf16-mixed")
    model = load(folder)
    model, optimizer = fabric.setup(model, new_optimizer(model))
    batches = iter(fabric.setup_dataloaders(new_loader()))

    def step() -> None:
        tokens = next(batches)["input_ids"]
        fabric.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trainer_step(folder: Path, dtype: str, num_steps: int) -> Step:
    """Return a function that runs one step of the transformers Trainer, whose loop waits in a thread."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    begin, done = threading.Semaphore(0), threading.Semaphore(0)

    class Turns(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            begin.acquire()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            done.release()

    options = TrainingArguments(
        output_dir=str(folder.parent / "trainer"),
        max_steps=num_steps,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=LR,
        bf16=dtype == "bf16",
        use_cpu=True,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=NUM_WORKERS,
    )
    trainer = Trainer(model=load(folder), args=options, train_dataset=Tokens(), callbacks=[Turns()])
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> None:
        begin.release()
        if not done.acquire(timeout=TURN_TIMEOUT_S):
            raise SystemExit("the Trainer did not finish its step")

    return step


def measure(folder: Path, dtype: str, num_steps: int) -> dict[str, list[float]]:
    """Return the step durations of each loop after the warm-up, in seconds."""
    steps: dict[str, Step] = {
        "trainkit, transformers": trainkit_step(folder, dtype, "transformers"),
        "trainkit, its own decoder": trainkit_step(folder, dtype, "llama"),
        "accelerate": accelerate_step(folder, dtype),
        "Fabric": fabric_step(folder, dtype),
        "Trainer": trainer_step(folder, dtype, num_steps),
    }
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for _ in range(num_steps):
        # Use a random order, because threads of one loop may still be busy when the next loop starts.
        random.shuffle(names)
        for name in names:
            started = time.perf_counter()
            steps[name]()
            times_s[name].append(time.perf_counter() - started)
    return {name: values[num_steps // 5 :] for name, values in times_s.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="steps of each loop; the first fifth is warm-up"
    )
    parser.add_argument("--dtype", choices=DTYPES, nargs="*", default=list(DTYPES))
    args = parser.parse_args()
    print("| type | loop | median ms | min | max | speed of trainkit with transformers | 95 % of resamples |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for dtype in args.dtype:
        # Measure in a separate process, because accelerate keeps its precision for the lifetime of a process.
        process = multiprocessing.get_context("spawn").Process(target=report, args=(dtype, args.steps))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


def report(dtype: str, num_steps: int) -> None:
    """Print the rows for one dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        config = AutoConfig.for_model("llama", **SIZES)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        times_s = measure(folder, dtype, num_steps)
    ours = times_s["trainkit, transformers"]
    for name, values in times_s.items():
        found = statistics.median(values)
        row = [f"{1e3 * value:.0f}" for value in (found, min(values), max(values))]
        low, high = ratio_interval(ours, values)
        ratio = f"{found / statistics.median(ours):.3f} | {low:.3f} to {high:.3f}"
        print(f"| {dtype} | {name} | {' | '.join(row)} | {ratio} |", flush=True)


def ratio_interval(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval for the ratio of the medians, resampling the rounds."""
    rounds, draw = list(zip(ours, theirs, strict=True)), random.Random(0)
    ratios = []
    for _ in range(NUM_RESAMPLES):
        chosen = draw.choices(rounds, k=len(rounds))
        medians = [statistics.median(values) for values in zip(*chosen, strict=True)]
        ratios.append(medians[1] / medians[0])
    ratios.sort()
    return ratios[NUM_RESAMPLES * 25 // 1000], ratios[NUM_RESAMPLES * 975 // 1000]


if __name__ == "__main__":
    main()
