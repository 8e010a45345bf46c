"""Tests `diagnose` on broken runs: recorded runs, runs that are built again, and misleading files."""

import json
import random
import signal
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden.__main__ import unpack as unpack_golden
from tests.job.failure.test_launcher_report import OUTPUT
from tests.on_slurm import broken_runs as on_slurm
from tests.support.broken_runs import BROKEN, FOLDER, HOST, is_real, make, unpack
from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.capabilities.diagnose.command import diagnosis_lines
from trainkit.capabilities.diagnose.diagnose import Diagnosis, diagnose
from trainkit.capabilities.diagnose.texts import read_log
from trainkit.capabilities.health.samples import health_file
from trainkit.observe import logs
from trainkit.observe.logs import log_of
from trainkit.observe.status import read_status
from trainkit.run.files import append_jsonl, write_json
from trainkit.run.history import RunHistory, read_plan
from trainkit.run.record import add_attempt, add_slurm_attempt, create_job, read_job
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob

RECORDED = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def diagnosis_of(name: str, folder: Path) -> tuple[dict[str, object], Diagnosis]:
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    unpack(content, folder)
    return content["expect"], newest(RunDir(folder), job=recorded_job(content))


def newest(run: RunDir, job: SlurmJob | None = None) -> Diagnosis:
    return diagnose(run.attempt(run.attempt_numbers()[-1]), read_job(run), slurm_job=job)


def recorded_job(content: dict[str, Any]) -> SlurmJob | None:
    """Return Slurm's view of the job if it was recorded."""
    fields = content.get("slurm")
    return None if fields is None else SlurmJob(**{**fields, "state": JobState(fields["state"])})


def shown(found: Diagnosis, expected: dict[str, object]) -> dict[str, object]:
    """Return the expected fields of a diagnosis. If no rank is expected, all ranks fail in the same way."""
    fields = {key: getattr(found, key) for key in expected}
    return fields | {"rank": None} if expected.get("rank", 0) is None else fields


@pytest.mark.parametrize("name", RECORDED)
def test_names_the_first_rank_and_the_cause(name, tmp_path):
    expected, found = diagnosis_of(name, tmp_path)
    assert shown(found, expected) == expected, found


def test_the_set_covers_the_causes():
    contents = [yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in RECORDED]
    assert len({content["expect"].get("name") for content in contents if is_real(content)}) >= 24


def test_what_can_be_broken_again_is_recorded():
    assert not BROKEN.keys() & on_slurm.BROKEN.keys()
    assert BROKEN.keys() | on_slurm.BROKEN.keys() <= set(RECORDED)


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("name", ["fails-when-stopped", "torchrun-killed", "port-in-use"])
def test_runs_that_are_broken_again(name, tmp_path):
    found = newest(RunDir(make(name, tmp_path)))
    expected = {key: value for key, value in BROKEN[name].expect.items() if key != "host"}
    assert shown(found, expected) == expected, found


def test_cause_and_advice_have_the_values_of_the_run(tmp_path):
    _, found = diagnosis_of("cuda-oom", tmp_path)
    change = "train.device_batch_size 16 -> 8 keeps the global batch of 256 with accumulation 4"
    resume = f"`trainkit resume {tmp_path} --set train.device_batch_size=8`"
    assert found.advice[0] == f"{change}: {resume}"
    for name in ("nccl-timeout", "rank-late", "hang"):
        _, found = diagnosis_of(name, tmp_path / name)
        said("\n".join([found.cause, *found.advice]))
    assert any(item.file.startswith("attempts/001/hangs/") for item in found.evidence)


def test_evidence_is_the_line_of_the_file(tmp_path):
    _, found = diagnosis_of("shape-mismatch", tmp_path)
    first = found.evidence[0]
    line = (tmp_path / first.file).read_text().splitlines()[first.line - 1]
    assert first.text.partition(": ")[2] in line
    assert f"  {first.file}:{first.line}\n    {first.text}" in "\n".join(diagnosis_lines(found))


def failed(folder: Path, log: bytes, message: str = "ended with exit code 1", kind: str = "exit") -> RunDir:
    """Create a run whose rank 0 failed with this output."""
    folder.mkdir(exist_ok=True)
    run = RunDir(folder)
    attempt = run.attempt(1)
    attempt.create()
    record = {"rank": 0, "host": HOST, "time": "2026-01-01T00:00:00Z", "type": kind, "message": message}
    verb, _, how = message.partition(" by ")
    record["exit_code"] = 128 + signal.Signals[how.partition(":")[0]] if verb == "killed" else 1
    write_json(attempt.rank_error(0), record)
    write_json(attempt.end_file, {"state": "failed", "cause": "crash", "verdict": record})
    attempt.rank_log(0).write_bytes(log)
    return run


