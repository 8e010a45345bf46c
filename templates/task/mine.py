"""A training task: its model, its data and its loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from trainkit.task import Loss, Task


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Mine(Task):
    # The keyword arguments come from `task_args` in the config; `config` contains all sections of the config.
    def __init__(self, config, *, width=64, depth=4):
        super().__init__(config)
        self.width, self.depth = width, depth

    # Any nn.Module. Modules that repeat in an nn.ModuleList or nn.Sequential are sharded and recomputed one
    # by one; define `layers` to choose other modules. trainkit seeds random numbers, so do not seed them.
    def build_model(self):
        blocks = nn.Sequential(*[Block(self.width) for _ in range(self.depth)])
        return nn.Sequential(nn.Linear(8, self.width), blocks, nn.Linear(self.width, 2))

    # Any object with a length and items. trainkit shuffles the items and divides them among the ranks.
    def train_dataset(self):
        return self.points(4096, seed=1)

    # Remove this method to train without validation.
    def val_dataset(self):
        return self.points(512, seed=2)

    # Returns a sum over the batch and its divisor, which trainkit both adds up over all ranks. Metrics are
    # divided by the same divisor or by their own, as in {"accuracy": (right, answered)}.
    def loss(self, model, batch):
        x, label = batch
        logits = model(x)
        total = F.cross_entropy(logits, label, reduction="sum")
        right = (logits.argmax(1) == label).sum()
        return Loss(total, len(label), {"accuracy": right})

    # To run code after each step, define after_step(self, model, parameters), which every rank calls.
    # `self.step` is the number of the step, also after a restart; all other attributes start again from
    # __init__, unless state_dict() returns them and load_state_dict() sets them. On several ranks, `model` is
    # sharded and cannot be called in after_step: call it in `loss`, where `model.training` is False during
    # validation, and log what you want to look at with self.log_text(name, text).

    # Replace this example with your data. Its question: is a point inside a ring?
    def points(self, count, seed):
        x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        radius = x.norm(dim=1)
        return TensorDataset(x, ((radius > 2.3) & (radius < 3.2)).long())
