"""Save on the signal and exit with 75, as docs/own-script.md shows, and print during the save.

The script writes each step, each signal and each save to a file of its rank.
"""

import os
import signal
import sys
import time
from pathlib import Path

# A launcher below the rank gives its only process the rank 0.
rank, attempt = os.environ.get("MEMBER", os.environ["RANK"]), os.environ["TRAINKIT_JOB_ATTEMPT"]
folder = Path(os.environ["TRAINKIT_JOB_RUN_DIR"])
notes = os.open(folder / f"notes.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
asked = []


def note(what, value):
    os.write(notes, f"{attempt} {what} {value}\n".encode())


def ask(number, frame):
    asked.append(number)
    note("signal", signal.Signals(number).name)


for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, ask)
state = folder / f"state.{rank}"
step = int(state.read_text()) if state.exists() else 0
while not asked:
    step += 1
    note("step", step)
    print("step", step, flush=True)
    time.sleep(0.1)
for _ in range(20):  # simulates the duration of a save
    print("saves", step, flush=True)
    time.sleep(0.1)
part = folder / f"part.{rank}"
part.write_text(str(step))
part.rename(state)
note("saved", step)
print("saved", step, flush=True)
sys.exit(75)
