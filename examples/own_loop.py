"""Train with your own DDP loop and `trainkit.loop`, and resume after any interruption.

trainkit submit --nodes 2 -- python examples/own_loop.py --steps 2000 trainkit drill --nodes 2 -- python
examples/own_loop.py --steps 200
"""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.loop import attach


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()

    run = attach()
    torch.manual_seed(0)
    inputs = torch.randn(16384, 64)
    targets = inputs @ torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1))
    model = DistributedDataParallel(model.to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for step in run.steps(args.steps, save_every=20, log_every=1):
        at = run.sample_indices(step, len(inputs), batch_size=256)
        loss = nn.functional.mse_loss(model(inputs[at].to(run.device)), targets[at].to(run.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(loss=loss, lr=scheduler.get_last_lr()[0])


if __name__ == "__main__":
    main()
