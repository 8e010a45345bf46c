"""Run examples/lightning_train.py with data workers, and print every step."""

import sys
import time
from functools import partial

import lightning_train
from torch.utils.data import DataLoader


class Model(lightning_train.Model):
    def training_step(self, batch, index):
        print("step", self.global_step + 1, flush=True)
        time.sleep(0.1)
        return super().training_step(batch, index)


if __name__ == "__main__":
    lightning_train.Model = Model
    lightning_train.DataLoader = partial(DataLoader, num_workers=2)
    sys.exit(lightning_train.main())
