"""Train with the Hugging Face Trainer and its just-in-time checkpoints, and resume from the newest one."""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Sums(Dataset):
    def __init__(self):
        self.x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index].sum()}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x, labels=None):
        logits = self.linear(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class Print(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.1)
        print(f"step {state.global_step}", flush=True)


torch.manual_seed(0)
args = TrainingArguments(
    output_dir="out",
    max_steps=int(sys.argv[1]),
    per_device_train_batch_size=8,
    learning_rate=0.01,
    save_steps=10,
    logging_steps=10,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    ddp_backend="gloo",
    enable_jit_checkpoint=True,
)
trainer = Trainer(model=Model(), args=args, train_dataset=Sums(), callbacks=[Print()])
print(f"rank {args.process_index} of {args.world_size}", flush=True)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if Path("out").is_dir() else None)
if trainer.state.global_step == args.max_steps:
    weights = sum(p.double().sum() for p in trainer.model.parameters()).item()
    print(f"done at {trainer.state.global_step} weights {weights:.9f}", flush=True)
