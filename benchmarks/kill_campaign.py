"""Kill a run at random moments, and check that its losses equal the losses of an uninterrupted run.

    python -m benchmarks.kill_campaign --rounds 20 --seed 0

Each round submits a run of two nodes and, one to three times at random moments, sends SIGKILL to a random
target: a rank, an agent, the supervisor, or all of them. If a run does not restart automatically, the
benchmark resumes it. At the end, the losses in metrics.jsonl must be equal, digit for digit, to the losses of
an undisturbed run, and the sample counts must have no gap. Every published checkpoint must be intact, and no
process may be left behind. Dropout is enabled, and the text is short, so that kills occur in every part of an
epoch. The same seed draws the same campaign.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.programs import RunProcesses
from trainkit.capabilities.drill.command import computed_steps
from trainkit.capabilities.drill.result import compare
from trainkit.job.processes import signal_all
from trainkit.run.events import StepRecord
from trainkit.run.manifest import find_damage, published
from trainkit.run.rundir import RunDir

TRAINKIT = [sys.executable, "-m", "trainkit"]
OPTIONS = {
    "model.preset": "nano",
    "model.dropout": "0.1",
    "data.seq_len": "64",
    "data.val_fraction": "0.1",
    "train.steps": "null",
    "train.epochs": "6",
    "train.device_batch_size": "4",
    "train.global_batch_size": "16",
    "train.log_every": "1",
    "train.eval_every": "20",
    "checkpoint.every_steps": "5",
    "precision.dtype": "fp32",
    "logging.tensorboard": "false",
    "device": "cpu",
}


def trainkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRAINKIT, *arguments], capture_output=True, text=True, timeout=300)


def submit(folder: Path, text: Path) -> RunDir:
    config = folder.parent / "campaign.yaml"
    config.write_text("name: campaign\n")
    options = [f"--set={key}={value}" for key, value in {**OPTIONS, "data.source": str(text)}.items()]
    done = trainkit("submit", str(config), "--nodes", "2", "--run-dir", str(folder), *options)
    if done.returncode:
        raise SystemExit(done.stderr)
    return RunDir(folder)


def state(run: RunDir) -> str:
    return str(json.loads(trainkit("status", str(run.path), "--json").stdout)["state"])


def strike(run: RunDir, chance: random.Random) -> str:
    """Send SIGKILL to a random target; return a description of the target."""
    found = RunProcesses.of(run)
    kinds = {"supervisor": found.supervisors, "agent": found.agents.values(), "rank": found.ranks.values()}
    alive = {kind: sorted(pids) for kind, pids in kinds.items() if pids}
    if not alive:
        return "nobody (it had ended)"
    kind = chance.choice([*alive, "everything"])
    pids = found.everything if kind == "everything" else [chance.choice(alive[kind])]
    signal_all(pids, signal.SIGKILL)
    return kind


def wait_until_ended(run: RunDir, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := RunProcesses.of(run).everything:
        if time.monotonic() > deadline:
            raise SystemExit(f"{run.path}: processes did not end: {left}")
        time.sleep(0.05)


def resume(run: RunDir) -> None:
    resumed = trainkit("resume", str(run.path))
    if resumed.returncode:
        raise SystemExit(f"resume failed: {resumed.stderr}")


def play_round(folder: Path, text: Path, chance: random.Random) -> tuple[RunDir, list[str]]:
    run = submit(folder, text)
    kills = []
    for _ in range(chance.randint(1, 3)):
        delay_s = chance.uniform(0.2, 9.0)
        time.sleep(delay_s)
        victim = strike(run, chance)
        kills.append(f"{victim} after {delay_s:.1f} s")
        if victim in ("agent", "rank"):
            continue  # the run restarts automatically
        wait_until_ended(run)
        if state(run) == "finished":
            break
        resume(run)
    wait_until_ended(run)
    if state(run) != "finished":
        resume(run)
        wait_until_ended(run)
    return run, kills


def check(run: RunDir, reference: list[StepRecord]) -> list[str]:
    """Return all problems found after a round; an empty list if there are none."""
    wrong = []
    if state(run) != "finished":
        wrong.append(f"state {state(run)}")
    difference = compare(reference, computed_steps(run))
    if difference:
        wrong.append(difference)
    wrong += [
        f"{c.path.name}: {damage}" for c in published(run.checkpoints_dir) if (damage := find_damage(c))
    ]
    return wrong


def campaign(rounds: int, seed: int, folder: Path) -> int:
    """Run all rounds; return the number of failed rounds."""
    chance = random.Random(seed)
    text = folder / "text.txt"
    text.write_text("".join(f"line {number} says {number * number}\n" for number in range(1000)))
    reference = submit(folder / "reference", text)
    wait_until_ended(reference)
    expected = computed_steps(reference)
    print(f"uninterrupted: {len(expected)} steps, state {state(reference)}", flush=True)
    failed = 0
    for number in range(1, rounds + 1):
        run, kills = play_round(folder / f"round-{number:02d}", text, chance)
        wrong = check(run, expected)
        failed += bool(wrong)
        verdict = "; ".join(wrong) or f"equal ({len(run.attempt_numbers())} attempts)"
        print(f"round {number}: killed {', '.join(kills)}: {verdict}", flush=True)
    print(f"{rounds - failed} of {rounds} equal")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True)
        return min(1, campaign(args.rounds, args.seed, args.keep))
    with tempfile.TemporaryDirectory() as folder:
        return min(1, campaign(args.rounds, args.seed, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
