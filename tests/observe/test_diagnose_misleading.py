"""`diagnose` on runs whose files talk about failures that did not happen, or are damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from tests.observe.test_diagnose import RECORDED, failed, newest
from tests.support.broken_runs import FOLDER, HOST, unpack
from trainkit.cli.diagnose import diagnosis_text
from trainkit.observe.diagnose import diagnose
from trainkit.observe.signatures import load_signatures
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir

OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
TRACEBACK = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'


def test_an_error_in_the_data_that_a_script_prints_is_no_cause(tmp_path: Path) -> None:
    samples = (
        b'{"prompt": "why does my run end with CUDA out of memory?", "answer": "lower the batch size"}\n',
        b'sample 3: "RuntimeError: CUDA error: uncorrectable ECC error encountered" -> label 1\n',
        b'{"log": "OSError: [Errno 28] No space left on device"}\n',
    )
    for number, sample in enumerate(samples):
        found = newest(failed(tmp_path / str(number), sample * 3))
        assert found.name == "exit-code", found


def test_a_validation_that_fails_does_not_explain_the_exception_that_follows(tmp_path: Path) -> None:
    log = b"validation failed:\n" + TRACEBACK + OOM + b"continuing\n" + TRACEBACK + b"ValueError: bad label\n"
    found = newest(failed(tmp_path, log, "bad label", "ValueError"))
    assert (found.name, found.confidence) == (None, "unknown")
    assert "ValueError: bad label" in found.cause


def test_what_killed_a_rank_is_not_in_its_own_output(tmp_path: Path) -> None:
    found = newest(failed(tmp_path, TRACEBACK + OOM, "killed by SIGKILL"))
    assert found.name == "killed"


def test_a_rank_that_fails_while_it_stops_is_not_why_it_stopped(tmp_path: Path) -> None:
    run = failed(tmp_path, TRACEBACK + OOM, "CUDA out of memory", "OutOfMemoryError")
    end = {"state": "failed", "cause": "preempted", "reason": "rank 0 failed after SIGTERM", "verdict": None}
    write_json(run.attempt(1).end_file, end)
    found = newest(run)
    assert (found.name, found.rank) == ("preempted", None)


def test_the_failure_of_an_earlier_attempt_explains_nothing(tmp_path: Path) -> None:
    run = failed(tmp_path, OOM, "CUDA out of memory", "OutOfMemoryError")
    second = run.attempt(2)
    second.create()
    record = {"rank": 0, "host": HOST, "time": "2026-01-02T00:00:00Z", "type": "KeyError", "message": "'x'"}
    write_json(second.rank_error(0), record)
    write_json(second.end_file, {"state": "failed", "cause": "crash", "verdict": record})
    found = newest(run)
    assert (found.attempt, found.name, found.confidence) == (2, None, "unknown")
    assert len(found.earlier) == 1


def test_lines_of_ten_megabytes(tmp_path: Path) -> None:
    long = b"x" * 10_000_000 + b" CUDA out of memory"
    assert newest(failed(tmp_path / "only", long)).name == "exit-code"
    found = newest(failed(tmp_path / "before", long + b"\n" + TRACEBACK + OOM))
    assert (found.name, found.confidence) == ("cuda-oom", "likely")
    assert found.evidence[0].line == 4
    assert newest(failed(tmp_path / "message", b"", "y" * 10_000_000, "ValueError")).name is None


def test_binary_output(tmp_path: Path) -> None:
    noise = random.Random(18).randbytes(300_000)
    found = newest(failed(tmp_path, noise + b"\n" + TRACEBACK + OOM))
    assert found.name == "cuda-oom"
    assert diagnosis_text(found).isprintable() is False  # it has lines
    assert all(text.isprintable() for text in diagnosis_text(found).splitlines())


def test_an_attempt_without_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempt(1).create()
    found = newest(run)
    assert (found.state, found.name, found.confidence) == ("failed", None, "unknown")
    assert "it recorded no end" in found.cause


@pytest.mark.parametrize("seed", range(3))
def test_files_that_are_cut_off_or_of_another_form(tmp_path: Path, seed: int) -> None:
    """Whatever a crash leaves, there is a diagnosis."""
    signatures = load_signatures()
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
        found = diagnose(run.attempt(run.attempt_numbers()[-1]), signatures)
        assert diagnosis_text(found)
