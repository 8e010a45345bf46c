"""Train with Lightning's Trainer and SLURMEnvironment, which also requeues jobs on its signal."""

import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def training_step(self, batch, index):
        generator = torch.Generator().manual_seed(self.global_step * 1000 + self.global_rank)
        x = torch.randn(16, 8, generator=generator)
        loss = nn.functional.mse_loss(self.linear(x), x.sum(1, keepdim=True))
        time.sleep(0.1)
        print(f"step {self.global_step} loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


steps, num_nodes = map(int, sys.argv[1:])
lightning.seed_everything(0)
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    num_nodes=num_nodes,
    devices=1,
    max_steps=steps,
    logger=False,
    enable_progress_bar=False,
    plugins=[SLURMEnvironment()],
    callbacks=[
        ModelCheckpoint(dirpath="ckpt", save_last=True, every_n_train_steps=10, save_on_exception=True)
    ],
)
print(f"rank {trainer.global_rank} of {trainer.world_size}", flush=True)
model, last = Model(), Path("ckpt/last.ckpt")
data = DataLoader(TensorDataset(torch.zeros(4096)), batch_size=16)
trainer.fit(model, data, ckpt_path=last if last.exists() else None)
weights = sum(p.double().sum() for p in model.parameters()).item()
print(f"done at {trainer.global_step} weights {weights:.9f}", flush=True)
