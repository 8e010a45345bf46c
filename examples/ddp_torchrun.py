"""A plain DistributedDataParallel script for torchrun, on one host or many, without any trainkit code.

    trainkit submit --nodes 2 --gpus-per-node 4 --launcher torchrun -- examples/ddp_torchrun.py --steps 200

`-- python examples/ddp_torchrun.py` without --launcher sets the same variables without torchrun.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)

    # A linear map with a little noise.
    inputs = torch.randn(4096, 16)
    targets = inputs @ torch.randn(16, 1) + 0.01 * torch.randn(4096, 1)
    data = TensorDataset(inputs, targets)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    model = DistributedDataParallel(nn.Linear(16, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    step = 0
    for epoch in range(args.steps):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == 1 or step % 20 == 0 or step == args.steps:
                total = loss.detach()
                dist.all_reduce(total)
                if dist.get_rank() == 0:
                    print(f"step={step} loss={total.item() / dist.get_world_size():.6f}", flush=True)
            if step == args.steps:
                dist.barrier()
                print(f"rank {dist.get_rank()} of {dist.get_world_size()} is done", flush=True)
                dist.destroy_process_group()
                return


if __name__ == "__main__":
    main()
    # A gloo process group that is still referenced when Python exits can end it with SIGABRT.
    gc.collect()
