"""Tests trainers other than the built-in one, with their launchers, on two hosts."""

import json
import re
import shlex
import shutil
from pathlib import Path

from tests.on_slurm.login import BACKENDS, TRAINKIT, agents_of, log_of, settings
from trainkit.run.events import training_curve
from trainkit.run.rundir import RunDir

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHAPE = ("--nodes", "2", "--gpus-per-node", "2")
TIMEOUT_S = 400.0
SAVES_SLOWLY = """
import os, signal, sys, time
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda n, f: asked.append(signal.Signals(n).name))
rank, attempt = os.environ["RANK"], os.environ["TRAINKIT_JOB_ATTEMPT"]
# In one piece: the ranks of a launcher share a log.
sys.stdout.write(f"rank {rank} of {os.environ['WORLD_SIZE']} attempt {attempt}\\n")
while not asked:
    time.sleep(0.02)
time.sleep(1.5)
open(f"{os.environ['TRAINKIT_JOB_RUN_DIR']}/saved-{attempt}-{rank}", "w").write(asked[0])
sys.exit(75)
"""


def test_an_example_over_two_hosts(login):
    shutil.copytree(EXAMPLES, login.folder / "examples")
    args = ["--nodes", "2", "--gpus-per-node", "1", "--launcher", "accelerate"]
    run = login.submit(*args, "--", "examples/accelerate_train.py", "--steps", "20")
    login.finish(run, TIMEOUT_S)
    assert [re.findall(r"(\d) of 2 is done", log_of(run, rank)) for rank in range(2)] == [["0"], ["1"]]
    printed = {int(step): float(loss) for step, loss in re.findall(r"step=(\d+) loss=(\S+)", log_of(run))}
    assert printed[20] < printed[1] / 10
    assert {record.step: record.number("loss") for record in training_curve(run)} == printed
    assert agents_of(run) == list(enumerate(login.cluster.hosts[:2]))


def test_a_command_is_a_rank_with_everything_that_trainers_read(login):
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "OMP_NUM_THREADS",
    )
    script = login.script(
        f"import os, socket\nprint(*(os.environ[name] for name in {names}), socket.gethostname())"
    )
    # These variables of the submitter's shell describe another rank.
    stale = {
        "RANK": "7",
        "WORLD_SIZE": "99",
        "MASTER_ADDR": "elsewhere",
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "9",
    }
    stale |= {"SBATCH_PARTITION": "debug", "SLURM_PROCID": "5", "SLURM_STEP_ID": "3"}
    args = [*SHAPE, *settings("resources.cpus_per_gpu=2", "resources.extra.exclusive=true")]
    runs = [
        login.submit("--backend", backend, *args, "--", "python", script, env=stale) for backend in BACKENDS
    ]
    for run in runs:
        first, second = (host for _, host in agents_of(login.finish(run))[::2])
        assert [log_of(run, rank).split() for rank in range(4)] == [
            [str(rank), str(rank % 2), "4", "2", str(rank // 2), first, "2", first if rank < 2 else second]
            for rank in range(4)
        ]


def test_a_launcher_gives_its_ranks_their_time_and_comes_back(login):
    """torchrun itself dies of SIGUSR2, and kills its ranks if it gets two stop signals."""
    script = login.script(SAVES_SLOWLY)
    run = login.submit(*SHAPE, "--launcher", "torchrun", "--", script)
    for attempt, command, received in ((1, "requeue", {"SIGUSR2", "SIGTERM"}), (2, "cancel", {"SIGTERM"})):
        for rank in range(4):
            login.wait_for_log(run, f"rank {rank} of 4 attempt {attempt}", rank - rank % 2, attempt)
        assert login.trainkit(command, str(run.path)).returncode == 0
        login.wait_for_end(run, attempt)
        # Slurm sends the SIGUSR2 of a requeue to the ranks too, and the node agent's SIGTERM may arrive
        # first.
        saved = [run.path / f"saved-{attempt}-{rank}" for rank in range(4)]
        signals = [file.read_text() if file.exists() else "nothing saved" for file in saved]
        assert set(signals) <= received, f"{signals}\n{login.logs_and_attempts(run)}"
    assert login.wait_for_end(run, 1)["action"] == "requeue"
    assert login.wait_for_end(run, 2)["state"] == "cancelled"
    assert login.wait_for_end(run, 2)["verdict"] is None


def test_standard_input_reaches_rank_0_at_each_attempt(login):
    program = "import os, sys; print('rank', os.environ['RANK'], flush=True); sys.exit(75)"
    submit = f"{shlex.join(TRAINKIT)} submit {login.config} --nodes 2 --json -- python3 -"
    runs = []
    for backend in BACKENDS:
        line = f"{submit.replace(' --json', f' --backend {backend} --json')} <<'E'\n{program}\nE"
        done = login.run(["bash", "-c", line])
        assert done.returncode == 0, done.stderr
        runs.append(RunDir(json.loads(done.stdout)["run_dir"]))
    for run in runs:
        assert login.wait_for_end(run)["reason"], login.logs_and_attempts(run)
        assert (log_of(run, 0), log_of(run, 1)) == ("rank 0\n", "")
        login.trainkit("resume", str(run.path))
    for run in runs:
        login.wait_for_end(run, attempt=2)
        assert log_of(run, 0, attempt=2) == "rank 0\n"
    step = f"echo word | srun --nodes=2 {shlex.join(TRAINKIT)} run {login.config} --name step -- cat"
    done = login.run(["bash", "-c", step])
    assert "word" in done.stdout.splitlines(), done.stdout + done.stderr
