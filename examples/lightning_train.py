"""A Lightning script that resumes after any interruption, with Trainer arguments from trainkit's config.

    trainkit submit --nodes 2 --gpus-per-node 2 --launcher lightning --set train.steps=2000 -- \
        examples/lightning_train.py --num-nodes {num_nodes} --devices {devices} --max-steps {max_steps}

Lightning takes its ranks from the variables that trainkit sets, as if torchrun had started it. The script
saves every 20 steps and on the stop signal. After the stop signal, all ranks save the same step and exit with
code 75.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 16
EXIT_SAVED = 75


class SaveOnSignal(Callback):
    """Save after the step during which a rank received the stop signal.

    Lightning's own handler starts a broadcast immediately, even in the middle of a step. If the ranks are at
    different stages of the step, they wait for each other forever, and nothing is saved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked_to_stop = False
        self.has_saved = False

    def note_signal(self, number, frame) -> None:
        self.asked_to_stop = True

    def on_train_start(self, trainer, model) -> None:
        signal.signal(signal.SIGTERM, self.note_signal)  # replaces Lightning's handler

    def on_train_batch_end(self, trainer, model, outputs, batch, index) -> None:
        # The ranks decide together, because the signal may not have reached every rank yet.
        if trainer.strategy.reduce_boolean_decision(self.asked_to_stop, all=False):
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.has_saved = True


class Model(lightning.LightningModule):
    """A model that learns a random linear map."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("truth", torch.randn(64, 1, generator=generator))
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1))

    def training_step(self, batch, index):
        # The data depend on the step, because Lightning reads an epoch's data from the beginning if it
        # resumes within the epoch.
        seed = self.global_step * self.trainer.world_size + self.global_rank
        x = torch.randn(BATCH_SIZE, 64, generator=torch.Generator().manual_seed(seed)).to(self.device)
        loss = nn.functional.mse_loss(self.net(x), x @ self.truth)
        if self.global_rank == 0 and self.global_step % 10 == 0:
            print(f"step {self.global_step} loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--accelerator", default="auto")
    args = parser.parse_args()

    saved = Path(os.environ["TRAINKIT_JOB_RUN_DIR"]) / "lightning"  # all attempts use the same folder
    last = saved / "last.ckpt"
    stopper = SaveOnSignal(last)
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator=args.accelerator,
        strategy="ddp",
        num_nodes=args.num_nodes,
        devices=args.devices,
        max_steps=args.max_steps,
        precision=args.precision,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            stopper,
            # Disable versions, so that the newest checkpoint is always named last.ckpt, even if an earlier
            # attempt wrote the previous checkpoint.
            ModelCheckpoint(
                dirpath=saved, save_last=True, every_n_train_steps=20, enable_version_counter=False
            ),
        ],
    )
    print(f"rank {trainer.global_rank} of {trainer.world_size}", flush=True)
    model = Model()
    data = DataLoader(TensorDataset(torch.zeros(4096)), batch_size=BATCH_SIZE)
    trainer.fit(model, data, ckpt_path=last if last.exists() else None)
    if trainer.global_step == args.max_steps:
        weights = sum(parameter.double().sum() for parameter in model.parameters()).item()
        print(f"done at {trainer.global_step} weights {weights:.9f}", flush=True)
        return 0
    return EXIT_SAVED if stopper.has_saved else 1


if __name__ == "__main__":
    sys.exit(main())
