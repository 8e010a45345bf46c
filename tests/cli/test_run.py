import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from steering import wait_for

from tests.support.programs import is_running
from tests.support.said import said
from trainkit.job.processes import descendants
from trainkit.job.rank_env import NONCE_VARIABLE, store_file
from trainkit.run.files import read_json
from trainkit.run.manifest import find_damage, published
from trainkit.run.process import process_stat
from trainkit.run.rundir import RunDir


def started(desk, *args):
    process = desk.start("run", str(desk.config), *args)
    run = RunDir(desk.folder / "runs/small")
    desk.wait_for_log(run, "attempt 1 rank 0")
    return process, run, read_json(run.job_file)["attempts"][0]["pid"]


def test_a_run_of_the_foreground_is_resumed_in_it(desk):
    desk.works("sys.exit({1: 75, 2: 3}.get(ATTEMPT, 0))")
    assert desk.trainkit("run", str(desk.config)).returncode == 0
    failed = desk.trainkit("resume", "small")
    assert (failed.returncode, failed.stdout.splitlines()[2:]) == (1, ["attempt 2 rank 0"])
    assert "exit code 3\n" in failed.stderr
    assert "detached" not in desk.trainkit("resume", "small", "--follow").stderr
    attempts = read_json(desk.folder / "runs/small/job.json")["attempts"]
    assert [one["reason"] for one in attempts] == ["run", "run", "resume"]


def test_ctrl_c_saves_and_ends(desk):
    process, run, supervisor = started(desk)
    process.send_signal(signal.SIGINT)
    shown, words = process.communicate(timeout=120)
    assert (process.returncode, "asked by SIGINT" in shown) == (130, True)
    assert "saving a checkpoint" in words
    assert read_json(run.attempt(1).end_file)["reason"] == "saved after SIGINT"
    assert not is_running(supervisor)


def test_second_ctrl_c_ends_at_once(desk):
    desk.works(
        """
        while not asked: time.sleep(0.02)
        print("told", flush=True)
        while len(asked) < 2: time.sleep(0.02)
        sys.exit(130)
        """
    )
    process, run, _ = started(desk)
    for text in ("saving a checkpoint before stopping", "stopping immediately"):
        process.send_signal(signal.SIGINT)
        wait_for(lambda text=text: text in process.stderr.readline())
        desk.wait_for_log(run, "told")  # two signals that arrive before the first is handled count as one
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert read_json(run.attempt(1).end_file)["state"] == "stopped"


def states(pids):
    return {stat.state for stat in map(process_stat, pids) if stat is not None}


@pytest.mark.parametrize("end", ["fg", "the terminal closes", "killed", "cancel"])
def test_ctrl_z_pauses_the_ranks(desk, end):
    """Ctrl-Z pauses the ranks until `fg`. A paused run saves if it is cancelled or its terminal is closed."""
    desk.works(
        """
        while not asked: print("works", flush=True); time.sleep(0.02)
        sys.exit(75)
        """
    )
    process, run, supervisor = started(desk)
    process.send_signal(signal.SIGTSTP)
    wait_for(lambda: states(below := descendants(supervisor)) == {"T"} and len(below) >= 2)
    wait_for(lambda: states([process.pid]) == {"T"})
    before = run.attempt(1).rank_log(0).read_text()
    assert desk.status(run)["state"] == "paused"
    assert "Ctrl-Z: `fg`" in desk.typed("watch", str(run.path), "--once").stdout
    assert run.attempt(1).rank_log(0).read_text() == before
    if end == "cancel":
        desk.trainkit("cancel", str(run.path))
        process.send_signal(signal.SIGCONT)
    elif end == "killed":
        process.kill()
    else:
        if end != "fg":
            process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGCONT)
    wait_for(lambda: run.attempt(1).rank_log(0).read_text() != before or not is_running(supervisor))
    if end == "fg":
        wait_for(lambda: desk.status(run)["state"] == "running")
        assert states(descendants(supervisor)) <= {"R", "S", "D"}
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    wait_for(lambda: not is_running(supervisor))
    reason = read_json(run.attempt(1).end_file)["reason"]
    assert reason == f"saved after {'SIGINT' if end == 'fg' else 'SIGTERM'}"


