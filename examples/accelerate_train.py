"""A Hugging Face accelerate script, started by `accelerate launch` on one host or many.

    trainkit submit --nodes 2 --gpus-per-node 4 --launcher accelerate -- accelerate_train.py --steps 200

trainkit passes hosts, ranks, address and port to `accelerate launch`; no `accelerate config` is needed.
"""

import argparse
import gc

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)

    # A linear map with a little noise.
    inputs = torch.randn(4096, 16)
    targets = inputs @ torch.randn(16, 1) + 0.01 * torch.randn(4096, 1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)

    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while step < args.steps:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step == 1 or step % 20 == 0 or step == args.steps:
                mean = accelerator.reduce(loss.detach(), reduction="mean").item()
                accelerator.print(f"step={step} loss={mean:.6f}", flush=True)
            if step == args.steps:
                break
    accelerator.wait_for_everyone()
    print(f"rank {accelerator.process_index} of {accelerator.num_processes} is done", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
    # A gloo process group that is still referenced when Python exits can end it with SIGABRT.
    gc.collect()