@pytest.mark.parametrize(
    ("error", "name", "advice"),
    [
        ("CUDA error: device-side assert triggered", "device-assert", "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA error: an illegal memory access was encountered", "illegal-access", "compute-sanitizer"),
        ("CUDA error: no kernel image is available for execution on the device", "no-kernel-image", "cu126"),
        ("CUDA driver error: out of memory", "cuda-oom", "smaller"),
        ("CUDA error: uncorrectable ECC error encountered", "gpu-hardware", "resources.exclude"),
    ],
)
def test_errors_of_a_gpu_and_of_its_program(tmp_path, error, name, advice):
    message = f"{error}\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    # the error is raised in Python, or by NCCL's watchdog, which aborts the process
    for kind in ("AcceleratorError", "exit"):
        text = message if kind != "exit" else f"killed by SIGABRT: [Rank 0] Process group watchdog: {error}"
        found = newest(failed(tmp_path / kind, b"", text, kind))
        assert found.name == name
        assert name == "cuda-oom" or any(advice in item for item in found.advice)


def test_ranks_that_met_and_cannot_connect(tmp_path):
    message = "no progress for 241 s, in connect; no rank is behind the others"
    run = failed(tmp_path, b"", message, "Hang")
    write_json(run.attempt(1).rendezvous_file, {"hosts": ["n1", "n2"]})
    found = newest(run)
    assert (found.name, found.cause.partition(":")[2]) == ("connect", f" {message}")
    for expected in ("NCCL_DEBUG=INFO", "`trainkit doctor --nodes 2` measures the connections"):
        assert any(expected in item for item in found.advice)


def test_an_exception_of_the_user_comes_before_those_that_noticed_it(tmp_path):
    noticed = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:29400"
    run = failed(tmp_path, b"", noticed, "RuntimeError")
    create_job(run, backend="local", name="run", cwd="/home/me", code=None)
    trace = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in <module>\n    f(x)\n'
    record = {"rank": 1, "time": "2026-01-01T00:00:01Z", "type": "KeyError", "message": "'x'"}
    write_json(run.attempt(1).rank_error(1), {**record, "traceback": trace + "KeyError: 'x'\n"})
    found = newest(run)
    assert (found.name, found.rank) == ("exception", 1)
    said(found.cause)
    assert "code: train.py:3\n    f(x)\n" in "\n".join(diagnosis_lines(found))
    write_json(run.attempt(1).rank_error(1), {**record, "log_tail": [*trace.splitlines(), "KeyError: 'x'"]})
    assert newest(run).code == found.code


def test_an_exception_that_is_known_is_not_explained_by_other_lines(tmp_path):
    log = b"No space left on device, cleaning up\nTraceback (most recent call last):\nKeyError: 'x'\n"
    found = newest(failed(tmp_path, log, "'x'", "KeyError"))
    assert (found.name, found.confidence, found.title) == (None, "unknown", "unknown")
    assert found.tail[-1].text == "KeyError: 'x'"


@pytest.mark.parametrize("kind", ["exit", "KeyError"])
def test_a_loss_that_was_nan_is_named_where_nothing_else_explains_the_end(tmp_path, kind):
    message = "ended with exit code 1"
    run = failed(tmp_path, b"step 311 loss nan\n", message, kind)
    for step, loss in ((300, 2.5), (305, None), (306, 2.0), (310, None), (311, None)):
        append_jsonl(run.metrics_file, {"step": step, "attempt": 1, "loss": loss})
    found = newest(run)
    expected = f"diverged since step 310, before rank 0 on {HOST} failed: {message}"
    assert (found.name, found.cause, found.confidence) == ("loss-not-finite", expected, "likely")
    append_jsonl(run.metrics_file, {"step": 312, "attempt": 1, "loss": 1.5})
    assert newest(run).name != "loss-not-finite"


def test_an_exception_comes_before_a_loss_that_was_nan(tmp_path):
    run = failed(tmp_path, b"", "boom", "ValueError")
    write_json(run.attempt(1).plan_file, {"command": ["python", "train.py"]})
    append_jsonl(run.metrics_file, {"step": 310, "attempt": 1, "loss": None})
    found = newest(run)
    assert found.name == "exception"
    said(found.cause)
    said("\n".join(found.advice))
    assert found.evidence[-1].file == "metrics.jsonl"