def test_the_store_of_an_agent_that_was_killed_is_removed(desk):
    desk.works("time.sleep(60)")
    process, _, supervisor = started(desk)
    agent = next(pid for pid in descendants(supervisor) if process_stat(pid).parent_pid == supervisor)
    environ = Path(f"/proc/{agent}/environ").read_bytes().decode().split("\0")
    (nonce,) = (one.partition("=")[2] for one in environ if one.startswith(f"{NONCE_VARIABLE}="))
    store = store_file(nonce)
    store.touch()
    left, new, link = (store_file(f"{word} {nonce}") for word in ("left", "new", "link"))
    new.touch()
    for one in (store, left):
        one.touch()
        os.utime(one, (0, 0))
    link.symlink_to(left)
    os.utime(link, (0, 0), follow_symlinks=False)
    desk.works("pass")  # another run removes copies of code that no process needs
    desk.trainkit("run", "--", "true")
    assert [one.is_symlink() or one.exists() for one in (left, new, link, store)] == [False, True, True, True]
    new.unlink()
    link.unlink()
    os.kill(agent, signal.SIGKILL)
    process.communicate(timeout=120)
    wait_for(lambda: not is_running(supervisor))
    assert not store.exists()


@pytest.mark.parametrize("module", ["click", "trainkit.config.schema"])
def test_ctrl_c_while_it_loads_is_one_word(desk, module):
    (desk.folder / "sitecustomize.py").write_text(
        "import os, signal, sys\nclass Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    environ = {**desk.environ, "PYTHONPATH": f"{desk.folder}:{desk.environ['PYTHONPATH']}"}
    done = desk.types("run", str(desk.config), env=environ)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "interrupted")


@pytest.mark.parametrize(("is_moved", "is_replaced"), [(True, True), (False, True), (False, False)])
def test_a_folder_that_is_moved_or_deleted_is_not_made_again(desk, is_moved, is_replaced):
    process, run, supervisor = started(desk)
    moved = desk.folder / "elsewhere"
    if is_moved:
        run.path.rename(moved)
    else:
        wait_for(lambda: shutil.rmtree(run.path, ignore_errors=True) or not run.path.exists())
    if is_replaced:  # a new run of the same name gets no file of the old run
        run.attempt(1).path.mkdir(parents=True)
    shown, words = process.communicate(timeout=120)
    wait_for(lambda: not is_running(supervisor))
    assert run.path.exists() == is_replaced
    if is_replaced:
        assert (list(run.attempt(1).path.iterdir()), run.events_file.exists()) == ([], False)
    if not is_moved:
        assert process.returncode == 1
        assert "small was deleted" in words
        return
    assert process.returncode == 0, words
    assert shown.splitlines()[2:] == ["attempt 1 rank 0", "asked by SIGTERM"]
    reason = f"saved after SIGTERM: the run folder was moved to {moved}"
    assert f"stopped: {reason}\n`trainkit resume {moved}` continues the run" in words
    assert read_json(moved / "attempts/001/end.json")["reason"] == reason
    said(RunDir(moved).attempt(1).supervisor_log.read_text())


@pytest.mark.slow(seconds=15)
def test_the_built_in_trainer_saves_where_its_folder_was_moved(desk):
    batch = "device_batch_size: 1, global_batch_size: 2"
    steps = f"train: {{steps: 100000, {batch}, eval_every: null, log_every: 1}}"
    nano = "model: {preset: nano}\ndata: {seq_len: 64}"
    desk.config.write_text(f"name: small\ndevice: cpu\n{nano}\n{steps}\n")
    argv = [sys.executable, "-m", "trainkit", "run", str(desk.config)]
    with subprocess.Popen(
        argv, cwd=desk.folder, env=desk.environ, stderr=subprocess.PIPE, text=True
    ) as process:
        run, moved = RunDir(desk.folder / "runs/small"), RunDir(desk.folder / "runs/other")
        wait_for(lambda: run.metrics_file.exists() and run.metrics_file.read_text().count("\n") > 1)
        run.path.rename(moved.path)
        words = process.communicate(timeout=120)[1]
    assert f"was moved to {moved.path}" in words
    assert not run.path.exists()
    newest = published(moved.checkpoints_dir)[-1]
    assert newest.step == read_json(moved.attempt(1).end_file)["step"]
    assert find_damage(newest) == ""


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_the_ranks_of_another_launcher_are_refused(desk, name):
    desk.environ |= {name: "4", "RANK": "1"}
    done = desk.typed("run", str(desk.config), code=2)
    assert f"({name}=4)" in done.stderr
    assert not (desk.folder / "runs").exists()


