"""Train with DistributedDataParallel as in its tutorials: save every 10 steps, and resume from a snapshot."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

steps = int(sys.argv[1])
snapshot = Path("snapshot.pt")

dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()}", flush=True)
torch.manual_seed(0)
net = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
start = 0
if snapshot.exists():
    saved = torch.load(snapshot)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
model = DistributedDataParallel(net)
for step in range(start + 1, steps + 1):
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randn(16, 8, generator=generator)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.1)
    print(f"step {step} loss {loss.item():.6f}", flush=True)
    if step % 10 == 0 and rank == 0:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, "snapshot.part")
        os.replace("snapshot.part", snapshot)
dist.barrier()
print(f"done at {steps} weights {sum(p.double().sum() for p in net.parameters()).item():.9f}", flush=True)
dist.destroy_process_group()