def test_a_loop_by_hand_is_started_again_by_its_own_command(tmp_path):
    """All ranks were killed, and one of them recorded a lost connection before."""
    run = failed(tmp_path, b"", "Connection closed by peer", "RuntimeError")
    run.attempt(1).end_file.unlink()
    create_job(run, backend="local", name="run", cwd="/home/me", code=None)
    add_attempt(run, 1, 1, "by hand")
    write_json(run.attempt(1).plan_file, {"command": ["torchrun", "train.py"]})
    write_json(run.plan_file, {"command": ["torchrun", "train.py"]})
    status = read_status(RunHistory(run), read_job(run), False, datetime.now(timezone.utc))
    assert status.verdict.rank == 0
    [warning] = status.warnings
    said(warning)
    plan = {"command": ["torchrun", "train.py"], "num_nodes": 1, "workers_per_node": 2}
    write_json(run.attempt(1).plan_file, plan)
    found = newest(run)
    assert (found.name, found.rank) == ("network", 1)
    said(found.cause)
    said(found.advice[0])
    run.attempt(1).rank_error(0).unlink()
    found = newest(run)
    said(found.cause)
    said("\n".join(found.advice))


def test_an_error_long_before_the_end_was_handled(tmp_path):
    log = b"CUDA out of memory\n" + b"step 1 loss 2\n" * 21
    assert newest(failed(tmp_path / "handled", log)).name == "exit-code"
    found = newest(failed(tmp_path / "last", log + b"CUDA out of memory\n"))
    assert (found.name, found.confidence) == ("cuda-oom", "likely")


def test_a_huge_log_is_read_at_its_end(tmp_path, monkeypatch):
    path = tmp_path / "rank-0000.log"
    with path.open("wb") as stream:
        stream.seek(2**30)  # the file is sparse and takes no disk space
        stream.write(b"\nCUDA out of memory\n")
    text = read_log(path, tmp_path, "log")
    assert text.first_line is None
    said(text.lines[-1])
    path.write_bytes(b"step\n" * 100_000 + b"the end\n")
    text = read_log(path, tmp_path, "log")
    assert text.evidence(len(text.lines) - 1).line == 100_001
    assert len(text.lines) == logs.MAX_LAST_LINES


def test_an_earlier_attempt_does_not_explain_a_later_one(tmp_path):
    run = failed(tmp_path, b"", "CUDA out of memory", "OutOfMemoryError")
    second = run.attempt(2)
    second.create()
    record = {"rank": 0, "host": HOST, "time": "2026-01-02T00:00:00Z", "type": "KeyError", "message": "'x'"}
    ends = {"failed": record, "nothing failed": None}
    for state, verdict in ends.items():
        action = "finished" if verdict is None else "failed"
        write_json(second.end_file, {"state": action, "action": action, "verdict": verdict})
        found = newest(run)
        assert (found.attempt, found.state, found.name, len(found.earlier)) == (2, state, None, 1)
    assert diagnose(run.attempt(1), read_job(run)).name == "cuda-oom"


