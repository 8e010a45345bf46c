"""Tests how often commands query Slurm about jobs if the site sets a minimum interval."""

import contextlib
import os
import pty
import stat
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.backends import jobs
from trainkit.backends.slurm import shared_answers
from trainkit.backends.slurm.backend import SbatchBackend
from trainkit.backends.slurm.shared_answers import answers_file, query_shared
from trainkit.cli.main import main
from trainkit.cluster.min_poll import min_poll_s
from trainkit.config import load_config
from trainkit.errors import ConfigError
from trainkit.run.record import AttemptRecord, add_slurm_attempt
from trainkit.scheduler import JobState
from trainkit.slurm.client import FIELD, RECORD
from trainkit.slurm.jobs import query_clusters

NOON = 1_700_000_000
VARIABLE = "TRAINKIT_MIN_POLL_S"


def line(job_id: str, state: str = "PENDING") -> str:
    array, _, task = job_id.partition("_")
    times = (str(NOON), str(NOON + 60))
    fields = [array, array, task or "N/A", state, "Priority", "n1", "1", *times, "0", "0", f"name{FIELD}\n"]
    return FIELD.join(fields) + f"{RECORD}\n"


@pytest.fixture
def slurm(fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Return a Slurm whose squeue lists the file `queue`; the cluster is east, and the interval is 100 s."""
    (tmp_path / "slurm.conf").write_text("ClusterName=East\n")
    fake.add(
        "squeue",
        '[ ! -e "$here/refuses" ] || { echo "Connection refused" >&2; exit 1; }\n/bin/cat "$here/queue"',
    )
    fake.add("sacct")
    (fake.folder / "queue").write_text(line("7") + line("8"))
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "100")
    monkeypatch.chdir(tmp_path)
    return fake


def num_queries(slurm: FakeSlurm) -> int:
    return slurm.programs.count("squeue")


def states(*ids: str) -> dict[str, str]:
    known, problems = query_shared(ids)
    assert not problems
    return {job_id: job.state.value for job_id, job in known.items()}


def test_all_commands_of_an_interval_share_one_answer(slurm, monkeypatch):
    direct = query_clusters(["7", "8"])
    assert query_shared(["7", "8"]) == direct == query_shared(["7", "8"])
    assert direct[0]["7"].start_time == datetime.fromtimestamp(NOON, timezone.utc)
    assert num_queries(slurm) == 2
    (slurm.folder / "queue").write_text(line("7", "RUNNING"))
    assert states("8", "7") == {"8": "pending", "7": "pending"}
    now = time.time()
    for later_s, found in ((99.0, "pending"), (101.0, "running")):
        monkeypatch.setattr(shared_answers.time, "time", lambda at=now + later_s: at)
        assert states("7") == {"7": found}
    assert num_queries(slurm) == 3


def test_a_job_is_asked_about_at_once_and_then_with_the_others(slurm, monkeypatch):
    assert states("7") == {"7": "pending"}
    assert states("8") == {"8": "pending"}
    assert (states("7"), num_queries(slurm)) == ({"7": "pending"}, 2)
    now = time.time()
    monkeypatch.setattr(shared_answers.time, "time", lambda: now + 101)
    assert states("7") == {"7": "pending"}
    assert (states("8"), num_queries(slurm)) == ({"8": "pending"}, 3)
    # Nobody has asked about job 8 for two intervals.
    for later_s in (180.0, 260.0, 340.0, 420.0):
        monkeypatch.setattr(shared_answers.time, "time", lambda at=now + later_s: at)
        states("7")
    assert slurm.calls[-1][-1] == "--jobs=7"


def test_the_id_of_an_array_selects_its_tasks(slurm):
    (slurm.folder / "queue").write_text(line("9_1", "RUNNING") + line("9_0") + line("7"))
    for _ in range(2):
        assert states("9") == {"9_0": "pending", "9_1": "running"}
        assert states("9_1", "7") == {"9_1": "running", "7": "pending"}
    assert num_queries(slurm) == 2
    # Tasks that share a record are found with the others.
    (slurm.folder / "queue").write_text(line("8_1", "RUNNING") + line("8"))
    assert states("8") == dict(sorted({**states("8_1"), "8": "pending"}.items()))


def test_clusters_that_share_a_home_do_not_mix_their_jobs(slurm, tmp_path, monkeypatch):
    """The file of east contains plain ids, also if a command on west wrote it."""
    assert states("7") == {"7": "pending"}
    (tmp_path / "slurm.conf").write_text("ClusterName=West\n")
    assert states("8;east") == {"8;east": "pending"}
    asked = [call for call in slurm.calls if call[0].endswith("squeue")][-1]
    assert "--clusters=east" in asked
    assert "--jobs=7,8" in asked


def test_commands_that_start_together_wait_for_one_query(slurm):
    slurm.add("squeue", '/bin/sleep 0.5; /bin/cat "$here/queue"')
    found: list[dict[str, str]] = []
    threads = [threading.Thread(target=lambda: found.append(states("7", "8"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"7": "pending", "8": "pending"}] * 8
    assert num_queries(slurm) == 1


def test_a_controller_that_is_down_is_asked_once_per_interval(slurm, monkeypatch):
    """The second query repeats the first failed query; a new job has to wait too."""
    (slurm.folder / "refuses").touch()
    for ids, count in ((["7"], 1), (["7"], 2), (["7"], 2), (["8"], 2)):
        known, problems = query_shared(ids)
        assert known == {}
        said(problems[""].message)
        assert num_queries(slurm) == count
    now = time.time()
    for later_s, count in ((99.0, 2), (101.0, 3), (102.0, 3)):
        monkeypatch.setattr(shared_answers.time, "time", lambda at=now + later_s: at)
        assert query_shared(["7", "8"])[1]
        assert num_queries(slurm) == count
    (slurm.folder / "refuses").unlink()
    monkeypatch.setattr(shared_answers.time, "time", lambda: now + 202)
    assert (states("7"), states("8"), num_queries(slurm)) == ({"7": "pending"}, {"8": "pending"}, 4)


def test_one_lost_answer_does_not_hide_the_jobs(slurm, monkeypatch):
    assert states("7") == {"7": "pending"}
    now = time.time()
    for later_s in (101.0, 202.0):
        monkeypatch.setattr(shared_answers.time, "time", lambda at=now + later_s: at)
        (slurm.folder / "refuses").touch()
        assert query_shared(["7"])[1]
        (slurm.folder / "refuses").unlink()
        assert (states("7"), states("7")) == ({"7": "pending"}, {"7": "pending"})
    assert num_queries(slurm) == 5


def test_a_screen_repeats_a_failed_query_within_the_interval(slurm, monkeypatch):
    monkeypatch.setattr(jobs, "QUERY_INTERVAL_S", 0.0)
    monkeypatch.setattr(jobs, "MIN_QUERY_INTERVAL_S", 0.0)
    (slurm.folder / "refuses").touch()
    poller = jobs.SlurmPoller()
    assert poller.jobs(["7"]) == {}
    assert poller.problem
    (slurm.folder / "refuses").unlink()
    deadline_s = time.monotonic() + 10
    while not poller.jobs(["7"]) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (poller.problem, num_queries(slurm)) == (None, 2)


def test_a_missing_squeue_concerns_only_this_process(slurm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        assert "not on PATH" in query_shared(["7"])[1][""].message
    assert states("7") == {"7": "pending"}


def test_a_command_that_holds_the_lock_for_long(slurm, monkeypatch):
    monkeypatch.setattr(shared_answers, "LOCK_TIMEOUT_S", 0.1)
    file = answers_file("east")
    file.parent.mkdir(parents=True)
    with shared_answers.file_lock(file.with_suffix(".lock")):
        [error] = query_shared(["7"])[1].values()
    said(error.message)
    assert num_queries(slurm) == 0
    states("7")
    with shared_answers.file_lock(file.with_suffix(".lock")):
        assert states("7") == {"7": "pending"}


def test_only_the_user_can_read_the_file(slurm):
    states("7")
    file = answers_file("east")
    assert file.name == "east.json"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.with_suffix(".lock"))] == [0o600] * 2
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "text", ["", "{}", "[", '{"jobs": {"7": {}}}', '{"jobs": {"7": 1}}', '{"asked_at": "x"}']
)
def test_a_damaged_file_is_replaced(slurm, text):
    states("7")
    answers_file("east").write_text(text)
    assert (states("7"), states("7"), num_queries(slurm)) == ({"7": "pending"}, {"7": "pending"}, 2)


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", VARIABLE])
def test_without_a_cache_or_an_interval_slurm_is_asked_each_time(slurm, monkeypatch, name):
    monkeypatch.setenv(name, "/dev/null/cache") if name != VARIABLE else monkeypatch.delenv(name)
    assert (states("7"), states("7"), num_queries(slurm)) == ({"7": "pending"}, {"7": "pending"}, 2)
    assert not answers_file("east").exists()


def test_decisions_use_a_new_answer(slurm):
    states("7")
    (slurm.folder / "queue").write_text(line("7", "RUNNING"))
    job = SbatchBackend().job(AttemptRecord(attempt=1, job_id="7", backend="sbatch"))
    assert job is not None
    assert job.state is JobState.RUNNING
    assert states("7") == {"7": "pending"}


def profile(folder: Path, name: str, text: str) -> None:
    path = folder / "clusters" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_profile_sets_the_minimum(slurm, tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    profile(tmp_path, "a", "name: East\nmin_poll_s: 60\n")
    profile(Path(os.environ["XDG_CONFIG_HOME"]) / "trainkit", "west", "min_poll_s: 90.5")
    profile(tmp_path, "broken", "min_poll_s: [")
    profile(tmp_path, "none", "name: none\nmin_poll_s: null")
    assert [min_poll_s(name) for name in ("east", "west", "none", "north", None)] == [60, 90.5, 0, 0, 90.5]
    monkeypatch.setenv(VARIABLE, "70")
    assert [min_poll_s(name) for name in ("east", "west", "none")] == [70, 90.5, 70]
    assert (states("7"), states("7"), num_queries(slurm)) == ({"7": "pending"}, {"7": "pending"}, 1)
    load_config(None)  # the variable is not a config key


@pytest.mark.parametrize("value", ["soon", "-1", "true", "[120]"])
def test_a_minimum_that_is_no_number(slurm, tmp_path, value):
    profile(tmp_path, "east", f"name: east\nmin_poll_s: {value}\n")
    with pytest.raises(ConfigError) as caught:
        min_poll_s("east")
    said(caught.value.render())


def test_a_variable_that_is_no_number(slurm, monkeypatch, tmp_path, capsys):
    run = make_attempt(tmp_path / "run").run
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    monkeypatch.setenv(VARIABLE, "2 min")
    assert main(["status", "run"]) == 2
    said(capsys.readouterr().err)


def test_cancel_reports_a_wrong_minimum_before_it_signals(slurm, monkeypatch, tmp_path, capsys):
    run = make_attempt(tmp_path / "run").run
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    slurm.add("scancel")
    before = run.job_file.read_text()
    monkeypatch.setenv(VARIABLE, "2 min")
    assert main(["cancel", "run", "--wait"]) == 2
    said(capsys.readouterr().err)
    assert run.job_file.read_text() == before
    assert "scancel" not in slurm.programs
    assert main(["cancel", "run"]) == 0  # only waiting needs the interval
    assert "scancel" in slurm.programs


FAST = """
import sys
from pathlib import Path
import trainkit
from trainkit.backends import jobs
from trainkit.cli.logs import follow_detachable
from trainkit.cli.main import main
from trainkit.run.rundir import RunDir
jobs.QUERY_INTERVAL_S, jobs.MIN_QUERY_INTERVAL_S = 0.3, 0.0
"""
WAITING = {
    "watch": "main(['watch', 'run'])",
    "logs": "main(['logs', 'run', '-f'])",
    "--follow": "follow_detachable(RunDir(Path('run')), 1, to_stderr=False)",
    "Python": "trainkit.Run('run').wait()",
}


@pytest.mark.slow(seconds=14)
def test_commands_side_by_side(slurm, tmp_path, monkeypatch):
    """Watch, --follow, `logs -f` and the Python API together ask as often as one of them."""
    monkeypatch.setenv(VARIABLE, "3")
    add_slurm_attempt(make_attempt(tmp_path / "run").run, 1, "7", "submit", "sbatch")
    main_end, terminal = pty.openpty()
    threading.Thread(target=drain, args=(main_end,), daemon=True).start()
    with (tmp_path / "log").open("w") as log:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", FAST + code],
                env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)},
                cwd=tmp_path,
                **dict.fromkeys(("stdin", "stdout", "stderr"), terminal if name == "watch" else log),
            )
            for name, code in WAITING.items()
        ]
    try:
        time.sleep(6.0)  # until all have started
        before = num_queries(slurm)
        time.sleep(6.0)
        assert before <= 3
        assert num_queries(slurm) - before in (1, 2, 3)
        assert [process.poll() for process in started] == [None] * 4, (tmp_path / "log").read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()
        os.close(terminal)


def drain(descriptor: int) -> None:
    """Read what a program writes to its terminal, so that the program does not block."""
    with contextlib.suppress(OSError):  # the terminal was closed
        while os.read(descriptor, 65536):
            pass
