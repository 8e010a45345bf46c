"""Set a flag on the signal, save after the step and exit with 75: flag.py KIND.

The values of KIND:

- plain;
- default, which restores the default action in its handler;
- counter, which counts signals until it has saved;
- pool and loader, which have workers;
- ddp, which has workers and a process group whose ranks agree.
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

NUM_STEPS = 100_000
kind = sys.argv[1]
heard = []


def note(number, frame):
    heard.append(number)
    if kind == "default":
        signal.signal(number, signal.SIG_DFL)


def identity(number):
    return number


def batches():
    """Yield a value from the workers for each step."""
    if kind == "pool":
        with multiprocessing.Pool(2) as pool:
            while True:
                yield from pool.imap(identity, range(8))
    elif kind in ("loader", "ddp"):
        import torch

        data = torch.utils.data.TensorDataset(torch.zeros(NUM_STEPS, 1))
        yield from torch.utils.data.DataLoader(data, num_workers=2)
    while True:
        yield None


def must_stop():
    if kind != "ddp":
        return bool(heard)
    import torch

    flag = torch.tensor(float(bool(heard)))
    torch.distributed.all_reduce(flag)
    return flag.item() > 0


def main():
    for number in (signal.SIGTERM,) if kind == "default" else (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, note)
    if kind == "ddp":
        import torch

        torch.distributed.init_process_group("gloo")
    state = Path(os.environ["TRAINKIT_JOB_RUN_DIR"], f"state.{os.environ['RANK']}")
    step = int(state.read_text()) if state.exists() else 0
    print("from", step, flush=True)
    for _ in batches():
        step += 1
        print("step", step, flush=True)
        time.sleep(0.1)
        if must_stop():
            time.sleep(0.5)  # simulates the duration of a save
            state.write_text(str(step))
            print("saved", step, "after", len(heard), "signals", flush=True)
            os._exit(75) if kind == "ddp" else sys.exit(75)


if __name__ == "__main__":
    main()
