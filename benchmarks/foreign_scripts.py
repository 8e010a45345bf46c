"""Run scripts of other frameworks on a Slurm cluster, and kill, preempt, requeue, cancel and resume the runs.

    python -m benchmarks.foreign_scripts --python VENV/bin/python [--nanogpt FOLDER] [--only KIND ...]

Starts a cluster of four hosts on this machine (as root; see tools/slurm_cluster). On two hosts, the benchmark
runs each script of `benchmarks/foreign/`, none of which imports trainkit, and the scripts of `examples/` that
get their framework's configuration from trainkit. VENV must contain torch, accelerate, transformers,
lightning and deepspeed. FOLDER is a clone of nanoGPT; the benchmark copies it, and replaces the lines for
CUDA in the copy.

Every script first runs without disturbances. In further cases, a rank is killed, and the job is preempted,
requeued with `trainkit requeue`, and cancelled and resumed. A case passes if the script reaches its last step
on the same ranks, with the same weights as the undisturbed run. The benchmark prints one table row per case.
The exit code is 0 if all cases pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.on_slurm.login import Login, wait_for
from tools.slurm_cluster.cluster import up
from tools.slurm_cluster.processes import Pid
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

SCRIPTS = Path(__file__).parent / "foreign"
EXAMPLES = Path(__file__).parents[1] / "examples"
NUM_STEPS = 100
MANY_STEPS = 4000
"""Number of steps of the examples, which do not sleep between steps."""
LOG_EVERY = 20
"""Maximum interval between printed steps; the examples print every tenth or twentieth step."""
DISTURBED_AT = 25
TIMEOUT_S = 400.0
TOLERANCE = 1e-6
"""Maximum relative difference between the sums of all weights."""
CASES = ("undisturbed", "killed", "preempted", "requeued", "resumed")
RETURNS = ("requeue", "restart", "resubmit")

NANOGPT = """
init_from=scratch
if [ -f out/ckpt.pt ]; then init_from=resume; fi
exec "$0" train.py --init_from=$init_from --dataset=random --device=cpu --backend=gloo --compile=False \
  --dtype=float32 --n_layer=1 --n_head=2 --n_embd=16 --block_size=32 --batch_size=4 --eval_iters=1 \
  --gradient_accumulation_steps=2 --eval_interval=10 --max_iters={steps} --warmup_iters=1
