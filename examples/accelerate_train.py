"""Train with Hugging Face accelerate, on one host or several, and resume after any interruption.

    trainkit submit --nodes 2 --gpus-per-node 4 --launcher accelerate -- accelerate_train.py --steps 200
    trainkit submit --nodes 2 --launcher accelerate --set precision.dtype=bf16 -- accelerate_train.py

trainkit passes the hosts, ranks, address and port to `accelerate launch`, and writes config values such as
the precision to a file. `accelerate config` is not needed. The script saves every 20 steps and on the stop
signal. After the stop signal, all ranks save the same step and exit with code 75.
"""

import argparse
import gc
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EXIT_SAVED = 75
SAVE_EVERY = 20
asked_to_stop = False


def note_signal(number, frame) -> None:
    """Only set a flag, because the state is not consistent in the middle of a step."""
    global asked_to_stop
    asked_to_stop = True


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Save under a temporary name first, because the rename is atomic even if the process is killed."""
    part, done = folder / "part", folder / f"step-{step:08d}"
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and not done.exists():
        part.rename(done)
    accelerator.wait_for_everyone()


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, note_signal)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)

    # The targets are a linear map of the inputs plus a little noise.
    inputs = torch.randn(4096, 16)
    targets = inputs @ torch.randn(16, 1) + 0.01 * torch.randn(4096, 1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)

    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    saved = Path(os.environ["TRAINKIT_JOB_RUN_DIR"]) / "accelerate"  # all attempts use the same folder
    last = max(saved.glob("step-*"), default=None)
    step = 0
    if last is not None:
        accelerator.load_state(str(last))
        step = int(last.name.removeprefix("step-"))
        accelerator.print(f"resumed after step {step}", flush=True)
    while step < args.steps:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            # The sum over all ranks makes all ranks stop after the same step, although some may receive the
            # signal a step later.
            stop = (
                accelerator.reduce(torch.tensor(float(asked_to_stop), device=accelerator.device)).item() > 0
            )
            if step == 1 or step % 20 == 0 or step == args.steps:
                mean = accelerator.reduce(loss.detach(), reduction="mean").item()
                accelerator.print(f"step={step} loss={mean:.6f}", flush=True)
            if step % SAVE_EVERY == 0 or stop:
                save(accelerator, saved, step)
            if step == args.steps:
                break
            if stop:
                return EXIT_SAVED
    accelerator.wait_for_everyone()
    print(f"rank {accelerator.process_index} of {accelerator.num_processes} is done", flush=True)
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    code = main()
    # If a gloo process group is still referenced when Python exits, Python may abort with SIGABRT.
    gc.collect()
    sys.exit(code)
