"""Train with the Hugging Face Trainer and data workers: hf_trainer.py jit|callback.

With `jit`, the Trainer saves its just-in-time checkpoint. With `callback`, its ranks agree after the step, as
docs/own-script.md shows.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

OUT = Path(os.environ["TRAINKIT_JOB_RUN_DIR"], "out")
HAS_CALLBACK = sys.argv[1] == "callback"
asked = []


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


class SaveWhenAsked(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        flag = torch.tensor(float(bool(asked)), device=args.device)
        torch.distributed.all_reduce(flag)
        if flag.item() > 0:
            control.should_save = control.should_training_stop = True


callbacks = [Print()]
if HAS_CALLBACK:
    callbacks.append(SaveWhenAsked())
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
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
    enable_jit_checkpoint=not HAS_CALLBACK,
)
for unfinished in OUT.glob("checkpoint-*/checkpoint-is-incomplete.txt"):
    shutil.rmtree(unfinished.parent, ignore_errors=True)
trainer = Trainer(model=Model(), args=args, train_dataset=Sums(), callbacks=callbacks)
trainer.train(resume_from_checkpoint=get_last_checkpoint(str(OUT)) if OUT.is_dir() else None)
if HAS_CALLBACK and trainer.state.global_step < trainer.state.max_steps:
    sys.exit(75)
