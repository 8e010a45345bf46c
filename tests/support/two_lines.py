"""Provides a trainer as a COMMAND without torch, which may follow the contract of two lines.

Before the last step, the first attempt of a drill waits for its interruption, which may take some time.
"""

_CODE = """
import json, os, signal, sys, time
from pathlib import Path

asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda *_: asked.append(1))
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
run, attempt = Path(os.environ["TRAINKIT_JOB_RUN_DIR"]), os.environ["TRAINKIT_JOB_ATTEMPT"]
state = run / "state"

def tell(file, word):
    part = file.with_name(file.name + ".part")
    part.write_text(str(word))
    part.replace(file)

def heard(file):
    return file.read_text() if file.exists() else "0"

# In place of a collective: the first rank leads, and waits in every step for the others, which follow.
places = [run / f"at.{attempt}.{index}" for index in range(num_ranks)]
while rank > 0:
    word = heard(places[0])
    tell(places[rank], word)
    if word == "stop":
        sys.exit(75)
    if word == "STEPS":
        sys.exit(0)
    time.sleep(0.005)
step = int(heard(state))
tell(places[0], step)
is_struck = attempt == "1" and run.parent.name.startswith("drill-") and run.name != "uninterrupted"
strike_due_s = time.monotonic() + (120 if is_struck else 0)
while step < STEPS:
    while step == STEPS - 1 and not asked and time.monotonic() < strike_due_s:
        time.sleep(0.01)
    while any(int(heard(place)) < step for place in places):
        time.sleep(0.002)
    step += 1
    time.sleep(0.02)
    if WRITES:
        with (run / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": step, "loss": 1 / step, "attempt": int(attempt)}) + chr(10))
    if SAVES and (asked or step % 10 == 0):
        tell(state, step)
    if asked and step < STEPS:
        tell(places[0], "stop")
        sys.exit(75)
    tell(places[0], step)
"""


def two_lines(steps: int = 80, saves: bool = True, writes: bool = True) -> str:
    """Return the code of a trainer of `steps` steps of at least 0.02 s.

    The first rank saves, and records the saves.
    """
    return _CODE.replace("STEPS", str(steps)).replace("SAVES", str(saves)).replace("WRITES", str(writes))
