"""Make real ranks hang on this machine, and check whether the diagnosis names the ranks at fault.

    python -m benchmarks.hangs [--seed N] [--only KIND ...] [--door loop plain trainer] [--rounds N]

Each case is a run of 2 to 8 ranks that use gloo on CPUs. One or two ranks, chosen by the seed, behave
incorrectly in the third step. The run executes a script with `trainkit.loop`, a plain torch.distributed
script, or the built-in trainer. The answer in end.json and `trainkit diagnose` is `right` if it names exactly
the ranks at fault, `unknown` if it names no rank, and `wrong` otherwise. gloo keeps no records of a plain
script, so only stacks are available: put py-spy on PATH for plain scripts.

Prints a line for each case and a table by kind. The exit code is 0 if no case is wrong, and 90 % of the cases
for which records exist are right.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent

from tests.support.broken_runs import TRAINER
from trainkit.capabilities.diagnose.diagnose import diagnose
from trainkit.formats import rank_list, table
from trainkit.run.end import read_end
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

DOORS = ("loop", "plain", "trainer")
TIMEOUT_S = 400.0
RIGHT_SHARE = 0.9
RESULTS = ("right", "unknown", "wrong")

HEAD = """\
import ctypes, os, signal, sys, time
import torch, torch.distributed as dist
rank, world, wrong = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {wrong}
torch.set_num_threads(1)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        while rank in wrong:
            time.sleep(1)
        return index

def add_up(size=16, group=None, dtype=torch.float32):
    dist.all_reduce(torch.ones(size, dtype=dtype), group=group)

def gather(group=None):
    one = torch.ones(4)
    dist.all_gather([torch.empty(4) for _ in range(dist.get_world_size(group))], one, group=group)

def usual():
    add_up()
    gather()

def fail():
{kind}

def make_groups():
    half = world // 2
    groups = [dist.new_group(list(ranks), group_desc="half") for ranks in (range(half), range(half, world))]
    return groups[rank >= half]
"""
PLAIN = """
dist.init_process_group("gloo")
half = make_groups()
for step in range(6):
    usual() if step != 2 else fail()
    print(f"step {step}", flush=True)
dist.barrier()
"""
LOOP = """
from trainkit.loop import attach
run = attach()
half = make_groups()
for step in run.steps(1000000):
    usual() if step != 3 else fail()
    run.log(loss=1.0)
"""


@dataclass(frozen=True)
class Kind:
    """A type of hang: the code that the ranks execute in the step that hangs."""

    code: str
    smallest: int = 2
    """Minimum number of ranks for this type of hang."""
    is_known: bool = True
    """True if the records can identify the ranks at fault."""
    num_wrong: int = 1


_LATE = "if rank in wrong: {late}\nusual()"
_LOCK = "mutex = ctypes.create_string_buffer(64); [ctypes.{}(None).pthread_mutex_lock(mutex) for _ in '..']"
KINDS = {
    "late": Kind(_LATE.format(late="time.sleep(10**6)")),
    "late-native": Kind(_LATE.format(late=_LOCK.format("CDLL"))),
    "late-gil": Kind(_LATE.format(late=_LOCK.format("PyDLL"))),
    "late-two": Kind(_LATE.format(late="time.sleep(10**6)"), 4, num_wrong=2),
    "spin": Kind(_LATE.format(late="exec('while True: pass')")),
    "loader": Kind(_LATE.format(late="next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1)))")),
    "stopped": Kind(_LATE.format(late="os.kill(os.getpid(), signal.SIGSTOP)")),
    "killed": Kind(_LATE.format(late="os.kill(os.getpid(), signal.SIGKILL)")),
    "shapes": Kind("gather(); add_up(8 if rank in wrong else 16); usual()", 3),
    "skipped": Kind("if rank in wrong: gather()\nelse: usual()", 3),
    "missing": Kind("if rank in wrong: dist.barrier()\nusual()", 3),
    "extra": Kind("usual()\nif rank in wrong: add_up(4)\nusual()", 3),
    "order": Kind("if rank in wrong: gather(); add_up()\nelse: usual()", 3),
    "order-groups": Kind("if rank in wrong: add_up(4, half); add_up()\nelse: add_up(); add_up(4, half)", 6),
    "group-late": Kind("if rank in wrong: time.sleep(10**6)\nadd_up(4, half); usual()", 4),
    "group-skipped": Kind("if rank not in wrong: add_up(4, half)\nusual()", 6),
    "receive": Kind(
        "if rank in wrong: dist.recv(torch.empty(4), (rank + 1) % world)\nusual()", 2, is_known=False
    ),
}
TRAINER_KINDS = ("late", "late-native", "late-gil", "spin", "stopped", "killed", "late-two")
IN_TRAINER = """\
import os, sys
if os.environ.get("RANK") and "trainkit.trainer" in sys.orig_argv:
    import ctypes, signal, time
    from trainkit.trainer.causal_lm import PrefetchedBatches
    rank, wrong, given = int(os.environ["RANK"]), {wrong}, PrefetchedBatches.__next__
    count = 0
    def usual(): ...
    def give_or_fail(self):
        global count
        count += 1
        if count == 6:
{kind}
        return given(self)
    PrefetchedBatches.__next__ = give_or_fail
