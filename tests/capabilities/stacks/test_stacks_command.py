"""Runs `trainkit stacks` with a program in place of py-spy."""

import json
import sys

import pytest

from tests.support.json_outputs import checked
from tests.support.said import said

SPY = """#!{python}
import json, sys
assert sys.argv[1:4] == ["dump", "--json", "--pid"]
pid = int(sys.argv[-1])
rank = [line for line in open(f"/proc/{{pid}}/environ").read().split("\\0") if line.startswith("RANK=")][0]
if rank == "RANK=3":
    sys.exit("Error: Permission Denied")
place = "read" if rank == "RANK=2" else "gather"
frames = [{{"name": place, "filename": "/x/site-packages/torch/a.py", "line": 7}}]
main = {{"thread_id": 5, "thread_name": "MainThread", "os_thread_id": pid, "frames": frames}}
other = {{"thread_id": 6, "thread_name": "data", "os_thread_id": 1, "frames": frames}}
print(json.dumps([other, main]))
"""


@pytest.fixture
def spied(desk):
    """Replace py-spy with a program. Rank 2 reads, rank 3 cannot be inspected, and the other ranks wait."""
    folder = desk.folder / "bin"
    folder.mkdir()
    (folder / "py-spy").write_text(SPY.format(python=sys.executable))
    (folder / "py-spy").chmod(0o755)
    desk.environ["PATH"] = f"{folder}:{desk.environ['PATH']}"
    return desk


def test_ranks_at_the_same_place_are_shown_together(spied):
    run = spied.submit("--nodes", "2", "--gpus-per-node", "2")
    spied.wait_for_log(run, "rank 3", rank=3)
    done = spied.trainkit("stacks", "last")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" on ")[0] for line in lines if line.startswith("rank")] == [
        "rank 2",
        "ranks 0-1",
        "rank 3",
    ]
    assert lines[1] == "    read (torch/a.py:7)"
    assert lines[-1].endswith("py-spy: Error: Permission Denied")
    assert "data" not in done.stdout
    only = spied.trainkit("stacks", "last", "--rank", "2").stdout
    assert only.startswith("rank 2 on ")
    assert "  thread data 0x6" in only
    assert list(run.attempt(1).stacks_dir.iterdir()) == [], "nothing of the question is left"
    value = checked("stacks", spied.trainkit("stacks", "last", "--json").stdout)
    assert (value["run_dir"], value["attempt"]) == (str(run.path), 1)
    assert (value["groups"], value["silent"]) == ([[2], [0, 1]], [])
    assert [reply["rank"] for reply in value["replies"]] == [0, 1, 2, 3]
    assert value["replies"][2]["threads"]["MainThread 0x5"] == ["read (/x/site-packages/torch/a.py:7)"]
    said(value["replies"][3]["problem"])


def test_what_cannot_be_asked(spied):
    run = spied.submit()
    done = spied.trainkit("stacks", "last", "--rank", "7", "--json")
    assert done.returncode == 2
    said(json.loads(done.stdout)["error"])
    spied.trainkit("cancel", "last", "--now")
    spied.wait_for_end(run)
    done = spied.trainkit("stacks", "last")
    assert done.returncode == 2
    assert "is not running" in done.stderr
    assert "hint: `trainkit status" in done.stderr
    assert spied.trainkit("stacks", "nothing").returncode == 2
