"""A DeepSpeed script that resumes after any interruption; its configuration comes from the trainkit config.

    trainkit submit --nodes 2 --launcher deepspeed --set parallel.zero=2 --set train.device_batch_size=16 \
        --set optimizer.lr=1e-3 -- examples/deepspeed_train.py --deepspeed_config {ds_config}

`--dry-run` shows the file that {ds_config} stands for. The script saves every 20 steps and on the stop
signal. After the stop signal, all ranks save the same step and exit with code 75.
"""

import argparse
import gc
import os
import signal
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

EXIT_SAVED = 75
SAVE_EVERY = 20
asked_to_stop = False


def note_signal(number, frame) -> None:
    """Only set a flag, because the state is not consistent in the middle of a step."""
    global asked_to_stop
    asked_to_stop = True


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, note_signal)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--local_rank", type=int, default=0)  # DeepSpeed's launcher passes this option
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    truth = torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1))
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    rank, device = engine.global_rank, engine.device
    print(f"rank {rank} of {engine.world_size}, ZeRO stage {engine.zero_optimization_stage()}", flush=True)

    saved = str(Path(os.environ["TRAINKIT_JOB_RUN_DIR"]) / "deepspeed")  # all attempts use the same folder
    first = 1
    if Path(saved, "latest").exists():
        _, state = engine.load_checkpoint(saved)
        first = state["step"] + 1
        print(f"rank {rank} resumes at step {first}", flush=True)
    for step in range(first, args.steps + 1):
        stop = torch.tensor(float(asked_to_stop), device=device)
        # The data depend only on the step and the rank, so that a resumed run reads the same data.
        generator = torch.Generator().manual_seed(step * engine.world_size + rank)
        for _ in range(engine.gradient_accumulation_steps()):
            x = torch.randn(engine.train_micro_batch_size_per_gpu(), 64, generator=generator).to(device)
            loss = nn.functional.mse_loss(engine(x), x @ truth.to(device))
            engine.backward(loss)
            engine.step()
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)  # some ranks may receive the signal a step later
        must_stop = bool(stop.item()) and step < args.steps
        if rank == 0 and (step % 10 == 0 or step == args.steps):
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if step % SAVE_EVERY == 0 or must_stop:
            engine.save_checkpoint(saved, tag=f"step-{step}", client_state={"step": step})
        if must_stop:
            return EXIT_SAVED
    weights = sum(parameter.double().sum() for parameter in engine.module.parameters()).item()
    print(f"done at {args.steps} weights {weights:.9f}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    # If a gloo process group is still referenced when Python exits, Python may abort with SIGABRT.
    gc.collect()
    sys.exit(code)
