"""examples/lightning_train.py with data workers; it prints every step."""

import sys
import time

import lightning_train
from torch.utils.data import DataLoader


class Model(lightning_train.Model):
    def training_step(self, batch, index):
        print("step", self.global_step + 1, flush=True)
        time.sleep(0.1)
        return super().training_step(batch, index)


class WithWorkers(DataLoader):
    def __init__(self, data, batch_size):
        super().__init__(data, batch_size=batch_size, num_workers=2)


if __name__ == "__main__":
    lightning_train.Model, lightning_train.DataLoader = Model, WithWorkers
    sys.exit(lightning_train.main())
