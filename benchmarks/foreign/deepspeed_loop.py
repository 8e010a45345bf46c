"""Train with DeepSpeed ZeRO stage 1 on CPUs, and save every 10 steps."""

import argparse
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
engine, *_ = deepspeed.initialize(
    model=nn.Linear(8, 1),
    config={
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
rank, world_size = engine.global_rank, engine.world_size
print(f"rank {rank} of {world_size}", flush=True)
start = 0
if Path("ckpt/latest").exists():
    _, state = engine.load_checkpoint("ckpt")
    start = state["step"]
for step in range(start + 1, args.steps + 1):
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randn(16, 8, generator=generator)
    loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    time.sleep(0.1)
    print(f"step {step} loss {loss.item():.6f}", flush=True)
    if step % 10 == 0:
        engine.save_checkpoint("ckpt", tag=f"step-{step}", client_state={"step": step})
weights = sum(p.double().sum() for p in engine.module.parameters()).item()
print(f"done at {args.steps} weights {weights:.9f}", flush=True)
