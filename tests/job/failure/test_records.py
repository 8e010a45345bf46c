from dataclasses import asdict
from pathlib import Path

import pytest

import trainkit
from tests.support.said import said
from trainkit.job.failure.records import (
    agent_failure,
    first_rank_failure,
    record_silent_death,
    signal_of_death,
    suspect_host,
)
from trainkit.job.hangs import HangRecord
from trainkit.run.end import RankFailure
from trainkit.run.files import read_json, to_json, write_json
from trainkit.run.record import CodeCopy, create_job, read_job
from trainkit.run.tracebacks import CodeLine, users_line


def record(attempt, rank, time, **fields):
    value = {"rank": rank, "node_rank": 0, "host": "h", "time": time, "step": 3, "type": "E", "message": "m"}
    write_json(attempt.rank_error(rank), {**value, "traceback": "…", **fields})


def test_first_in_time_without_damaged_records(attempt):
    attempt.rank_error(2).write_text("{")
    assert first_rank_failure(attempt) is None
    record(attempt, 0, "2026-01-01T00:00:02.000Z")
    record(attempt, 1, "2026-01-01T00:00:01.000Z")
    expected = {"rank": 1, "node_rank": 0, "host": "h", "time": "2026-01-01T00:00:01.000Z", "step": 3}
    expected |= {"type": "E", "message": "m", "exit_code": None, "final": False, "node": False}
    assert to_json(first_rank_failure(attempt)) == expected
    attempt.rank_log(1).write_text("".join(f"line {number}\n" for number in range(99)))
    assert first_rank_failure(attempt).log_tail == [f"line {number}" for number in range(79, 99)]


TORCH = '  File "/venv/lib/python3.11/site-packages/torch/nn/module.py", line 9, in call'
CAUSE = "The above exception was the direct cause"
OWN = ['  File "/home/me/train.py", line 7, in step', "    loss = model(x)", "           ^^^^^^^^"]


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (["Traceback (most recent call last):", *OWN, TORCH, "    return call()"], ("train.py", 7)),
        (["Traceback (most recent call last):", TORCH, "    return call()"], None),
        (["Traceback (most recent call last):", *OWN, "KeyError: 1", "Traceback …", TORCH], None),
        (["Traceback (most …", *OWN, "E: 1", "", CAUSE, "", "Traceback (most …", TORCH], ("train.py", 7)),
        (['  File "/usr/lib/python3.11/json.py", line 1, in f', '  File "<string>", line 1'], None),
        ([f'  File "{trainkit.__file__}", line 1, in f'], None),
        (['  File "/usr/src/app/bad.py", line 3', "    if:", "      ^"], ("bad.py", 3)),
    ],
)
def test_the_line_of_the_user_in_a_traceback(lines, place):
    found = users_line(lines)
    assert (found and (Path(found.file).name, found.line)) == place
    assert place != ("train.py", 7) or (found.file, found.text) == ("/home/me/train.py", "loss = model(x)")


@pytest.mark.parametrize("copy", ["code", "work"])
def test_the_line_of_a_copy_is_the_one_that_the_user_edits(attempt, copy):
    run = attempt.run
    code = CodeCopy("/home/me/project", str(run.code_dir), "exp")
    create_job(run, backend="local", name="run", cwd="/home/me/project/exp", code=code)
    for inside, shown in (("exp/train.py", "train.py"), ("lib/model.py", "/home/me/project/lib/model.py")):
        found = CodeLine(str(run.path / copy / inside), 3).in_tree(read_job(run))
        assert found.place == f"{shown}:3"


def test_all_ranks_that_fail_in_the_same_way_at_once_are_named_together(attempt):
    at = "2026-01-01T00:00:0{}.000Z"
    record(attempt, 0, at.format(1))
    record(attempt, 1, at.format(2))
    assert first_rank_failure(attempt, 2).line == "all 2 ranks failed in the same way at step 3: E: m"
    assert first_rank_failure(attempt, 3).num_alike is None  # the third rank has not failed
    others = ({"message": "n"}, {"step": 4}, {"type": "F"}, {"time": at.format(9)}, {"time": None})
    for other in others:
        record(attempt, 1, **{"time": at.format(2), **other})
        assert first_rank_failure(attempt, 2).line == "rank 0 failed first on h at step 3: E: m", other
    for rank in (0, 1):  # the supervisor kills the other ranks after a failure
        record(attempt, rank, at.format(1), type="RankKilled", message="killed by SIGKILL")
    assert first_rank_failure(attempt, 2).num_alike is None