def test_a_killed_rank_comes_with_the_memory_of_its_host(tmp_path):
    run = failed(tmp_path, b"", "killed by SIGKILL")
    file = health_file(run, HOST)
    file.parent.mkdir()
    samples = ((1, 12.0), (1, 63.04), (2, 1.0))
    for attempt, used in samples:
        append_jsonl(file, {"attempt": attempt, "mem_used_gib": used, "mem_total_gib": 64})
    shown = "the last health sample of node01 shows 63.0 of 64.0 GiB of its memory in use"
    assert newest(run).advice[0] == shown
    file.write_text('{"attempt": 1, "mem_used_gib": null}\n{"attempt')
    assert "health" not in newest(run).advice[0]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run with an attempt that has written nothing."""
    RunDir(tmp_path).attempt(1).create()
    return RunDir(tmp_path)


def test_a_running_attempt_has_no_failure(run):
    assert diagnose(run.attempt(1), read_job(run), alive=True).state == "nothing failed"
    assert diagnose(run.attempt(1), read_job(run), alive=None).state == "unknown"
    assert diagnose(run.attempt(1), read_job(run), alive=False).name is None


def test_an_attempt_that_slurm_ended_without_a_record(run):
    job = SlurmJob("7", JobState.REQUEUED, slurm_state="PENDING", reason="BeginTime", restarts=1)
    found = diagnose(run.attempt(1), read_job(run), alive=True, slurm_job=job)
    assert (found.state, found.name, found.rank, found.host) == ("failed", "interrupted", None, None)
    assert "`sacct -j 7 --duplicates" in found.advice[0]


def test_an_attempt_that_never_started(run):
    create_job(run, backend="sbatch", name="x", cwd=str(run.path), code=None)
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    job = SlurmJob("7", JobState.FAILED, slurm_state="FAILED", reason="JobLaunchFailure", exit_code=0)
    found = newest(run, job=job)
    said(found.cause)
    job = replace(job, exit_signal=53)
    found, logs = newest(run, job=job), run.attempt(1).logs_dir
    cause = f"Slurm did not start the job: a node could not open the log in {logs}"
    assert (found.name, found.cause) == ("log-not-opened", cause)
    logs.rmdir()
    cause = f"Slurm did not start the job: it could not open the log, whose folder {logs} does not exist"
    assert newest(run, job=job).cause == cause


def test_a_start_that_failed(run):
    """Slurm names the node only if the batch script recorded none."""
    create_job(run, backend="sbatch", name="x", cwd=str(run.path), code=None)
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    run.attempt(1).supervisor_log.write_text("bash: /venv/bin/activate: No such file or directory\n")
    job = SlurmJob("7", JobState.FAILED, slurm_state="FAILED", nodes="n[2-3]", exit_signal=9)
    found = newest(run, job=job)
    assert (found.name, found.rank, found.host) == ("start-failed", None, "n2")
    said(found.evidence[0].file)
    (run.path / "starts").mkdir()
    write_json(run.path / "starts/7.0", {"host": "n4", "exit_code": 2})
    found = newest(run)
    assert (found.name, found.rank, found.host) == ("start-failed", None, "n4")
    assert found.evidence[0].place == "starts/7.0:1"
    assert [line.place for line in found.tail] == ["attempts/001/logs/supervisor.log:1"]
    assert "n4" in found.advice[1]
    for pinned, resume in (("n[5-6]", "` starts"), ("n[3-4]", " --set resources.extra.nodelist=null`")):
        run.config_file.write_text(f"resources: {{extra: {{nodelist: '{pinned}'}}}}")
        assert newest(run).advice[1].startswith(f"`trainkit resume {run.quoted}{resume}")
    for state, name in ((JobState.NODE_FAIL, "node-failure"), (JobState.CANCELLED, "cancelled")):
        assert newest(run, job=replace(job, state=state, slurm_state=state.name)).name == name


def add_events(run: RunDir, *events: tuple[str, str, dict[str, Any]]) -> None:
    """Add events to attempt 1, given as (second, name, values)."""
    with run.events_file.open("a") as stream:
        for second, name, values in events:
            record = {"time": f"2026-01-01T00:00:{second}.000Z", "attempt": 1, "event": name, **values}
            stream.write(json.dumps(record) + "\n")


@pytest.mark.parametrize(
    ("has_copy", "path"), [(True, "../data/x.txt"), (True, "nowhere.txt"), (False, "nowhere.txt")]
)
def test_a_command_that_finds_no_file_learns_where_it_runs(tmp_path, has_copy, path):
    message = f"[Errno 2] No such file or directory: '{path}'"
    run = failed(tmp_path / "run", b"", message, "FileNotFoundError")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x.txt").touch()
    source = str(tmp_path / "code")
    code = {"source": source, "code": str(run.code_dir), "subfolder": "sub"} if has_copy else None
    write_json(run.job_file, {"cwd": source, "code": code, "attempts": []})
    for file in (run.plan_file, run.attempt(1).plan_file):
        write_json(file, {"command": ["python", "t.py"]})
    write_json(run.config_file, {})
    found = diagnose(run.attempt(1), read_job(run))
    assert found.name == "missing-file"
    said("\n".join(found.advice))
    assert not any("run was submitted" in one for one in found.advice)


def test_a_signal_explains_only_what_follows_it(tmp_path):
    run = failed(tmp_path, b"")
    record = {"rank": 0, "host": HOST, "type": "exit", "message": "ended with exit code 1"}
    write_json(run.attempt(1).end_file, {"state": "failed", "verdict": {**record, "time": TEN}})
    write_json(run.attempt(1).rank_error(0), {**record, "time": TEN})
    add_events(run, ("20", "signal", {"signal": "SIGTERM"}))
    assert newest(run).name == "exit-code"
    with run.events_file.open("ab") as stream:
        stream.write(b'{"time": "2026-01-01T00:00:09.000Z", "attempt": 1, "ev\n[1]\n\xff\n')
    add_events(run, ("09", "signal", {"signal": "SIGUSR2"}))
    found = newest(run)
    assert (found.name, found.confidence, found.rank) == ("stop-signal", "likely", 0)
    assert found.evidence[0].place == "events.jsonl:5"
    cause = f"rank 0 on {HOST} failed after the job had received SIGUSR2: ended with exit code 1"
    assert found.cause == cause
    assert "  5: 00:00:09  signal  signal=SIGUSR2" in "\n".join(diagnosis_lines(found))


TEN = "2026-01-01T00:00:10.000Z"


@pytest.mark.parametrize(
    "reason",
    ["ended by SIGINT, and no worker reported a save", "exited with 0 after SIGTERM without reporting"],
)
def test_a_stop_that_was_recorded_is_no_failure(run, reason):
    add_events(run, ("01", "signal", {"signal": "SIGTERM"}))
    write_json(run.attempt(1).end_file, {"state": "stopped", "cause": None, "reason": reason})
    found = newest(run)
    assert (found.state, found.cause) == ("nothing failed", f"the run stopped: {reason}")
    # The agent received the signal after the rank had died of it.
    record = {"rank": 0, "host": HOST, "time": TEN, "type": "exit", "message": "killed by SIGTERM"}
    write_json(run.attempt(1).rank_error(0), {**record, "exit_code": 143})
    assert newest(run).cause == f"the run stopped: {reason}"


def test_a_node_that_is_drained(run):
    reason = "ended by SIGTERM, and no worker reported a save while n3 is drained; resumes (restart 1)"
    end = {"state": "stopped", "action": "requeue", "cause": "preempted", "reason": reason, "time": TEN}
    write_json(run.attempt(1).end_file, end)
    found = newest(run)
    cause = "the ranks on n3 were stopped, because an administrator is taking the host out of service"
    assert (found.name, found.cause) == ("drained", cause)


def test_a_save_that_the_end_cut_off(run):
    add_events(run, ("01", "checkpoint_begin", {"step": 40}), ("02", "checkpoint_commit", {"step": 40}))
    said("\n".join(newest(run).advice))
    add_events(run, ("03", "checkpoint_begin", {"step": 50}))
    found = newest(run)
    assert (found.name, found.confidence) == (None, "unknown")
    said(found.advice[0])
    assert [item.line for item in found.events] == [2, 3], "a completed save is one line"
    write_json(run.attempt(1).end_file, {"state": "stopped", "cause": "preempted", "time": TEN})
    (run.attempt(1).config_file).write_text("name: x\nrequeue: {grace_s: 20}\n")
    said("\n".join(newest(run).advice))
    # the checkpoint is published, and its event would have followed a moment later
    run.checkpoint_dir(50).mkdir(parents=True)
    assert not any("was not completed" in item for item in newest(run).advice)


@pytest.mark.parametrize(
    "resources",
    [
        *("time: '2:00:00'", "{time: 3-0, slice: '4:00:00'}", "{time: 3-0, slice: 2-0}", "{time: null}"),
        *("{time: '4:00:00', time_min: '30'}", "{time: 3-0, slice: '2:00:00', time_min: '1:00:00'}"),
    ],
)
def test_the_limit_that_ended_the_job_is_the_one_to_raise(run, resources):
    resources = resources.removeprefix("{").removesuffix("}")
    run.attempt(1).config_file.write_text(f"name: x\nresources: {{{resources}}}\n")
    write_json(run.attempt(1).plan_file, {"backend": "sbatch"})
    write_json(run.attempt(1).end_file, {"state": "stopped", "cause": "timeout", "time": TEN})
    found = [item for item in newest(run).advice if "twice" in item]
    said("\n".join(found) or "no limit")


def test_a_slow_rank_is_named_with_the_time_limit(run):
    slow = {"rank": 3, "host": "n2", "since_step": 7, "phase": "compute", "own_s": 0.2, "usual_s": 0.1}
    add_events(run, ("01", "slow_rank", slow))
    write_json(run.attempt(1).rendezvous_file, {"hosts": ["n1", "n2"]})
    write_json(run.attempt(1).end_file, {"state": "stopped", "cause": "timeout", "time": TEN})
    add_events(run, *(("01", "checkpoint_commit", {"step": step}) for step in range(500)))
    said("\n".join(newest(run).advice))
    add_events(run, ("02", "slow_rank_over", {"rank": 3, "host": "n2"}))
    assert not any("slow" in item for item in newest(run).advice)


OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
TRACEBACK = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'


def test_an_error_in_the_data_that_a_script_prints_is_no_cause(tmp_path):
    samples = (
        b'{"prompt": "why does my run end with CUDA out of memory?", "answer": "lower the batch size"}\n',
        b'sample 3: "RuntimeError: CUDA error: uncorrectable ECC error encountered" -> label 1\n',
        b'{"log": "OSError: [Errno 28] No space left on device"}\n',
    )
    for number, sample in enumerate(samples):
        found = newest(failed(tmp_path / str(number), sample * 3))
        assert found.name == "exit-code", found


def test_a_rank_that_fails_while_it_stops_is_not_why_it_stopped(tmp_path):
    run = failed(tmp_path, TRACEBACK + OOM, "CUDA out of memory", "OutOfMemoryError")
    end = {"state": "failed", "cause": "preempted", "reason": "rank 0 failed after SIGTERM", "verdict": None}
    write_json(run.attempt(1).end_file, end)
    found = newest(run)
    assert (found.name, found.rank) == ("preempted", None)


def test_logs_of_huge_lines_and_logs_that_are_empty_binary_or_cut_off(tmp_path):
    long = b"x" * 10_000_000 + b" CUDA out of memory"
    for number, log in enumerate((long, b"", b"\x00\xff\xfe" * 1000, b"\x1b[31mCUDA out of mem")):
        assert newest(failed(tmp_path / str(number), log)).name == "exit-code"
    found = newest(failed(tmp_path / "before", long + b"\n" + TRACEBACK + OOM))
    assert (found.name, found.confidence) == ("cuda-oom", "likely")
    assert found.evidence[0].line == 4
    assert newest(failed(tmp_path / "message", b"", "y" * 10_000_000, "ValueError")).name is None
    noise = random.Random(18).randbytes(300_000)
    found = newest(failed(tmp_path, noise + b"\n" + TRACEBACK + OOM))
    assert found.name == "cuda-oom"
    assert "\n".join(diagnosis_lines(found)).isprintable() is False  # the output has several lines
    assert all(text.isprintable() for text in diagnosis_lines(found))


@pytest.mark.parametrize("seed", range(3))
def test_files_that_are_cut_off_or_of_another_form(tmp_path, seed):
    chance = random.Random(seed)
    for name in chance.sample(RECORDED, 12):
        run = RunDir(tmp_path / name)
        unpack(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()), run.path)
        for path in sorted(run.path.rglob("*.*")):
            damage = chance.choice(("none", "cut", "empty", "list", "null", "noise", "other"))
            content = path.read_bytes()
            if damage != "none":
                path.write_bytes(
                    {
                        "cut": content[: chance.randrange(len(content))],
                        "empty": b"",
                        "list": b"[1, 2]",
                        "null": b"null",
                        "noise": chance.randbytes(200),
                        "other": b'{"rank": "x", "hosts": 3, "node_sizes": "y", "verdict": [], "time": 5}',
                    }[damage]
                )
        found = diagnose(run.attempt(run.attempt_numbers()[-1]), read_job(run))
        assert "\n".join(diagnosis_lines(found))


LOST = {
    **{"rank": 0, "node_rank": 0, "host": "n1", "time": "2026-11-25T23:52:01Z", "exit_code": 1},
    **{"type": "RuntimeError", "message": "[…] Read error [10.0.0.2]:31370: Connection reset by peer"},
}
OLD = {"node_rank": 1, "host": "n2", "time": "2026-11-25T23:52:02Z"}
"""The record of the second node's launcher, as versions until November 2026 wrote it."""


