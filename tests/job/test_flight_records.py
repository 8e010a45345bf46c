"""Tests flight records of torch: they are read without executing anything, and are written on request."""

import json
import os
import pickle
import select
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.programs import run_program, wait_for
from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.job import flight_records
from trainkit.job.flight_records import (
    FLIGHT_VARIABLE,
    flight_environ,
    parse_flight,
    read_dump,
    read_flights,
    remove_pipes,
    request_dumps,
)
from trainkit.plan.launch import WorkerEnvironment
from trainkit.plan.workload import Workload
from trainkit.run.files import write_json

ENTRY: dict[str, Any] = {"record_id": 0, "pg_id": 0, "process_group": ("0", "default_pg")}
ENTRY |= {"collective_seq_id": 5, "p2p_seq_id": 0, "op_id": 5, "profiling_name": "nccl:all_reduce"}
ENTRY |= {"time_created_ns": 1, "input_sizes": [[1024]], "input_dtypes": ["Float"], "output_sizes": [[1024]]}
ENTRY |= {"output_dtypes": ["Float"], "state": "scheduled", "retired": False, "timeout_ms": 600000}
ENTRY |= {"is_p2p": False, "frames": [{"name": "step", "filename": "/home/me/train.py", "line": 88}]}
DUMP: dict[str, Any] = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [ENTRY],
}


MADE = Path("/tmp/made-by-a-flight-record")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(MADE),)


def test_pickles_and_json_say_the_same(tmp_path):
    for name, content in (("pickle", pickle.dumps(DUMP, 2)), ("json", json.dumps(DUMP).encode())):
        (tmp_path / name).write_bytes(content)
        [call] = parse_flight(1, read_dump(tmp_path / name), 2).calls
        assert (call.number, call.group, call.place) == (5, ("nccl", "0", (0, 1)), "step (train.py:88)")
        said(call.shown_in_group)


NO_RECORDS = {
    "a class": pickle.dumps({"entries": [Evil()]}, 2),
    "a path": pickle.dumps(Path("/"), 2),
    "a list": pickle.dumps([1, 2]),
    "cut off": pickle.dumps(DUMP)[:-30],
    "JSON": b"{",
    "empty": b"",
    "exec": b"\x80\x02cbuiltins\nexec\n(X\x01\x00\x00\x00atR.",
    "huge": b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x",
    "deep": b"(" * 100_000,
}


@pytest.mark.parametrize("name", NO_RECORDS)
def test_what_is_no_record_is_refused(tmp_path, name):
    (tmp_path / "rank-0").write_bytes(NO_RECORDS[name])
    with pytest.raises(ValueError, match=r"not a flight record|Expecting property name"):
        read_dump(tmp_path / "rank-0")
    assert not MADE.exists()


def test_a_record_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_records, "MAX_BYTES", 100)
    (tmp_path / "rank-0").write_bytes(pickle.dumps(DUMP))
    with pytest.raises(ValueError, match="larger than"):
        read_dump(tmp_path / "rank-0")


@pytest.mark.parametrize(
    "broken", [{"entries": [{}]}, {"entries": 5}, {"pg_config": []}, {"pg_config": {"0": 1}}]
)
def test_other_formats_are_refused(broken):
    with pytest.raises(ValueError, match="not a flight record"):
        parse_flight(0, DUMP | broken, 2)


def test_records_of_the_trainer_and_of_torch_and_damaged_ones(attempt, capfd):
    assert read_flights(attempt, 3) == {}
    for folder in (attempt.flight_dir, attempt.stacks_dir):
        folder.mkdir()
    (attempt.flight_dir / "rank-0").write_bytes(pickle.dumps(DUMP, 2))
    write_json(attempt.rank_collectives(1), DUMP)
    (attempt.flight_dir / "rank-2").write_bytes(b"\x80")
    assert sorted(read_flights(attempt, 3)) == [0, 1]
    assert f" {attempt.flight_dir / 'rank-2'}" in "".join(capfd.readouterr())


def test_torch_writes_a_record_on_request(attempt):
    """One rank has a monitor that reads its pipe, as NCCL's monitor does, and one rank has no NCCL."""
    plan = launch_plan(device="cuda", workload=Workload(("train",)))
    environ = flight_environ(attempt, plan)
    prefix = f"{attempt.flight_dir}/rank-"
    assert environ.keys() > {FLIGHT_VARIABLE}
    assert [*environ.values()] == [prefix, prefix]
    os.mkfifo(f"{prefix}3.pipe")
    reader = os.open(f"{prefix}3.pipe", os.O_RDONLY | os.O_NONBLOCK)

    def monitor() -> None:
        wait_for(lambda: select.select([reader], [], [], 0)[0] and os.read(reader, 10))
        content = pickle.dumps(DUMP, 2)
        with Path(f"{prefix}3").open("wb", buffering=0) as stream:
            stream.write(content[:40])
            stream.write(content[40:])

    thread = threading.Thread(target=monitor)
    thread.start()
    request_dumps(attempt, [2, 3])
    thread.join()
    assert [*read_flights(attempt, 4)] == [3]
    remove_pipes(attempt, [2, 3])
    assert not Path(f"{prefix}3.pipe").exists()


def test_a_place_of_the_users_own_stays_and_without_pipes_torch_is_not_asked(attempt, monkeypatch):
    plan, name = launch_plan(device="cuda"), "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    assert flight_environ(attempt, replace(plan, environment=WorkerEnvironment({name: "/mine/rank-"}))) == {}
    with monkeypatch.context() as patch:
        patch.setenv(name, "/mine/rank-")
        assert flight_environ(attempt, plan) == {}
    assert not attempt.flight_dir.exists()
    monkeypatch.setattr(os, "mkfifo", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    assert FLIGHT_VARIABLE not in flight_environ(attempt, plan)


STARTUP = Path(flight_records.__file__).parent / "startup"
SHOW = ("python3", "-c", "import os; print(os.environ.get('TORCH_NCCL_DEBUG_INFO_PIPE_FILE'))")


@pytest.mark.parametrize(
    ("rank", "folder", "shown"), [("3", ".", True), (None, ".", False), ("3", "gone", False)]
)
def test_only_a_rank_that_sees_the_folder_makes_a_pipe(tmp_path, rank, folder, shown):
    """torch ends a process that cannot make its pipe, for example in a container without the run folder."""
    prefix = str(tmp_path / folder / "rank-")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(STARTUP), "TRAINKIT_JOB_AGENT_PID": str(os.getpid())}
    env |= {FLIGHT_VARIABLE: prefix} | ({} if rank is None else {"RANK": rank})
    assert run_program(*SHOW, env=env).stdout.strip() == (prefix if shown else "None")
