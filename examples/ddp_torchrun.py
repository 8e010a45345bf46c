"""Train with plain DistributedDataParallel under torchrun, and resume after any interruption.

    trainkit submit --nodes 2 --gpus-per-node 4 --launcher torchrun -- examples/ddp_torchrun.py --steps 200

`-- python examples/ddp_torchrun.py` without --launcher sets the same environment variables without torchrun.
The script imports nothing from trainkit. The script saves every 20 steps and on the stop signal. After the
stop signal, all ranks save the same step and exit with code 75.
"""

import argparse
import gc
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EXIT_SAVED = 75
SAVE_EVERY = 20
asked_to_stop = False


def note_signal(number, frame) -> None:
    """Only set a flag, because the state is not consistent in the middle of a step."""
    global asked_to_stop
    asked_to_stop = True


def save(path: Path, state: dict) -> None:
    """Write under a temporary name first, because the rename is atomic even if the process is killed."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, note_signal)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    # The targets are a linear map of the inputs plus a little noise.
    inputs = torch.randn(4096, 16)
    targets = inputs @ torch.randn(16, 1) + 0.01 * torch.randn(4096, 1)
    data = TensorDataset(inputs, targets)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    model = DistributedDataParallel(nn.Linear(16, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    saved = Path(os.environ["TRAINKIT_JOB_RUN_DIR"]) / "state.pt"  # all attempts use the same file
    first = 1
    if saved.exists():
        state = torch.load(saved, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    if rank == 0:
        print(f"from step {first} to {args.steps}", flush=True)

    step = (first - 1) // len(loader) * len(loader)  # number of steps before the current epoch
    while step < args.steps:
        sampler.set_epoch(step // len(loader))
        for x, y in loader:
            step += 1
            if step < first:
                continue  # an earlier attempt has already computed this step
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            # All ranks exchange the flag at every step, because the signal may not have reached every rank
            # yet.
            sums = torch.stack([loss.detach(), torch.tensor(float(asked_to_stop), device=device)])
            dist.all_reduce(sums)
            stops = sums[1].item() > 0 and step < args.steps
            if rank == 0 and (step == first or step % 20 == 0 or step == args.steps):
                print(f"step={step} loss={sums[0].item() / num_ranks:.6f}", flush=True)
            if rank == 0 and (step % SAVE_EVERY == 0 or stops):
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(saved, state)
            if stops:
                dist.barrier()  # no rank exits before rank 0 has saved
                dist.destroy_process_group()
                return EXIT_SAVED
            if step == args.steps:
                break
    dist.barrier()
    weights = sum(parameter.double().sum() for parameter in model.parameters()).item()
    print(f"rank {rank} of {num_ranks} is done", flush=True)
    print(f"done at {args.steps} weights {weights:.9f}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    # If a gloo process group is still referenced when Python exits, Python may abort with SIGABRT.
    gc.collect()
    sys.exit(code)