def diagnosed(folder: Path, output: str, *records: dict[str, Any], num_ranks: int = 2) -> Diagnosis:
    """Diagnose a run on two nodes with this output of the second launcher. The first record is the cause."""
    attempt = RunDir(folder).attempt(1)
    folder.mkdir()
    attempt.create()
    write_json(attempt.plan_file, {"command": ["x.py"], "num_nodes": 2, "workers_per_node": num_ranks})
    write_json(attempt.rendezvous_file, {"hosts": ["n1", "n2"]})
    for record in records:
        write_json(attempt.rank_error(num_ranks * record["node_rank"]), record)
    attempt.rank_log(num_ranks).write_text(output)
    write_json(attempt.end_file, {"state": "failed", "cause": "crash", "verdict": records[0]})
    return diagnose(attempt, read_job(attempt.run))


@pytest.mark.parametrize(
    ("name", "code", "num_ranks", "rank"),
    [
        ("torchrun-second-node", 1, 2, 2),
        ("accelerate-one-rank", 1, 1, 1),
        ("deepspeed-second-node", 247, 1, 1),
        # The launcher does not say which of its two ranks failed.
        ("deepspeed-second-node", 247, 2, None),
    ],
)
def test_in_a_folder_of_an_older_version(tmp_path, name, code, num_ranks, rank):
    record = {**OLD, "rank": num_ranks, "exit_code": code}
    record |= {"type": "exit", "message": f"ended with exit code {code}"}
    for number, records in enumerate(((record, LOST), (LOST, record))):
        found = diagnosed(tmp_path / str(number), OUTPUT[name], *records, num_ranks=num_ranks)
        assert (found.name, found.rank, found.host) == ("killed", rank, "n2"), found
        assert "killed by SIGKILL" in found.cause
        assert f"exit code {code}" not in "\n".join(diagnosis_lines(found)).partition("evidence")[0]