"""


DEEPSPEED = ("parallel.zero=2", "train.device_batch_size=16", "optimizer.lr=1e-3")
LIGHTNING = "--num-nodes {num_nodes} --devices {devices} --max-steps {max_steps}"


def _set(*pairs: str) -> tuple[str, ...]:
    return tuple(word for pair in pairs for word in ("--set", pair))


@dataclass(frozen=True)
class Kind:
    """A script and its submission options."""

    options: tuple[str, ...]
    command: tuple[str, ...]
    num_ranks: int = 2
    has_exact_resume: bool = True
    """True if the framework reads the same data after it resumes."""
    num_steps: int = NUM_STEPS


def kinds(python: str, nanogpt: Path | None) -> dict[str, Kind]:
    """Return the scripts by name; `python` is the interpreter that runs them."""
    one, two = ("--gpus-per-node", "1"), ("--gpus-per-node", "2")
    steps, many = str(NUM_STEPS), str(MANY_STEPS)
    found = {
        "DDP, a task per rank": Kind((*one, "--per", "gpu"), (python, "ddp.py", steps)),
        "DDP, torchrun": Kind((*two, "--launcher", "torchrun"), (python, "ddp.py", steps), 4),
        "HF Trainer": Kind(one, (python, "huggingface.py", steps)),
        "HF Trainer, torchrun": Kind((*one, "--launcher", "torchrun"), (python, "huggingface.py", steps)),
        "Lightning, a task per rank": Kind(
            (*one, "--per", "gpu"), (python, "lightning_fit.py", steps, "2", "1")
        ),
        "Lightning, a task per node": Kind(
            (*two, "--per", "node"), (python, "lightning_fit.py", steps, "2", "2"), 4
        ),
        "accelerate": Kind((*one, "--launcher", "accelerate"), (python, "accelerate_loop.py", steps)),
        "Lightning, its SLURMEnvironment": Kind(
            (*one, "--per", "gpu"), (python, "lightning_slurm.py", steps, "2")
        ),
        "example, accelerate launcher": Kind(
            (*one, "--launcher", "accelerate", *_set("precision.dtype=bf16")),
            (python, "accelerate_train.py", "--steps", many),
            has_exact_resume=False,  # this script prints no weights
            num_steps=int(many),
        ),
        "example, DeepSpeed ZeRO-2": Kind(
            (*one, "--launcher", "deepspeed", *_set(*DEEPSPEED)),
            (python, "deepspeed_train.py", "--steps", many, "--deepspeed_config", "{ds_config}"),
            num_steps=int(many),
        ),
        "example, Lightning launcher": Kind(
            (*one, "--launcher", "lightning", *_set(f"train.steps={many}")),
            (python, "lightning_train.py", *LIGHTNING.split()),
            num_steps=int(many),
        ),
        "example, torchrun": Kind(
            (*one, "--launcher", "torchrun"),
            (python, "ddp_torchrun.py", "--steps", many),
            num_steps=int(many),
        ),
        "DeepSpeed ZeRO-1": Kind((*one, "--launcher", "deepspeed"), (python, "deepspeed_loop.py", steps)),
    }
    if nanogpt is not None:
        script = NANOGPT.format(steps=steps)
        # nanoGPT draws new random batches after it resumes.
        found["nanoGPT"] = Kind(one, ("sh", "-c", script, python), has_exact_resume=False)
    return found


def copy_nanogpt(source: Path, folder: Path) -> None:
    """Copy nanoGPT into a folder, and adapt the copy to CPUs and random data."""
    for name in ("model.py", "configurator.py", "train.py"):
        shutil.copy(source / name, folder)
    train = folder / "train.py"
    text = train.read_text()
    for cuda, cpu in (
        ("device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n", "device = 'cpu'\n"),
        ("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
        ("# timing and logging", "time.sleep(0.1)"),
    ):
        assert cuda in text, cuda
        text = text.replace(cuda, cpu)
    train.write_text(text)
    data = folder / "data" / "random"
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        (data / name).write_bytes(bytes(20_000))


def logs(run: RunDir, attempt: int) -> str:
    """Return the output of all ranks of an attempt."""
    files = sorted(run.attempt(attempt).logs_dir.glob("rank-*.log"))
    return "\n".join(file.read_text(errors="replace") for file in files)


def steps(run: RunDir, attempt: int) -> list[int]:
    return [
        int(number) for number in re.findall(r"^(?:step|iter)[ =](\d+)", logs(run, attempt), re.MULTILINE)
    ]


def last_attempt(run: RunDir) -> int:
    return max(run.attempt_numbers())


def has_ended(run: RunDir, after: int = 0) -> bool:
    """Return whether a run has ended in an attempt later than `after`."""
    attempt = last_attempt(run)
    file = run.attempt(attempt).end_file
    return attempt > after and file.exists() and read_json(file)["action"] not in RETURNS


def disturb(login: Login, run: RunDir, case: str, command: Sequence[str]) -> None:
    """Disturb a run as required by its case, and wait until the run has ended."""
    done = 0
    if case == "killed":
        os.kill(process_of_rank(run, 1, command), signal.SIGKILL)
    elif case == "preempted":
        urgent = ["sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null"]
        login.run([*urgent, "--wrap=sleep 1"], check=True)
    elif case == "requeued":
        asked = login.trainkit("requeue", str(run.path))
        assert asked.returncode == 0, asked.stderr
    elif case == "resumed":
        asked = login.trainkit("cancel", str(run.path))
        assert asked.returncode == 0, asked.stderr
        wait_for(lambda: has_ended(run), "the cancelled run", TIMEOUT_S, 0.5)
        done = last_attempt(run)
        asked = login.trainkit("resume", str(run.path))
        assert asked.returncode == 0, asked.stderr
    wait_for(lambda: has_ended(run, done), "the end", TIMEOUT_S, 0.5)


def process_of_rank(run: RunDir, rank: int, command: Sequence[str]) -> int:
    """Return the pid of the process that runs the script as the given rank."""
    script = next(word for word in (*command, "train.py") if word.endswith(".py") and word in str(command))
    wanted = {f"TRAINKIT_JOB_RUN_DIR={run.path}".encode(), f"RANK={rank}".encode()}
    for folder in Path("/proc").iterdir():
        try:
            argv = (folder / "cmdline").read_bytes().split(b"\0")
            environ = set((folder / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if script.encode() in argv[1:4] and b"python" in argv[0] and wanted <= environ:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


def weights_of(run: RunDir, kind: Kind) -> set[float]:
    """Return the sums of all weights printed by the ranks of the last attempt at the last step."""
    # The ranks of a launcher write to the same log, so two lines may be merged into one.
    found = re.findall(rf"done at {kind.num_steps} weights (-?\d+\.\d{{9}})", logs(run, last_attempt(run)))
    return {float(text) for text in found}


def judge(run: RunDir, case: str, kind: Kind, reference: set[float] | None) -> list[str]:
    """Return all problems of a run that has ended."""
    wrong = []
    end = read_json(run.attempt(last_attempt(run)).end_file)
    if end["state"] != "finished":
        wrong.append(f"{end['state']}: {end['reason']}")
    if (case != "undisturbed") != (last_attempt(run) > 1):
        wrong.append(f"{last_attempt(run)} attempts")
    if max(steps(run, last_attempt(run)), default=0) < kind.num_steps - LOG_EVERY:
        wrong.append("the last step was not reached")
    found = re.findall(r"rank (\d+) of (\d+)", logs(run, 1))
    if found and sorted(found) != [(str(rank), str(kind.num_ranks)) for rank in range(kind.num_ranks)]:
        wrong.append(f"ranks {sorted(found)}")
    mine = weights_of(run, kind)
    if kind.has_exact_resume and not mine:
        wrong.append("no weights")
    for expected in reference or ():
        if any(abs(value - expected) > TOLERANCE * max(1.0, abs(expected)) for value in mine):
            wrong.append(f"weights {sorted(mine)}, undisturbed {expected}")
    return wrong


def first_steps(run: RunDir) -> list[int | None]:
    """Return the first step that each attempt printed."""
    return [min(steps(run, attempt), default=None) for attempt in run.attempt_numbers()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="Python interpreter that runs the scripts")
    parser.add_argument("--nanogpt", type=Path, help="a clone of nanoGPT")
    parser.add_argument("--only", nargs="+", help="parts of the names of scripts")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="foreign-"))
    num_wrong = 0
    cluster = up(owner=Pid.of(os.getpid()))
    try:
        login = Login(cluster, folder)
        for script in (*SCRIPTS.glob("*.py"), *EXAMPLES.glob("*_train.py"), EXAMPLES / "ddp_torchrun.py"):
            shutil.copy(script, folder)
        if args.nanogpt is not None:
            copy_nanogpt(args.nanogpt, folder)
        print("| script | ranks | case | first step of each attempt | seconds | result |")
        print("|---|---|---|---|---|---|")
        for name, kind in kinds(args.python, args.nanogpt).items():
            if args.only and not any(part in name for part in args.only):
                continue
            reference: set[float] | None = None
            for case in args.cases:
                began_s = time.monotonic()
                try:
                    label = re.sub(r"\W+", "-", f"{name} {case}".lower())
                    run = login.submit(
                        *("--name", label, "--nodes", "2", *kind.options),
                        *("--set", "requeue.grace_s=30", "--partition", "low", "--", *kind.command),
                    )
                    wait_for(
                        lambda run=run: max(steps(run, 1), default=0) >= DISTURBED_AT, "steps", TIMEOUT_S, 0.2
                    )
                    disturb(login, run, case, kind.command)
                    wrong = judge(run, case, kind, reference)
                    if case == "undisturbed":
                        reference = weights_of(run, kind)
                    first = first_steps(run)
                except AssertionError as error:
                    wrong, first = [str(error)[:300]], []
                num_wrong += bool(wrong)
                result = "WRONG: " + "; ".join(wrong) if wrong else "as undisturbed"
                seconds = time.monotonic() - began_s
                shown = ", ".join(map(str, first))
                print(
                    f"| {name} | {kind.num_ranks} | {case} | {shown} | {seconds:.0f} | {result} |", flush=True
                )
    finally:
        cluster.down()
    if num_wrong:
        print(f"{num_wrong} wrong; {folder} is kept")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
