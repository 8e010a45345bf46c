"""Train a custom loop with `trainkit.loop` and a DataLoader with workers."""

import time

import torch
from torch import nn

from trainkit.loop import attach

run = attach()
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run.track(model=model, optimizer=optimizer)
data = iter(torch.utils.data.DataLoader(torch.zeros(100_000, 8), 4, num_workers=2))
for step in run.steps(20_000, log_every=1):
    print("step", step, flush=True)
    loss = model(next(data)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
    time.sleep(0.1)
