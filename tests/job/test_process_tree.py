"""Tests the supervisor, agents and workers as real processes."""

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
from job_tree import wait_for

from tests.support.programs import is_running, run_program
from tests.support.runs import start_local
from tests.support.said import said
from trainkit.backends.local import backend as local
from trainkit.job.processes import descendants, exit_code_of_zombie, link_of
from trainkit.run.files import read_json
from trainkit.run.rundir import run_lock

WAITS_TO_END = """
listen(); ready()
while not os.path.exists(f"{RUN_DIR}/end"):
    time.sleep(0.02)
"""


def test_all_finish(start_job):
    job = start_job("print(RANK, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])", nodes=2, workers=2)
    end = job.end()
    assert (end["state"], end["exit_code"], end["verdict"]) == ("finished", 0, None)
    assert [job.log(rank) for rank in range(4)] == ["0 4 0\n", "1 4 1\n", "2 4 0\n", "3 4 1\n"]
    assert job.events() == ["submitted", "started", "finished"]


def test_an_exception_at_once_is_not_tried_again_for_nothing(start_job):
    job = start_job("{}['lr']", requeue={"on": ("crash",)})
    end = job.end()
    assert (job.run.attempt_numbers(), end["state"], end["exit_code"]) == ([1], "failed", 1)
    said(end["reason"])
    said(end["verdict"]["hint"])


def test_stop_reaches_every_worker(start_job):
    job = start_job("save_when_asked()", nodes=2, workers=2)
    end = job.stop("SIGINT")
    assert (end["state"], end["reason"]) == ("stopped", "saved after SIGINT")
    assert [job.log(rank) for rank in range(4)] == ["asked by SIGINT\n"] * 4


def test_a_request_to_end_beats_a_request_to_restart(start_job):
    job = start_job(WAITS_TO_END + "sys.exit(75)")
    job.worker_pids()
    job.signal("SIGUSR2")
    wait_for(lambda: "signal" in job.events())
    job.signal()
    wait_for(lambda: job.events().count("signal") == 2)
    (job.run.path / "end").touch()
    assert job.end()["action"] == "stopped"
    assert job.run.attempt_numbers() == [1]


@pytest.mark.parametrize(("configured", "handled"), [("USR2", ["SIGTERM", "SIGUSR2"]), ("auto", ["SIGUSR2"])])
def test_a_command_gets_its_signal_once(start_job, configured, handled):
    listens = f"""
for name in {handled}:
    signal.signal(getattr(signal, name), lambda n, f: print("asked by", signal.Signals(n).name, flush=True))
ready()
while not os.path.exists(f"{{RUN_DIR}}/end"):
    time.sleep(0.02)
"""
    job = start_job(listens, command_signal=configured)
    job.worker_pids()
    job.signal("SIGUSR2")
    wait_for(lambda: job.log().strip())
    job.signal()
    wait_for(lambda: job.events().count("signal") == 2)
    (job.run.path / "end").touch()
    assert job.end()["state"] == "stopped"
    assert job.log() == "asked by SIGUSR2\n"


def test_a_command_that_exits_with_0_after_a_notice_has_finished_if_it_says_so(start_job):
    says = "open(os.environ['TRAINKIT_JOB_DONE_FILE'], 'w').close()\n"
    # A signal that arrives while Python exits would kill it.
    hears = "while not asked:\n    time.sleep(0.02)\n"
    job = start_job(WAITS_TO_END + hears + says, requeue={"max": 1})
    job.worker_pids()
    job.signal("SIGUSR2")
    wait_for(lambda: "signal" in job.events())
    (job.run.path / "end").touch()
    end = job.end()
    assert (job.run.attempt_numbers(), end["state"], end["action"]) == ([1], "finished", "finished")


def test_signal_right_after_the_start_is_not_lost(start_job):
    waits = "listen()\nwhile not asked:\n    time.sleep(0.02)\nsys.exit(75)"
    job = start_job(waits, requeue={"max": 0})
    job.signal("SIGUSR2")
    end = job.end()
    assert end["state"] == "stopped"
    assert "SIGUSR2" in end["reason"]


