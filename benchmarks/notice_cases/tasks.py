"""Tasks with data workers: samples that trainkit's workers read, and a stream with separate workers."""

import time

import torch
from torch import nn

from trainkit.task import Loss, Task


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.02)
        return {"x": torch.full((8,), index / 1e5)}


class Stream:
    """Numbers that two workers of a separate DataLoader read."""

    def __iter__(self):
        numbers = range(100_000)
        for number in torch.utils.data.DataLoader(numbers, batch_size=None, num_workers=2):
            yield {"x": torch.full((8,), float(number) / 1e5)}


class Mapped(Task):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    def train_dataset(self):
        return Samples()

    def loss(self, model, batch):
        time.sleep(0.05)
        error = model(batch["x"]) - 1
        return Loss((error**2).sum(), len(error))


class Streamed(Mapped):
    def train_dataset(self):
        return Stream()