@pytest.mark.parametrize(
    ("code", "second", "first"),
    [
        *((137, "02.0", 1), (139, "02.0", 1), (134, "02.0", 0), (3, "02.0", 0)),
        # A death is recorded late if a notice was awaited.
        *((143, "04.4", 1), (138, "04.4", 1), (137, "04.4", 0)),
    ],
)
def test_killed_rank_comes_before_those_that_noticed(attempt, code, second, first):
    record(attempt, 0, "2026-01-01T00:00:01.000Z", exit_code=1)
    record(attempt, 1, f"2026-01-01T00:00:{second}00Z", type="exit", exit_code=code)
    assert first_rank_failure(attempt).rank == first


def test_a_rank_that_went_down_with_the_step_did_not_begin_it(attempt):
    """Slurm may kill a worker a moment before its agent, which then records the worker's death."""
    record(attempt, 3, "2026-01-01T00:00:01.000Z", type="exit", exit_code=9)
    record(attempt, 1, "2026-01-01T00:00:06.900Z", type="exit", exit_code=137)
    assert (first_rank_failure(attempt).rank, first_rank_failure(attempt).exit_code) == (3, 9)
    record(attempt, 0, "2026-01-01T00:00:01.100Z", type="exit", exit_code=137)
    assert first_rank_failure(attempt).rank == 0


def test_silent_death_keeps_the_last_lines_and_never_replaces_a_record(attempt):
    attempt.rank_log(0).write_text("\n".join(str(number) for number in range(100)))
    record_silent_death(attempt, 0, 0, 137)
    value = read_json(attempt.rank_error(0))
    assert (value["type"], value["message"]) == ("exit", "killed by SIGKILL")
    assert value["log_tail"] == [str(number) for number in range(80, 100)]
    record_silent_death(attempt, 0, 0, 1)
    assert read_json(attempt.rank_error(0)) == value


