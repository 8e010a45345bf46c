"""Break eleven important lines, one at a time, and show whether the tests detect it.

    python -m benchmarks.mutants [NAME ...]

Run it after tests were merged or removed. The benchmark changes files of the checkout, which must have no
uncommitted changes, and restores each file. The exit code is 1 if the tests miss a mutant.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1200


@dataclass(frozen=True)
class Mutant:
    """A replaced line of a file, and the tests that must fail because of it."""

    file: str
    line: str
    becomes: str
    tests: str


MUTANTS = {
    "supervisor-forgets-cancel": Mutant(
        "job/supervisor.py", "if attempt.entry.is_cancelled:", "if False:", "tests/job"
    ),
    "supervisor-leaves-jobs": Mutant(
        "job/supervisor.py", "self.allocation.cancel_pending(attempt.job)", "pass", "tests/job tests/control"
    ),
    "restart-of-what-cannot-be-helped": Mutant(
        "job/decision.py", "if EXIT_NO_RESTART in codes:", "if False:", "tests/job"
    ),
    "restart-without-end": Mutant(
        "job/decision.py",
        'elif limit is None and cause == "timeout" and _makes_no_progress(run):',
        "elif False:",
        "tests/job",
    ),
    "checkpoint-without-manifest": Mutant(
        "trainer/checkpoint/saver.py",
        "write_json(unfinished / MANIFEST_NAME, manifest)",
        "pass",
        "tests/trainer/test_saver.py tests/trainer/test_resume.py",
    ),
    "checkpoint-in-place": Mutant(
        "trainer/checkpoint/saver.py",
        "unfinished.rename(target)",
        "target.mkdir(); [file.rename(target / file.name) for file in sorted(unfinished.iterdir())]",
        "tests/trainer/test_saver.py tests/trainer/test_faults.py tests/trainer/test_resume.py",
    ),
    "damage-is-not-seen": Mutant(
        "run/manifest.py",
        'return plain_damage(checkpoint) or (hash_damage(checkpoint) if reads_tensors else "")',
        'return ""',
        "tests/run/test_manifest.py tests/trainer/test_faults.py",
    ),
    "other-order": Mutant("data/order.py", "_NUM_ROUNDS = 10", "_NUM_ROUNDS = 9", "tests/data"),
    "epochs-alike": Mutant(
        "data/order.py",
        "epochs.ravel().astype(np.uint64)",
        "0 * epochs.ravel().astype(np.uint64)",
        "tests/data",
    ),
    "hosts-in-another-order": Mutant(
        "scheduler.py",
        "for picked in product(*reversed(numbers[:-1]), *numbers[-1:]):",
        "for picked in product(*reversed(numbers[:-1]), *(sorted(last)[::-1] for last in numbers[-1:])):",
        "tests/slurm",
    ),
    "tasks-of-one-node": Mutant(
        "slurm/hosts.py", 'int(match["repeat"] or 1)', "1", "tests/slurm tests/backends/slurm"
    ),
}


def main() -> int:
    """Try the mutants; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(MUTANTS)}")
    names = parser.parse_args().names or MUTANTS
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT).returncode:
        print("error: there are uncommitted changes\n\nhint: commit or stash them", file=sys.stderr)
        return 2
    survivors = [name for name in names if not is_caught(name, MUTANTS[name])]
    return 1 if survivors else 0


def is_caught(name: str, mutant: Mutant) -> bool:
    """Return whether a test fails with a mutant; print the first failing test."""
    file = ROOT / "trainkit" / mutant.file
    text = file.read_text()
    assert text.count(mutant.line) == 1, f"{name}: {mutant.line!r} stands {text.count(mutant.line)} times"
    began_s = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    try:
        file.write_text(text.replace(mutant.line, mutant.becomes))
        argv = [*pytest, "--numprocesses=2", "--dist=loadgroup", *mutant.tests.split()]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    finally:
        file.write_text(text)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    verdict = f"caught by {failed[0].split()[1]}" if failed else "SURVIVED"
    print(f"{name:34} {time.monotonic() - began_s:4.0f} s  {verdict}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
