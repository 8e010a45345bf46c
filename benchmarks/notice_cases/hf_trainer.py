"""The Hugging Face Trainer with its just-in-time checkpoint and data workers."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

OUT = Path(os.environ["TRAINKIT_JOB_RUN_DIR"], "out")


class Sums(torch.utils.data.Dataset):
    def __len__(self):
        return 400_000

    def __getitem__(self, index):
        return {"x": torch.full((8,), index / 4e5), "labels": torch.tensor(1.0)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x, labels=None):
        logits = self.linear(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class Print(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)
        time.sleep(0.1)


args = TrainingArguments(
    output_dir=str(OUT),
    max_steps=20_000,
    per_device_train_batch_size=4,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    ddp_backend="gloo",
    dataloader_num_workers=2,
    enable_jit_checkpoint=True,
)
trainer = Trainer(model=Model(), args=args, train_dataset=Sums(), callbacks=[Print()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(str(OUT)) if OUT.is_dir() else None)