"""


@dataclass(frozen=True)
class Case:
    """A run with hanging ranks, and whether trainkit's diagnosis is correct."""

    kind: str
    door: str
    world: int
    wrong: tuple[int, ...]
    device: str = "cpu"

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "trainkit", "submit", "--backend", "local", "--follow", "--nodes", "1"]
        argv += ["--run-dir", str(folder / "run"), "--gpus-per-node", str(self.world)]
        argv += ["--set", "requeue.max=0", "--set", "device=cpu"]
        code = dedent(KINDS[self.kind].code)
        env = {**os.environ, "XDG_STATE_HOME": str(folder / "home"), "XDG_CONFIG_HOME": str(folder / "home")}
        paths = [str(Path(__file__).parents[1])]
        hang = ("--set", "requeue.hang_min_s=5", "--set", "requeue.hang_factor=2")
        if self.door == "trainer":
            (folder / "site").mkdir()
            text = IN_TRAINER.format(wrong=self.wrong, kind=indent(code, " " * 12))
            (folder / "site" / "sitecustomize.py").write_text(text)
            paths.insert(0, str(folder / "site"))
            settings = (*TRAINER, "train.steps=100000", "train.global_batch_size=null", "data.num_workers=0")
            settings += (f"device={self.device}",)
            argv += [part for setting in settings for part in ("--set", setting)] + [*hang]
        else:
            body = {"plain": PLAIN, "loop": LOOP}[self.door]
            text = HEAD.format(wrong=self.wrong, kind=indent(code, " " * 4)) + body
            (folder / "train.py").write_text(text)
            argv += [*(hang if self.door == "loop" else ("--set", "requeue.silence_s=90"))]
            argv += ["--", "python", "train.py"]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        with (folder / "submit.log").open("wb") as log:
            return subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)

    def judge(self, run: RunDir) -> tuple[str, str]:
        """Return ``right``, ``unknown`` or ``wrong``, and the diagnosis of the run."""
        end = read_end(run.attempt(1))
        if end is None or end.verdict is None:
            return "wrong", f"no root cause: {end and end.reason}"
        verdict, found = end.verdict, diagnose(run.attempt(1), read_job(run))
        text = f"{verdict.type}: {verdict.message} | {found.cause}"
        if verdict.rank is None or found.rank is None:
            return "unknown", text
        names_all = len(self.wrong) == 1 or rank_list(self.wrong) in str(verdict.message)
        return (
            "right" if verdict.rank in self.wrong and found.rank == verdict.rank and names_all else "wrong",
            text,
        )


def draw(kind: str, door: str, chance: random.Random) -> Case:
    """Draw a case: a number of ranks, and the ranks at fault."""
    world = chance.randint(KINDS[kind].smallest, 8 if KINDS[kind].smallest > 4 else 5)
    return Case(kind, door, world, tuple(sorted(chance.sample(range(world), KINDS[kind].num_wrong))))


def run_case(case: Case) -> tuple[str, str]:
    """Run a case until it ends, and judge the diagnosis."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = case.start(folder)
        try:
            started.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            cancel = [sys.executable, "-m", "trainkit", "cancel", "--now", str(folder / "run")]
            subprocess.run(cancel, cwd=Path(__file__).parents[1], capture_output=True, timeout=TIMEOUT_S)
            return "wrong", "did not end"
        finally:
            started.kill()
            started.wait()
        return case.judge(RunDir(folder / "run"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--door", nargs="+", choices=("loop", "plain", "trainer"), default=["loop", "plain", "trainer"]
    )
    options = parser.parse_args(argv)
    chance = random.Random(options.seed)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for _ in range(options.rounds):
        for door in options.door:
            for kind in options.only:
                if door == "trainer" and kind not in TRAINER_KINDS:
                    continue
                case, begin_s = draw(kind, door, chance), time.monotonic()
                result, text = run_case(case)
                counts.setdefault((door, kind), Counter())[result] += 1
                who = f"{rank_list(case.wrong)} of {case.world}"
                print(
                    f"{result:8} {door:8} {kind:14} {who:14} {time.monotonic() - begin_s:4.0f} s  {text}",
                    flush=True,
                )
    rows = [
        [door, kind, *(str(found[name]) for name in ("right", "unknown", "wrong"))]
        for (door, kind), found in counts.items()
    ]
    print("\n" + table([["door", "kind", "right", "unknown", "wrong"], *rows], right=range(2, 5)))
    recorded = [found for (door, kind), found in counts.items() if door != "plain" and KINDS[kind].is_known]
    right, all_cases = sum(found["right"] for found in recorded), sum(found.total() for found in recorded)
    print(f"with records: {right} of {all_cases} right")
    wrong = any(found["wrong"] for found in counts.values())
    return 1 if wrong or right < RIGHT_SHARE * all_cases else 0


if __name__ == "__main__":
    sys.exit(main())
