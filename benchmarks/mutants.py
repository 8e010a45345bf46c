"""Break important or random lines of code, one at a time, and show whether the tests detect each mutant.

    python -m benchmarks.mutants [NAME ...]
    python -m benchmarks.mutants --draw 24 --seed 1

With `--draw`, the conditions of random lines in trainkit are negated, and the unit tests that import the file
are run, without slow tests. After tests have been merged or removed, run the benchmark with the same seed as
before. The benchmark changes files in the checkout, which must have no uncommitted changes, and restores each
file. The exit code is 1 if the tests miss a mutant.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
import time
from dataclasses import dataclass

from tools.changed_tests import ROOT, tests_of

TIMEOUT_S = 1200


@dataclass(frozen=True)
class Mutant:
    """A replacement for a line of a file, and the tests that must fail because of it."""

    file: str
    line: str
    becomes: str
    tests: str
    has_slow_tests: bool = True


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
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="negate N random conditions instead")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    mutants = draw(args.draw, args.seed) if args.draw else MUTANTS
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT).returncode:
        print("error: there are uncommitted changes\n\nhint: commit or stash them", file=sys.stderr)
        return 2
    survivors = [name for name in args.names or mutants if not is_caught(name, mutants[name])]
    return 1 if survivors else 0


def draw(number: int, seed: int) -> dict[str, Mutant]:
    """Return mutants. Each mutant negates the condition in one random line."""
    found = []
    for file in sorted((ROOT / "trainkit").rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.If, ast.While, ast.IfExp)) and node.test.lineno == node.test.end_lineno:
                line = text.splitlines()[node.test.lineno - 1]
                condition = ast.get_source_segment(text, node.test) or ""
                if text.count(line) == 1 and line.count(condition) == 1:
                    found.append((file, node.test.lineno, line, condition))
    drawn = random.Random(seed).sample(found, number)
    return {
        f"{file.relative_to(ROOT / 'trainkit')}:{number}": Mutant(
            str(file.relative_to(ROOT / "trainkit")),
            line,
            line.replace(condition, f"(not ({condition}))"),
            " ".join(tests_of(str(file.relative_to(ROOT)))),
            has_slow_tests=False,
        )
        for file, number, line, condition in drawn
    }


def is_caught(name: str, mutant: Mutant) -> bool:
    """Return whether a test detects a mutant; print the first failing test."""
    file = ROOT / "trainkit" / mutant.file
    text = file.read_text()
    assert text.count(mutant.line) == 1, f"{name}: {mutant.line!r} stands {text.count(mutant.line)} times"
    began_s = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    try:
        file.write_text(text.replace(mutant.line, mutant.becomes))
        marks = [] if mutant.has_slow_tests else ["-m", "not slow"]
        argv = [*pytest, "--numprocesses=2", "--dist=loadgroup", *marks, *mutant.tests.split()]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        verdict = f"caught by {failed[0].split()[1]}" if failed else "SURVIVED"
    except subprocess.TimeoutExpired:  # The mutant may wait forever, or this machine may be busy.
        failed, verdict = [], f"TIMED OUT after {TIMEOUT_S} s"
    finally:
        file.write_text(text)
    print(f"{name:44} {time.monotonic() - began_s:4.0f} s  {verdict}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