def test_the_agent_has_recorded_which_rank_it_was(tmp_path):
    record = {**OLD, "rank": 3, "type": "RankKilled", "message": "killed by SIGKILL", "exit_code": 137}
    report = OUTPUT["deepspeed-second-node"]
    cases = [(report, (LOST, record)), (report, (record, LOST)), ("… return code = 1", (record, LOST))]
    # This launcher has waited for its other ranks.
    cases += [(report, (LOST, {**record, "time": "2026-11-25T23:52:31Z"}))]
    for number, (output, records) in enumerate(cases):
        found = diagnosed(tmp_path / str(number), output, *records)
        assert (found.name, found.rank, found.host) == ("killed", 3, "n2"), found


def torchrun(rank: int, raised: str, second: int, code: int = 1) -> str:
    """Return the output of a rank and its torchrun."""
    trace = f'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n{raised}\n'
    return "".join(f"[rank{rank}]: {line}\n" for line in trace.splitlines()) + (
        "Root Cause (first observed failure):\n[0]:\n"
        f"  time      : 2026-11-25_23:52:{second}\n  host      : n\n  rank      : {rank} (local_rank: 0)\n"
        f"  exitcode  : {code} (pid: 7)\n"
    )


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("has_end", [False, True])
def test_the_first_of_several_launchers_is_the_one_that_reports_the_earliest_failure(
    tmp_path, killed, has_end
):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.create()
    write_json(attempt.plan_file, {"command": ["x.py"], "num_nodes": 2, "workers_per_node": 2})
    write_json(attempt.rendezvous_file, {"hosts": ["n1", "n2"]})
    late = {"type": "KeyError", "message": "'label'", "exit_code": 1}
    if killed:  # the agent has recorded the rank
        late = {"type": "RankKilled", "message": "killed by SIGKILL", "exit_code": 137}
    noticed = {"type": "QueueError", "message": "a peer is gone", "exit_code": 1}
    first = {**noticed, "rank": 1, "node_rank": 0, "host": "n1", "time": "2026-11-25T22:52:16Z"}
    second = {**late, "rank": 3, "node_rank": 1, "host": "n2", "time": "2026-11-25T22:52:41Z"}
    for number, record in ((0, first), (2, second)):
        write_json(attempt.rank_error(number), record)
    attempt.rank_log(0).write_text(torchrun(1, "QueueError: a peer is gone", 15))
    attempt.rank_log(2).write_text(torchrun(3, "KeyError: 'label'", 10, -9 if killed else 1))
    if has_end:
        write_json(attempt.end_file, {"state": "failed", "cause": "crash", "verdict": first})
    found = diagnose(attempt, read_job(attempt.run))
    assert (found.rank, found.host) == (3, "n2"), found
    # If a launcher reports no time, the times of the records decide.
    attempt.rank_log(2).write_text("")
    assert diagnose(attempt, read_job(attempt.run)).rank == 1