MISSING = ("ModuleNotFoundError", "No module named 'fancy_attention'", True)
SILENT = ("exit", "ended with exit code 1", None)
CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
TRACEBACK = """\
step 3
Traceback (most recent call last):
  File "/home/u/train.py", line 9, in <module>
    import fancy_attention
ModuleNotFoundError: No module named 'fancy_attention'
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (TRACEBACK, MISSING),
        (TRACEBACK + "cleaning up\n", MISSING),
        (TRACEBACK + "continued without it\n" * 30, SILENT),
        (
            "  File \"train.py\", line 1\n    def f(\n         ^\nSyntaxError: '(' was never closed\n",
            ("SyntaxError", "'(' was never closed", True),
        ),
        (TRACEBACK.replace("ModuleNotFound", "Value"), ("ValueError", MISSING[1], False)),
        (
            "".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines()[1:])
            + 'Traceback (most recent call last):\n  File "run.py", line 1, in <module>\n'
            + f"{CHILD_FAILED}{'=' * 60}\n"
            + "[0]:\n  exitcode : 1\n\n" * 20,
            MISSING,
        ),
        (
            'Traceback (most recent call last):\n  File "t.py", line 3, in f\n    g()\n    ~^^\n'
            "torch.AcceleratorError: CUDA error: an illegal memory access\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n",
            ("torch.AcceleratorError", "CUDA error: an illegal memory access", False),
        ),
        (
            f"{TRACEBACK}{CHILD_FAILED}Failures:\n[1]:\n  traceback : Signal 15 (SIGTERM) received by PID 1\n"
            "Root Cause (first observed failure):\n[0]:\n  exitcode  : 1 (pid: 12)\n",
            MISSING,
        ),
        ('  File "t.py", line 3, in f\nAssertionError\n', ("AssertionError", "", False)),
        *(("loss: 2.5\nDone\n", SILENT), ("", SILENT)),
    ],
)
def test_the_traceback_of_a_program_is_its_failure(attempt, log, expected):
    attempt.rank_log(0).write_text(log)
    record_silent_death(attempt, 0, 0, 1)
    value = read_json(attempt.rank_error(0))
    assert (value["type"], value["message"], value.get("final")) == expected
    assert first_rank_failure(attempt).final is bool(expected[2])
    # An exit code of its own says more than a traceback.
    attempt.rank_log(1).write_text(log)
    record_silent_death(attempt, 1, 0, 9)
    assert read_json(attempt.rank_error(1))["type"] == "exit"


def test_out_of_memory(attempt):
    attempt.rank_log(0).write_text(TRACEBACK)
    record_silent_death(attempt, 0, 0, 137, out_of_memory=True)
    value = read_json(attempt.rank_error(0))
    assert value["type"] == "OutOfMemory"
    said(value["message"])
    said(value["hint"])
    # Outside of a job, the key resources.mem has no effect.
    record_silent_death(attempt, 1, 0, 137, out_of_memory=True, is_job=False)
    hint = "lower the batch size or the number of loader processes"
    assert read_json(attempt.rank_error(1))["hint"] == hint


def test_a_rank_that_left_because_it_hung(attempt):
    attempt.hangs_dir.mkdir()
    record_silent_death(attempt, 0, 0, 70)
    assert read_json(attempt.rank_error(0))["type"] == "exit", "stuck when it was asked to stop"
    hang = HangRecord(1, 0, "h", 41, "data", 0, 312.0, 300.0, 0.8, "2026-01-01T00:00:00.000Z", ())
    write_json(attempt.rank_hang(1), asdict(hang))
    record_silent_death(attempt, 1, 0, 70)
    value = read_json(attempt.rank_error(1))
    assert (value["type"], value["step"], value["message"]) == ("Hang", 41, hang.summary)


def test_job_that_failed_outside_its_workers():
    said(agent_failure(2, "killed").message)
    assert agent_failure(None, "no port").message == "no port"


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error\nLast error:\nCuda failure 101"


@pytest.mark.parametrize(
    ("message", "is_suspect"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        (f"{NCCL} 'unspecified launch failure'", True),
        # A process that sees one GPU requests another one, which fails on any host.
        (f"{NCCL} 'invalid device ordinal'", False),
        ("CUDA error: invalid device ordinal", False),
        # These errors come from the program, so the node is healthy.
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: misaligned address", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
        ("CUDA error: out of memory", False),
        (f"{NCCL} 'out of memory'", False),
        ("index 3 is out of bounds", False),
    ],
)
def test_hardware_and_what_only_looks_like_it(message, is_suspect):
    failure = RankFailure(host="h1", type="RuntimeError", message=message, exit_code=1)
    assert suspect_host(failure) == (("h1", "culprit") if is_suspect else None)


@pytest.mark.parametrize("number", [2, 9, 10, 11, 12, 15])
@pytest.mark.parametrize("more", [{"type": "exit"}, {"type": "RankKilled"}, {"type": "exit", "node": True}])
def test_a_death_by_a_signal_that_asks_to_end_is_no_fault_of_the_node(number, more):
    failure = RankFailure(host="h1", message="killed", exit_code=128 + number, **more)
    assert failure.died_of_stop_signal == (number not in (9, 11))
    if failure.died_of_stop_signal:
        assert suspect_host(failure) is None
    elif more["type"] == "exit":
        assert suspect_host(failure) == ("h1", "preflight" if failure.node else "culprit")


@pytest.mark.parametrize(
    ("failure", "codes", "name"),
    [
        (RankFailure(type="exit", exit_code=143), [1], "SIGTERM"),
        (RankFailure(type="exit", exit_code=140), [], "SIGUSR2"),
        (RankFailure(type="torch.x.SignalException", message="got signal: 15", exit_code=1), [1], "SIGTERM"),
        (RankFailure(type="KeyError", exit_code=1), [1, 143], None),
        (RankFailure(type="OutOfMemory", exit_code=137), [137], None),
        (None, [143], "SIGTERM"),
        (None, [124], None),
    ],
)
def test_the_signal_of_which_the_first_died(failure, codes, name):
    assert signal_of_death(failure, codes) == name


@pytest.mark.parametrize("error", ["device-side assert triggered", "uncorrectable ECC error encountered"])
def test_an_error_of_a_kernel_that_the_watchdog_of_nccl_meets_first(attempt, error):
    """The watchdog then ends the process with SIGABRT, before Python can record the error."""
    what = "[PG ID 0 Rank 0] Process group watchdog thread terminated with exception: CUDA error: "
    attempt.rank_log(0).write_text(
        f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {what}{error}\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    record_silent_death(attempt, 0, 0, 134)
    failure = first_rank_failure(attempt)
    assert failure.message == f"killed by SIGABRT: {what}{error}"
    assert (suspect_host(failure) is None) == ("assert" in error)
