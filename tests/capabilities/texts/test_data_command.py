"""Runs `trainkit data` as people and scripts do."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dataset_content import content_of

import trainkit
from tests.support.programs import run_program
from tests.support.runs import train
from tests.support.said import said
from trainkit.cli.main import main
from trainkit.errors import EXIT_FAILED, EXIT_OK


def environ():
    """Return variables for a child process, with which trainkit can be imported in any folder.

    The function is called within a test, where the state folder has no runs of the user.
    """
    return os.environ | {"PYTHONPATH": str(Path(trainkit.__file__).parents[1])}


@pytest.fixture
def data(tmp_path, monkeypatch, capsys):
    """Return a function that runs `trainkit data`, and returns its exit code, its output and its errors."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        code = main(["data", *args])
        return code, *capsys.readouterr()

    return run


def write_rows(path, number):
    path.write_text("".join(json.dumps({"text": f"row {i} " * 20}) + "\n" for i in range(number)))


def test_prepare_prints_the_folder_and_says_the_rest(data):
    code, out, err = data("prepare", "stdlib", "--out", "shards")
    assert (code, out) == (EXIT_OK, "shards\n")
    assert "257 tokens, <eos> marks" in err
    value = json.loads(data("prepare", "stdlib", "--out", "shards", "--json")[1])
    assert value["was_there"]
    assert value["num_tokens"]["val"] > 10_000
    assert value["tokenizer"]["eos_id"] == 256


@pytest.mark.slow(seconds=8)
def test_examples_of_the_help_run_as_they_stand(tmp_path, data):
    (tmp_path / "runs").mkdir()
    train(tmp_path / "runs/small", ["train.steps=3"])
    for command in ([], ["prepare"], ["validate"], ["show"]):
        _, shown, _ = data(*command, "-h")
        for example in shown.split("Examples:\n")[1].strip().splitlines():
            program, group, *args = example.split()
            assert (program, group, data(*args)[0]) == ("trainkit", "data", EXIT_OK), example


def test_validate_lists_problems_on_stdout(tmp_path, data):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{bad\n\n{"body": "x"}\n')
    code, out, err = data("validate", "a.jsonl")
    assert code == EXIT_FAILED
    lines = out.splitlines()
    assert [line.split(": ")[0] for line in lines[:-1]] == ["a.jsonl:2", "a.jsonl:4"]
    said(lines[-1])
    said(err)
    value = json.loads(data("validate", "a.jsonl", "--json")[1])
    assert [problem["line"] for problem in value["problems"]] == [2, 4]
    assert value["files"][0]["documents"] == 1
    assert value["files"][0]["first_empty"] == [3]


def test_validate_a_prepared_folder(tmp_path, data):
    write_rows(tmp_path / "a.jsonl", 100)
    data("prepare", "a.jsonl", "--out", "shards")
    assert data("validate", "shards")[0] == EXIT_OK
    shard = tmp_path / "shards" / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x07")
    code, out, _ = data("validate", "shards")
    assert code == EXIT_FAILED
    said(out)


def test_help_needs_nothing_heavy():
    code = (
        "import sys; from trainkit.cli.main import main; main(['data', 'prepare', '--help']); "
        "print({'numpy', 'tokenizers', 'torch', 'rich'} & set(sys.modules), file=sys.stderr)"
    )
    done = run_program(sys.executable, "-c", code, env=environ(), check=True)
    assert done.stderr.strip() == "set()"


PREPARE_IN_SMALL_UNITS = """
import sys
from pathlib import Path
from trainkit.capabilities.texts.prepare import prepare
from trainkit.capabilities.texts.inputs import DatasetSpec

if __name__ == "__main__":
    spec = DatasetSpec(("texts",), tokenizer=sys.argv[2], val_fraction=0.05)
    prepare(spec, Path(sys.argv[1]), workers=int(sys.argv[3]), unit_bytes=1 << 16)
"""
SLOWLY = PREPARE_IN_SMALL_UNITS.replace(
    'if __name__ == "__main__":\n',
    """
import time
import trainkit.capabilities.texts.prepare as module
run_unit = module.run_unit
def slowly(*job):
    time.sleep(0.05)
    return run_unit(*job)
if __name__ == "__main__":
    module.run_unit = slowly
""",
)
"""The command is slow enough to be killed before it ends."""


def start_prepare(cwd, out, workers):
    command = [sys.executable, "small_units.py", out, "bytes", str(workers)]
    return subprocess.Popen(command, cwd=cwd, env=environ(), stderr=subprocess.PIPE, text=True)


def processes_in(folder):
    """Return the ids of the processes whose working directory is `folder`."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def num_records(folder):
    return len(list(folder.glob(".work/unit-*.json")))


@pytest.mark.slow
def test_killed_at_random_times_and_finished(tmp_path):
    (tmp_path / "small_units.py").write_text(PREPARE_IN_SMALL_UNITS)
    (tmp_path / "texts").mkdir()
    write_rows(tmp_path / "texts" / "a.jsonl", 12_000)
    (tmp_path / "texts" / "b.txt").write_text("line of text\r\n" * 60_000)
    assert start_prepare(tmp_path, "expected", 1).wait(300) == 0
    expected = content_of(tmp_path / "expected")
    assert len(expected) > 40

    randomness, num_killed = random.Random(0), 0
    for attempt in range(5):
        process = start_prepare(tmp_path, "out", 1 + attempt % 3)
        goal = num_records(tmp_path / "out") + randomness.randrange(8)
        while num_records(tmp_path / "out") < goal and process.poll() is None:
            time.sleep(0.001)
        time.sleep(randomness.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:  # the command ended before the kill
            assert content_of(tmp_path / "out") == expected
            shutil.rmtree(tmp_path / "out")
            continue
        assert process.returncode == -signal.SIGKILL
        num_killed += 1
        assert not (tmp_path / "out" / "dataset.json").exists()
    assert num_killed > 0
    last = start_prepare(tmp_path, "out", 2)
    assert last.wait(300) == 0, last.stderr.read()
    assert content_of(tmp_path / "out") == expected


def test_workers_die_with_a_killed_prepare(tmp_path):
    (tmp_path / "small_units.py").write_text(SLOWLY)
    (tmp_path / "texts").mkdir()
    write_rows(tmp_path / "texts" / "a.jsonl", 40_000)
    process = start_prepare(tmp_path, "out", 2)
    while len(processes_in(tmp_path)) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_in(tmp_path) == set()


def test_full_disk_exits_1(tmp_path, data):
    """A limit on file sizes simulates a full disk, because the kernel refuses further writes."""
    write_rows(tmp_path / "a.jsonl", 3000)
    shell = f"ulimit -f 100; trap '' XFSZ; exec {sys.executable} -m trainkit data prepare a.jsonl --out out"
    done = run_program("bash", "-c", shell, cwd=tmp_path, env=environ())
    assert done.returncode == EXIT_FAILED
    said(done.stderr)
    assert data("prepare", "a.jsonl", "--out", "out")[0] == EXIT_OK
