"""Train a plain DDP loop that resumes after any interruption.

To resume after an interruption, the script does two things:

1. On SIGTERM or SIGUSR2, the script saves and exits with code 75.

2. At the next start, the script resumes from the saved state.

    trainkit submit --nodes 2 -- python examples/resumable_train.py --steps 2000
    trainkit drill --nodes 2 -- python examples/resumable_train.py --steps 200

The script also appends to the optional metrics.jsonl, which `trainkit drill` uses to compare every loss, and
`trainkit status` to show progress.
"""

import argparse
import gc
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXIT_SAVED = 75
SAVE_EVERY = 20
asked_to_stop = False


def note_signal(number: int, frame: FrameType | None) -> None:
    """Only set a flag, because the state is not consistent in the middle of a step."""
    global asked_to_stop
    asked_to_stop = True


def save(path: Path, state: dict[str, object]) -> None:
    """Write under a temporary name first, because the rename is atomic even if the process is killed."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, note_signal)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    run = Path(os.environ["TRAINKIT_JOB_RUN_DIR"])  # the run folder, which is the same for all attempts
    saved = run / "state.pt"

    torch.manual_seed(0)
    truth = torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 1
    if saved.exists():
        state = torch.load(saved, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    if rank == 0:
        print(f"from step {first} to {args.steps}", flush=True)

    for step in range(first, args.steps + 1):
        # The data of a step depend only on the step's number, so a checkpoint contains no data position.
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step * num_ranks + rank))
        loss = nn.functional.mse_loss(model(x.to(device)), (x @ truth).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # All ranks exchange the flag at every step, because the signal may not have reached every rank yet.
        sums = torch.stack([loss.detach(), torch.tensor(float(asked_to_stop), device=device)])
        dist.all_reduce(sums)
        stops = sums[1].item() > 0 and step < args.steps
        if rank == 0:
            mean = sums[0].item() / num_ranks
            with (run / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps({"step": step, "loss": mean}) + "\n")
            # Save after logging, because no later attempt would log a step that is already saved.
            if step % SAVE_EVERY == 0 or stops:
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(saved, state)
            if step % SAVE_EVERY == 0:
                print(f"step={step} loss={mean:.6f}", flush=True)
        if stops:
            dist.barrier()  # no rank exits before rank 0 has saved
            dist.destroy_process_group()
            return EXIT_SAVED
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    # If a gloo process group is still referenced when Python exits, Python may abort with SIGABRT.
    gc.collect()
    sys.exit(code)