def make_venv(folder):
    """Create a virtual environment without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)


def test_an_environment_without_torch_is_refused_with_its_line(desk):
    make_venv(desk.folder / "own")
    desk.config.write_text(desk.config.read_text() + "launch:\n  venv: own\n")
    for options in ((), ("--set", "launch.venv=gone")):
        done = desk.typed("run", str(desk.config), *options, code=2)
        said(done.stderr)
    assert not (desk.folder / "runs").exists()


def test_run_uses_the_environment_of_the_config(desk):
    make_venv(desk.folder / "own")
    [packages] = (desk.folder / "own/lib").glob("python*/site-packages")
    (packages / "here.pth").write_text("\n".join(path for path in sys.path if "packages" in path))
    desk.works("import shutil; print(shutil.which('python'), os.environ['VIRTUAL_ENV'])")
    done = desk.trainkit("run", str(desk.config), "--set", "launch.venv=own", code=0)
    own = desk.folder / "own"
    assert done.stdout.splitlines()[-1] == f"{own}/bin/python {own}"
    plan = read_json(desk.folder / "runs/small/plan.json")
    assert (plan["venv"], plan["python"][0]) == (str(own), f"{own}/bin/python")


def test_what_only_batch_jobs_use_is_named(desk):
    desk.works("")
    done = desk.trainkit("run", str(desk.config), "--set", "launch.setup=[ulimit -c 0]", code=0)
    assert "warning: launch.setup: " in done.stderr


PRINTS = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:])
for step in range(1, 21):
    print(f"step {step}/20 | loss {2 / step:.3f} | lr 1e-3")
    time.sleep(0.02)
"""


def test_a_script_in_the_foreground_has_its_name_and_a_curve(desk):
    (desk.folder / "small_train.py").write_text(PRINTS)
    done = desk.types("run", "--nproc", "2", "--", sys.executable, "small_train.py", "--lr", "1", code=0)
    assert done.stdout.splitlines()[2:4] == ["rank 0 of 2 --lr 1", "step 1/20 | loss 2.000 | lr 1e-3"]
    assert "config:" not in done.stderr
    assert ": step, loss, lr; " in done.stderr
    run = RunDir(desk.folder / "runs/small_train")
    assert (done.stderr.splitlines()[0].split(":")[0], run.exists()) == ("small_train", True)
    status = json.loads(desk.typed("status", "small_train", "--json").stdout)
    expected = {"name": "small_train", "state": "finished", "step": 20, "total_steps": 20, "loss": 0.1}
    assert status.items() >= expected.items()


def test_a_script_keeps_the_name_that_a_config_or_flag_gives(desk):
    (desk.folder / "train.py").write_text("")
    (desk.folder / "config.yaml").write_text("device: cpu\n")
    command = ("--dry-run", "--backend", "local", "--", sys.executable, "train.py")
    for options, name in (((), "train"), (("--name", "mine"), "mine"), (("--set", "name=other"), "other")):
        done = desk.typed("submit", *options, *command)
        assert done.stderr.startswith("config: config.yaml "), done.stderr
        assert f"{name}: 1 node x 1 worker" in done.stdout + done.stderr


@pytest.mark.slow(seconds=25)
@pytest.mark.parametrize(
    "options", [(), ("--gpus-per-node", "2", "--debug", "1")], ids=["one process", "rank 1 of 2"]
)
def test_a_breakpoint_of_a_task_is_in_the_terminal(desk, options):
    assert desk.types("init", "--task", "mine").returncode == 0
    task = desk.folder / "mine.py"
    at = "        logits = model(x)\n"
    task.write_text(task.read_text().replace(at, f"        breakpoint()\n{at}", 1))
    settings = ("train.steps=2", "train.epochs=null", "train.eval_every=null", "data.num_workers=0")
    argv = [sys.executable, "-m", "trainkit", "run", "mine.yaml"]
    terminal, own = pty.openpty()
    process = subprocess.Popen(
        [*argv, *options, *(word for item in settings for word in ("--set", item))],
        **{"cwd": desk.folder, "env": {**desk.environ, "TERM": "dumb"}},
        **{"stdin": own, "stdout": own, "stderr": own},
    )
    os.close(own)
    shown = ""
    try:
        for said, typed in (
            ("(Pdb) ", "p 6 * 7\n"),
            ("\n42\r\n(Pdb) ", "import sys; sys.breakpointhook = int\n"),
            ("(Pdb) ", "c\n"),
        ):
            shown = ""
            while said not in shown:
                shown += os.read(terminal, 4096).decode()
            os.write(terminal, typed.encode())
        with contextlib.suppress(OSError):  # the read fails after the last process has closed the terminal
            while True:
                shown += os.read(terminal, 4096).decode()
    finally:
        process.kill()
        os.close(terminal)
    assert "finished: " in shown
