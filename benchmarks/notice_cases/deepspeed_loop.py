"""Train with DeepSpeed ZeRO stage 1 and data workers; ranks agree after the step, save and exit with 75."""

import argparse
import os
import signal
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn

OUT = Path(os.environ["TRAINKIT_JOB_RUN_DIR"], "out")
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
heard = []


def main():
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: heard.append(number))
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)  # DeepSpeed's launcher adds this option
    parser.parse_args()
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=nn.Linear(8, 1), config=CONFIG)
    step = 0
    if (OUT / "latest").exists():
        _, state = engine.load_checkpoint(str(OUT))
        step = state["step"]
    print("from", step, flush=True)
    for x in torch.utils.data.DataLoader(torch.ones(400_000, 8), 4, num_workers=2):
        step += 1
        print("step", step, flush=True)
        loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        time.sleep(0.1)
        flag = torch.tensor(float(bool(heard)))
        torch.distributed.all_reduce(flag)
        if flag.item() > 0:
            time.sleep(0.5)  # simulates the duration of a save
            engine.save_checkpoint(str(OUT), tag=f"step-{step}", client_state={"step": step})
            print("saved", step, "after", len(heard), "signals", flush=True)
            os._exit(75)


if __name__ == "__main__":
    main()