def test_the_first_failure_is_that_of_the_verdict(tmp_path):
    run = failed(tmp_path, b"", "boom", "ValueError")
    attempt = run.attempt(1)
    for times in (("01", "01", "01"), ("00", "01", "01"), (None, None, None), (None, None, "01")):
        for rank, time in enumerate(times):
            record = {"rank": rank, "host": "n1", "type": "ValueError", "message": f"boom {rank}"}
            record["time"] = None if time is None else f"2026-01-01T00:00:{time}Z"
            write_json(attempt.rank_error(rank), record)
        write_json(attempt.end_file, {"state": "failed", "cause": "crash", "verdict": record})
        assert newest(run).rank == 2


def test_the_output_of_a_rank_is_in_the_log_of_its_launcher(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.create()
    plan = {"num_nodes": 2, "node_sizes": [2, 3], "workers_per_node": 3}
    for launcher, first in (("torchrun", [0, 0, 2, 2, 2, 5]), ("python", range(6))):
        write_json(attempt.plan_file, {**plan, "launcher": launcher})
        found = [log_of(attempt, read_plan(attempt), rank) for rank in range(6)]
        assert found == [attempt.rank_log(rank) for rank in first]
    attempt.plan_file.unlink()
    assert log_of(attempt, read_plan(attempt), 1) == attempt.rank_log(1)


STORE = "Timed out after 6 seconds waiting for clients. {}/8 clients joined."


@pytest.mark.parametrize(
    ("message", "silent", "first_missing"),
    [
        ("3 of 8 ranks did not start within 0:30:00: rank 5, 6, 7", (), 5),
        *((STORE.format(1), (), 1), (STORE.format(6), (3, 4), 3), (STORE.format(6), (3,), 0)),
    ],
)
def test_the_ranks_that_did_not_reach_rank_0(tmp_path, message, silent, first_missing):
    run = failed(tmp_path, b"starts\n", message, "DistStoreError")
    attempt = run.attempt(1)
    write_json(attempt.plan_file, {"num_nodes": 2, "workers_per_node": 4})
    write_json(attempt.rendezvous_file, {"hosts": ["node01", "node02"]})
    for rank in range(1, 8):
        attempt.rank_log(rank).write_text("" if rank in silent else "starts\n")
    found = newest(run)
    assert (found.name, found.rank) == ("rendezvous", first_missing)
    said(found.cause)


def test_a_finished_run_shows_the_crash_of_an_earlier_attempt(tmp_path):
    run = failed(tmp_path / "run", b"")
    message = "[Errno 2] No such file or directory: 'out/x.txt'"
    code = {"file": "mine.py", "line": 7, "text": "open(path)"}
    record = {"rank": 1, "host": HOST, "time": TEN, "step": 9, "type": "FileNotFoundError"}
    record |= {"message": message, "code": code}
    end = {"state": "failed", "action": "restart", "cause": "crash", "reason": "a worker ended"}
    write_json(run.attempt(1).end_file, {**end, "verdict": record})
    write_json(run.job_file, {"cwd": str(tmp_path), "attempts": []})
    write_json(run.config_file, {})  # trainkit started the run, so `trainkit resume` can start it again
    said("\n".join(newest(run).advice))
    run.attempt(2).create()
    write_json(run.attempt(2).end_file, {"state": "finished", "action": "finished"})
    said("\n".join(diagnosis_lines(newest(run))))
    (tmp_path / "out").mkdir()  # the folder exists by now, and a finished run cannot be resumed
    said("\n".join(diagnose(run.attempt(1), read_job(run)).advice))


def test_a_preempted_attempt_has_not_failed(tmp_path):
    run = failed(tmp_path, b"")
    run.attempt(1).rank_error(0).unlink()
    end = {"state": "stopped", "action": "requeue", "cause": "preempted", "reason": "saved", "step": 46}
    write_json(run.attempt(1).end_file, end)
    run.attempt(2).create()
    resumed = {"time": TEN, "attempt": 2, "event": "resumed", "step": 46}
    run.events_file.write_text(json.dumps(resumed) + "\n")
    lines = diagnosis_lines(diagnose(run.attempt(1), read_job(run)))
    said("\n".join(lines))


@pytest.mark.parametrize(
    ("stopped_by", "name", "host"),
    [("drained n3", "drained", "n3"), ("SIGTERM", "cancelled", None), ("debugger", "debugger", None)],
)
def test_end_json_says_what_stopped_an_attempt(tmp_path, stopped_by, name, host):
    """The words of the reason do not matter."""
    attempt = make_attempt(tmp_path / "run")
    write_json(attempt.end_file, {"state": "stopped", "stopped_by": stopped_by, "reason": "ended"})
    found = newest(attempt.run)
    assert (found.name, found.host, found.state) == (name, host, "stopped")


def test_a_sharded_model_that_was_called(tmp_path):
    message = "aten.addmm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor"
    found = newest(failed(tmp_path, b"", message, "RuntimeError"))
    assert found.name == "sharded-model"
    said("\n".join((found.cause, *found.advice)))


def test_the_newest_checkpoint_is_no_advice_for_an_earlier_attempt(tmp_path):
    unpack_golden(tmp_path / "project")
    run = RunDir(tmp_path / "project/runs/preempted")
    about_checkpoint = [line for line in newest(run).advice if "step 6" in line]
    assert about_checkpoint
    earlier = run.attempt(run.attempt_numbers()[-1])
    run.attempt(earlier.number + 1).create()
    assert not set(about_checkpoint) & set(diagnose(earlier, read_job(run)).advice)