@pytest.mark.slow
def test_what_does_not_end_in_time_is_killed(start_job):
    job = start_job("signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(600)", grace_s=0.5)
    pids = job.worker_pids()
    end = job.stop()
    assert end["state"] == "stopped"
    assert "killed" in end["reason"]
    assert not any(map(is_running, pids))


@pytest.mark.slow
def test_killed_worker_takes_the_others_with_it(start_job):
    job = start_job("print('last words'); ready(); time.sleep(600)", nodes=2)
    pids = job.worker_pids()
    os.kill(pids[1], signal.SIGKILL)
    end = job.end()
    assert (end["state"], end["exit_code"]) == ("failed", 137)
    assert (end["verdict"]["rank"], end["verdict"]["message"]) == (1, "killed by SIGKILL")
    assert "rank_failed" in job.events()
    assert read_json(job.run.attempt(1).rank_error(1))["log_tail"] == ["last words"]
    assert not any(map(is_running, pids))
    assert [path.name for path in job.run.attempt(1).errors_dir.iterdir()] == ["rank-0001.json"]


@pytest.mark.slow
def test_killed_agent_takes_its_node_and_the_job_with_it(start_job):
    job = start_job("ready(); time.sleep(600)", nodes=2, workers=2)
    pids = job.worker_pids()
    agent = next(pid for pid in descendants(job.entry.pid) if pids[2] in descendants(pid))
    os.kill(job.entry.pid, signal.SIGSTOP)  # only the kernel can still end them
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: not is_running(pids[2]) and not is_running(pids[3]))
    os.kill(job.entry.pid, signal.SIGCONT)
    end = job.end()
    assert (end["state"], end["exit_code"], end["verdict"]["node_rank"]) == ("failed", 137, 1)
    assert not any(map(is_running, pids))


def test_killed_supervisor_leaves_nothing_behind(start_job):
    job = start_job("ready(); time.sleep(600)", nodes=2)
    everything = [*job.worker_pids(), *descendants(job.entry.pid)]
    os.kill(job.entry.pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, everything)), 5)
    assert not job.run.attempt(1).end_file.exists()


