"""Count the lost steps and the signals of a script that runs in a shell, a launcher or another wrapper.

    python -m benchmarks.wrappers [--slurm 24.11] [--nodes 1] [--cases tee ...] [--asks cancel ...] [--keep]

Starts a cluster of four hosts on this machine (as root; see tools/slurm_cluster), and submits each wrapper
with two ranks on one or two hosts, up to eight runs at a time. A stop request is sent to all runs at the same
time, after all ranks have passed step 20 of their attempt. The next stop request is sent to the following
attempt. The script in the wrapper (`wrapper_cases/train.py`) records its steps, signals and saves.

The benchmark prints a table of "signals of a rank / steps lost". A step is considered lost if the next
attempt computes it again. The exit code is 0 if no rank has lost a step or received a second signal. `conda
run` and `apptainer exec` are replaced by stand-ins (`wrapper_cases/starts.py`). `poetry run` replaces itself
with the command, as `env` does. Programs that are not installed are omitted: numactl, GNU time, and uv
(unless given as `--uv PATH`).
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.notices import (
    LIMIT,
    MIN_STEPS,
    NUM_RANKS,
    RETURNS,
    Cell,
    ask,
    has_ended,
    on_cluster,
    options,
    print_cells,
    wait_or_note,
)
from tests.on_slurm.login import Login, settings
from tests.support.programs import FORWARDS, PASSES_NOTHING_ON
from trainkit.formats import plural
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

PARTS = Path(__file__).parent / "wrapper_cases"
PYTHON = sys.executable
TRAIN = (PYTHON, "train.py")
LINE = shlex.join(TRAIN)
ASKS = ("preempted", "requeue", "cancel", "limit")


def _bash(script: str) -> tuple[str, ...]:
    return ("bash", "-c", script)


def _starts(how: str) -> tuple[str, ...]:
    return (PYTHON, "starts.py", how, *TRAIN)


CASES: dict[str, tuple[str, ...]] = {
    "bash run.sh": ("bash", "run.sh"),
    "tee": _bash(f"{LINE} 2>&1 | tee -a log.$RANK"),
    "nested sh": ("sh", "-c", f"sh -c {shlex.quote(f'{LINE}; exit $?')}; exit $?"),
    "time": _bash(f"time {LINE}"),
    "/usr/bin/time": ("/usr/bin/time", *TRAIN),
    "accelerate": (PYTHON, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "train.py"),
    "subprocess.run": _starts("run"),
    "check_call": _starts("check"),
    "Popen": _starts("wait"),
    "env -S": ("env", "-S", f"nice {LINE}"),
    "numactl": ("numactl", "--localalloc", *TRAIN),
    "conda run": _starts("conda"),
    "uv run": ("uv", "run", "--no-project", "--python", *TRAIN),
    "trap that forwards": _bash(FORWARDS.format(LINE)),
    "trap that waits": _bash(f"trap 'rm -f lock' EXIT TERM; {LINE}; exit $?"),
    "trap that passes nothing on": _bash(PASSES_NOTHING_ON.format(LINE)),
    "trap that leaves": _bash(f"trap 'exit 3' TERM; {LINE} & wait"),
    "timeout": ("timeout", "1d", *TRAIN),
    "xargs": _bash(f"echo | xargs {LINE}"),
    "make": _bash(f"printf 'train:\\n\\tcd . && {LINE}\\n' | make -f -"),
    "apptainer exec": (PYTHON, "-I", *_starts("apptainer")[1:]),
    "torchrun": _bash(
        f"export MEMBER=$RANK; exec {PYTHON} -m torch.distributed.run --standalone --nproc_per_node 1 "
        "train.py"
    ),
}
"""Maps a wrapper to the command that is submitted."""


def submit(login: Login, name: str, nodes: int, more: Sequence[str]) -> RunDir:
    config = login.folder / f"{re.sub(r'[^a-z]+', '-', name.lower()).strip('-')}.yaml"
    config.write_text("device: cpu\nrequeue: {grace_s: 20}\n")
    gpus = NUM_RANKS // nodes
    return login.submit(
        *("--nodes", str(nodes), "--gpus-per-node", str(gpus), "--partition", "low", "--no-snapshot"),
        *settings("resources.cpus_per_gpu=1", "resources.mem=2G", "requeue.max_crashes=0"),
        *(*more, "--", *CASES[name]),
        config=config,
    )


def notes(run: RunDir, rank: int, attempt: int, what: str) -> list[str]:
    """Return the records of a rank in an attempt."""
    file = run.path / f"notes.{rank}"
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [value for number, kind, value in lines if (int(number), kind) == (attempt, what)]


def are_training(run: RunDir, attempt: int, num_steps: int = MIN_STEPS) -> bool:
    ranks = range(NUM_RANKS)
    return all(len(notes(run, rank, attempt, "step")) >= num_steps for rank in ranks)


def judge(login: Login, name: str, run: RunDir, attempt: int) -> Cell:
    """Wait until a run continues after a stop request in an attempt; return the effect on its ranks."""
    if not wait_or_note(run.attempt(attempt).end_file.exists, f"the end of attempt {attempt} of {name}"):
        return Cell("?", None, ["never ended"])
    end = read_json(run.attempt(attempt).end_file)
    lines = [f"end: {end['state']}, {end['action']}, {end['cause']}: {end['reason']}"]
    if end["action"] not in RETURNS:
        resumed = login.trainkit("resume", str(run.path))
        lines += [f"resume: {resumed.stderr.strip()}"] if resumed.returncode else []
    if not wait_or_note(lambda: are_training(run, attempt + 1, 1), f"attempt {attempt + 1} of {name}"):
        return Cell("?", None, lines)
    counts, lost = set[int](), 0
    for rank in range(NUM_RANKS):
        counts.add(len(notes(run, rank, attempt, "signal")))
        last, first = notes(run, rank, attempt, "step")[-1], notes(run, rank, attempt + 1, "step")[0]
        lost = max(lost, int(last) + 1 - int(first))
        lines.append(f"rank {rank}: {notes(run, rank, attempt, 'signal')}, {last} -> {first}")
    return Cell("-".join(map(str, sorted(counts))), lost, lines)


def disturb(login: Login, names: list[str], asks: Sequence[str], nodes: int) -> dict[tuple[str, str], Cell]:
    """Submit wrappers, and stop them in the given ways in turn; a time limit uses separate runs."""
    found: dict[tuple[str, str], Cell] = {}
    others = [what for what in asks if what != "limit"]
    for series, more in ((others, ()), (["limit"] if "limit" in asks else [], LIMIT)):
        runs = {name: submit(login, name, nodes, more) for name in (names if series else ())}
        for number, what in enumerate(series, 1):
            for name, run in list(runs.items()):
                if not wait_or_note(
                    lambda run=run, number=number: are_training(run, number) or has_ended(run, number),
                    f"{MIN_STEPS} steps of {name}",
                ):
                    found[name, what] = Cell("?", None, [f"no {MIN_STEPS} steps: see {runs.pop(name).path}"])
            ask(login, what, runs.values())
            for name, run in runs.items():
                cell = found[name, what] = judge(login, name, run, number)
                print(f"- {what}, {name}: {cell.text}", flush=True)
                for line in cell.lines:
                    print(f"  - {line}", flush=True)
        for run in runs.values():
            login.trainkit("cancel", "--now", str(run.path))
        login.cluster.cancel_all()
    return found


def prepare(folder: Path, uv: str | None) -> list[str]:
    """Write the scripts into a folder; return the wrappers that are available on this machine."""
    for part in PARTS.glob("*.py"):
        shutil.copy(part, folder)
    (folder / "run.sh").write_text(
        f"# A comment, and the training.\n{LINE}\ncode=$?\necho ended\nexit $code\n"
    )
    if uv is not None:
        CASES["uv run"] = (uv, *CASES["uv run"][1:])
    return [name for name, command in CASES.items() if shutil.which(command[0])]


def is_right(cell: Cell) -> bool:
    return cell.signals == "1" and cell.lost is not None and cell.lost <= 0


def main() -> int:
    parser = options(__doc__, CASES, ASKS)
    parser.add_argument("--nodes", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--uv", help="the program uv")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="wrappers-"))
    present = prepare(folder, args.uv)
    names = [name for name in args.cases if name in present]
    found: dict[tuple[int, str, str], Cell] = {}
    with on_cluster(args, folder) as (login, at_once):
        for nodes in args.nodes:
            for first in range(0, len(names), at_once):
                cells = disturb(login, names[first : first + at_once], args.asks, nodes)
                found |= {(nodes, *key): cell for key, cell in cells.items()}
    wrong = sum(not is_right(cell) for cell in found.values())
    print(f"{wrong} of {len(found)} cases wrong")
    columns = {(n, what): f"{what}, {plural(n, 'host')}" for n in args.nodes for what in args.asks}
    rows = {name: [found.get((nodes, name, what)) for nodes, what in columns] for name in names}
    print_cells("wrapper", [*columns.values()], rows, folder if args.keep else None)
    if not args.keep:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
