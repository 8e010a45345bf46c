"""Train a loop with Hugging Face accelerate that saves its state every 10 steps."""

import os
import shutil
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

steps = int(sys.argv[1])

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
print(f"rank {accelerator.process_index} of {accelerator.num_processes}", flush=True)
saved = sorted(int(folder.name[5:]) for folder in Path().glob("step-*"))
start = saved[-1] if saved else 0
if saved:
    accelerator.load_state(f"step-{start}")
for step in range(start + 1, steps + 1):
    generator = torch.Generator().manual_seed(step * 1000 + accelerator.process_index)
    x = torch.randn(16, 8, generator=generator)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    time.sleep(0.1)
    print(f"step {step} loss {loss.item():.6f}", flush=True)
    if step % 10 == 0:
        if accelerator.is_main_process:
            shutil.rmtree(f"part-{step}", ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(f"part-{step}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            os.replace(f"part-{step}", f"step-{step}")
        accelerator.wait_for_everyone()
weights = sum(p.double().sum() for p in accelerator.unwrap_model(model).parameters()).item()
print(f"done at {steps} weights {weights:.9f}", flush=True)
accelerator.end_training()