def test_children_of_workers_end_with_them(start_job):
    job = start_job(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        with open(f"{RUN_DIR}/child", "w") as f:
            f.write(str(child.pid))
        ready()
        time.sleep(600) if RANK else sys.exit(0)
        """
    )
    job.wait()
    assert not is_running(int((job.run.path / "child").read_text()))


@pytest.mark.slow
def test_a_stop_after_the_run_folder_has_vanished_ends_everything(start_job):
    job = start_job("listen(); ready(); time.sleep(600)\n", grace_s=0.5)
    everything = [*job.worker_pids(), *descendants(job.entry.pid)]
    shutil.rmtree(job.run.path)
    os.kill(job.entry.pid, signal.SIGTERM)
    wait_for(lambda: not any(map(is_running, [job.entry.pid, *everything])))


@pytest.mark.slow
def test_second_ctrl_c_ends_what_does_not_listen(start_job):
    script = "signal.signal(signal.SIGINT, signal.SIG_IGN); ready(); time.sleep(600)"
    job = start_job(script, nodes=2, grace_s=600.0)
    pids = job.worker_pids()
    os.kill(job.entry.pid, signal.SIGINT)
    wait_for(lambda: "signal" in job.events())
    os.kill(job.entry.pid, signal.SIGINT)
    job.wait(timeout_s=10)
    assert not any(map(is_running, pids))


@pytest.mark.slow
def test_lost_job_file_does_not_let_a_second_supervisor_in(start_job):
    job = start_job("save_when_asked()")
    pids = job.worker_pids()
    job.run.job_file.write_text("")
    with run_lock(job.run):
        entry = start_local(job.run, job.run.config_file.read_text(), job.run.plan_file.read_text(), "resume")
    wait_for(lambda: entry.alive() is False)
    end = read_json(job.run.attempt(2).end_file)
    lock = job.run.supervisor_lock_file
    assert end["reason"].startswith(str(lock))
    assert f"process {job.entry.pid} on " in end["reason"]
    assert all(map(is_running, pids))
    os.kill(job.entry.pid, signal.SIGTERM)
    wait_for(lambda: not any(map(is_running, [job.entry.pid, *pids])))


def test_supervisor_that_nobody_registered_starts_nothing(start_job):
    job = start_job("sys.exit(0)")
    job.wait()
    done = run_program(sys.executable, "-m", "trainkit.job.supervisor", job.run.path, "--attempt", "1")
    assert done.returncode == 1
    assert "was interrupted" in done.stdout
    assert job.events().count("started") == 1


def test_full_disk_still_ends_everything(start_job):
    job = start_job("listen(); ready()\nwhile not asked: time.sleep(0.02)\nsys.exit(75)", nodes=2)
    everything = [*job.worker_pids(), *descendants(job.entry.pid)]
    job.run.events_file.unlink()
    job.run.events_file.symlink_to("/dev/full")
    os.kill(job.entry.pid, signal.SIGTERM)
    wait_for(lambda: not any(map(is_running, [job.entry.pid, *everything])))
    said(job.run.attempt(1).supervisor_log.read_text())
    assert read_json(job.run.attempt(1).end_file)["state"] == "stopped"


def test_plan_that_cannot_be_read_is_a_failure_with_its_reason(start_job, monkeypatch):
    job = start_job("sys.exit(75)", requeue={"max": 5})
    job.wait()
    second = job.run.attempt(2)
    start = local._start_process

    def damage_and_start(*args, **options):
        second.plan_file.write_text("{")
        return start(*args, **options)

    monkeypatch.setattr(local, "_start_process", damage_and_start)
    with run_lock(job.run):
        texts = (file.read_text() for file in (job.run.config_file, job.run.plan_file))
        entry = start_local(job.run, *texts, "requeue")
    wait_for(second.end_file.exists)
    end = read_json(second.end_file)
    assert (end["state"], end["exit_code"], end["verdict"]["rank"]) == ("failed", 1, None)
    said(end["reason"])
    wait_for(lambda: entry.alive() is False)


@pytest.mark.slow
def test_a_worker_that_only_dies_of_the_notice_leaves_the_others_their_time(start_job):
    """A script may listen on rank 0 only, and saving may take longer than a peer of a crash may run."""
    saves = """
        if RANK == 0:
            listen(); ready()
            while not asked:
                time.sleep(0.02)
            time.sleep(6.5)
            print("asked by", asked[0])
            sys.exit(75)
        ready(); time.sleep(60)
    """
    job = start_job(saves, nodes=2)
    end = job.stop()
    assert (end["state"], end["exit_code"], end["verdict"]) == ("stopped", 75, None)
    assert "asked by SIGTERM" in job.log(0)
    assert not list(job.run.attempt(1).errors_dir.iterdir())


SAVES_LONG = """
listen(); ready()
while not asked:
    time.sleep(0.02)
for _ in range(5):
    print("saving", flush=True)
    time.sleep(0.1)
print("saved after", asked, flush=True)
sys.exit(75)
"""
CHECKS = "import shlex, subprocess, sys; subprocess.check_call(shlex.split(sys.argv[1]))"
ENDS_AT_ONCE = "trap 'kill -TERM $pid; exit 75' TERM"
TYPED = {
    "a pipe": lambda line: ["bash", "-c", f"{line} | tee log"],
    "nested shells": lambda line: ["sh", "-c", f"sh -c {shlex.quote(f'{line}; exit $?')}; exit $?"],
    "a Python that raises": lambda line: [sys.executable, "-c", CHECKS, line],
    "a trap that ends at once": lambda line: ["bash", "-c", f"{ENDS_AT_ONCE}; {line} & pid=$!; wait $pid"],
}
"""Lines around a training run. Every wrapper is in node/test_notice.py."""


@pytest.mark.parametrize("name", ["a pipe", "a Python that raises", "a trap that ends at once"])
def test_what_saves_below_a_wrapper_is_asked_once_and_kept(start_job, name):
    # Python runs in isolated mode. Otherwise a handler is called once for two signals.
    job = start_job(SAVES_LONG, typed=lambda line: TYPED[name](line.replace(" -u ", " -I ")), grace_s=6.0)
    end = job.stop()
    log = (job.run.path.parent / "log") if name == "a pipe" else job.run.attempt(1).rank_log(0)
    assert "saved after ['SIGTERM']" in log.read_text() + job.log()
    assert (end["state"], end["reason"], end["verdict"]) == ("stopped", "saved after SIGTERM", None)


def test_what_a_shell_starts_again_after_the_notice_is_asked_too(start_job):
    counts = SAVES_LONG.replace("sys.exit(75)", "open(f'{RUN_DIR}/saves', 'a').write('.'); sys.exit(75)")
    job = start_job(counts, typed=lambda line: ["bash", "-c", f"until {line}; do true; done"], grace_s=5.0)
    job.stop()
    assert len((job.run.path / "saves").read_text()) > 1


def agent_with_the_pipe_of(job):
    """Return the agent of a worker in a pipe, once the agent has opened the pipe too."""
    (worker,) = job.worker_pids()
    agent = next(pid for pid in descendants(job.entry.pid) if worker in descendants(pid))
    files, output = Path(f"/proc/{agent}/fd"), link_of(worker, "fd/1")
    wait_for(lambda: output in [link_of(agent, f"fd/{file.name}") for file in files.iterdir()])
    return agent, worker


def end_by_sigterm(pids):
    """Send SIGTERM to processes one by one, as slurmstepd may before it signals the agent."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda pid=pid: exit_code_of_zombie(pid) is not None or not is_running(pid))


def test_what_saves_outlives_the_shell_and_the_reader_that_slurm_has_ended(start_job):
    job = start_job(SAVES_LONG, typed=TYPED["a pipe"])
    agent, worker = agent_with_the_pipe_of(job)
    end_by_sigterm(pid for pid in descendants(agent) if pid != worker)
    os.kill(worker, signal.SIGTERM)
    os.kill(job.entry.pid, signal.SIGTERM)
    end = job.end()
    assert (end["state"], end["reason"], end["verdict"]) == ("stopped", "saved after SIGTERM", None)
    assert "saved after" in job.log()


def test_the_death_of_a_rank_just_before_the_notice_is_no_failure(start_job):
    job = start_job("ready(); time.sleep(600)")
    end_by_sigterm(job.worker_pids())
    os.kill(job.entry.pid, signal.SIGTERM)
    end = job.end()
    assert end["state"] == "stopped"
    said(end["reason"])
    assert not list(job.run.attempt(1).errors_dir.iterdir())


@pytest.mark.slow
def test_a_writer_dies_of_the_end_of_its_reader_without_a_notice(start_job):
    """The agent closes its end of the pipe."""
    prints = "listen(); ready()\nwhile True:\n    print(0, flush=True)\n    time.sleep(0.01)"
    reads = "(while ! test -e end; do sleep 0.1; done)"
    job = start_job(prints, typed=lambda line: ["bash", "-c", f"{line} | {reads}"])
    agent_with_the_pipe_of(job)
    (job.run.path.parent / "end").touch()
    assert job.end()["state"] == "finished"
    assert "BrokenPipeError" in job.log()


def test_what_saves_outlives_a_shell_that_returns_the_end_of_the_shell_below(start_job):
    """Slurm may signal the inner shell first. The outer one then exits by itself before the stop signal."""
    job = start_job(SAVES_LONG, typed=TYPED["nested shells"])
    (worker,) = job.worker_pids()
    agent = next(pid for pid in descendants(job.entry.pid) if worker in descendants(pid))
    outer, inner = descendants(agent)[:2]
    os.kill(inner, signal.SIGTERM)
    wait_for(lambda: exit_code_of_zombie(outer) == 128 + signal.SIGTERM)
    os.kill(job.entry.pid, signal.SIGTERM)
    end = job.end()
    assert (end["state"], end["reason"], end["verdict"]) == ("stopped", "saved after SIGTERM", None)
