import html
import json
import os
import re
import shutil
import signal
import socket

from steering import SAVES, wait_for

from tests.support.said import said
from trainkit.run.events import log_event
from trainkit.run.files import read_json, write_json
from trainkit.run.rundir import RunDir


def test_all_runs_newest_first(desk):
    done = desk.typed("status")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no runs yet" in done.stderr
    desk.submit()
    desk.submit("--name", "other")
    lines = desk.typed("status").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["RUN", "runs/other", "runs/small"]
    assert lines[1].split()[1] in ("starting", "running")
    states = json.loads(desk.typed("status", "--json").stdout)
    assert [state["name"] for state in states] == ["other", "small"]


def test_ended_runs_beyond_the_newest_are_counted(desk):
    made = [desk.folder / "runs" / f"old-{number:02}" for number in range(18)]
    for folder in made:
        run = RunDir(folder)
        run.attempts_dir.mkdir(parents=True)
        run.attempt(1).create()
        run.config_file.write_text("name: quickstart")
        write_json(run.job_file, {"name": "quickstart", "attempts": []})
    lines = desk.typed("status").stdout.splitlines()
    assert len({line.split()[0] for line in lines[1:16]}) == 15
    assert [line.split()[0] for line in lines[16:]] == ["3"]
    assert len(desk.typed("status", "--all").stdout.splitlines()) == 1 + 18
    assert len(json.loads(desk.typed("status", "--json").stdout)) == 18


def test_supervisor_that_is_gone_without_a_word_has_died(desk):
    run = desk.submit()
    os.kill(read_json(run.job_file)["attempts"][0]["pid"], signal.SIGKILL)
    wait_for(lambda: desk.status(run)["state"] == "died")
    assert "supervisor exited without" in desk.typed("status", "small").stdout


def test_a_failure_comes_first_everywhere(desk):
    (desk.folder / "src").mkdir()
    (desk.folder / "src" / "model.py").write_text("def shape(labels):\n    return labels['width']\n")
    desk.works("sys.path.insert(0, 'src')\nimport model\nif RANK == 1: model.shape({})\n" + SAVES)
    submit = ("--follow", "--set", "requeue.max=0", "--gpus-per-node", "2", "--name", "fails")
    followed = desk.trainkit("submit", "small.yaml", *submit)
    lines = [
        f"rank 1 failed first on {socket.gethostname()}: KeyError: 'width'",
        *("  src/model.py:2: return labels['width']", "last lines of rank 1:", "  KeyError: 'width'"),
        "next: `trainkit diagnose runs/fails` says what to do",
    ]
    for shown in (followed.stderr, desk.typed("status", "last").stdout):
        own = [line for line in shown.splitlines() if line in lines]
        assert own == lines, shown
    assert desk.typed("status", "last").stdout.startswith(lines[0])
    screen = desk.typed("watch", "last", "--once").stdout.splitlines()
    assert screen[1:3] == lines[:2]
    assert desk.typed("report", "last").returncode == 0
    page = html.unescape((desk.folder / "runs" / "fails" / "report.html").read_text())
    assert all(line in page for line in lines[:-1])
    assert page.index(lines[3]) < page.index("Timeline")
    assert "trainkit diagnose" in page
    found = json.loads(desk.typed("diagnose", "last", "--json").stdout)
    assert (found["name"], found["rank"], found["confidence"]) == ("exception", 1, "certain")
    assert found["code"] == {"file": "src/model.py", "line": 2, "text": "return labels['width']"}
    assert found["tail"][-1]["text"] == "KeyError: 'width'"
    assert found["advice"][-1].endswith(" --new-code`")


def test_what_others_wrote_controls_no_terminal_and_json_has_no_secrets(desk):
    odd = "\x1b]52;c;aGk=\x07\x9b2J\u202e\x1b[31mred"
    desk.works(f"raise RuntimeError({odd!r} + ' https://me:hunter2@host')")
    desk.trainkit("submit", "small.yaml", "--follow", "--set", "requeue.max=0")
    run = desk.folder / "runs" / "small"
    for file in (run / "job.json", run / "attempts" / "001" / "plan.json"):
        value = read_json(file)
        write_json(file, {**value, "name": f"small{odd}", "cwd": f"/x{odd}"})
    end = read_json(run / "attempts" / "001" / "end.json")
    reason = f"reason{odd} password: hunter2"
    write_json(run / "attempts" / "001" / "end.json", {**end, "reason": reason})
    log_event(RunDir(run), 1, "warning", reason=reason, password="hunter2")
    other = desk.folder / "runs" / f"other{odd}"
    shutil.copytree(run, other)
    config = (run / "config.yaml").read_text().replace("note: null", f"note: {json.dumps(reason)}")
    (run / "config.yaml").write_text(config)
    commands = [("status",), ("compare", "small", str(other))]
    commands += [(name, "small") for name in ("status", "watch", "diagnose", "report")]
    for command in commands:
        shown = desk.typed(*command)
        text = shown.stdout + shown.stderr
        assert command[0] == "report" or "red" in text
        found = re.search("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202e]|\x1b(?!\\[)", text)
        assert found is None, (command, found)
        values = desk.typed(*command, "--json").stdout
        assert "***" in values, command
        assert "hunter2" not in values, command
        json.loads(values)
    assert "hunter2" not in desk.typed("compare", "small", str(other), "--csv").stdout


def test_a_name_is_first_of_all_the_run_in_this_folder(desk):
    run = desk.submit()
    newer = desk.submit("--run-dir", str(desk.folder / "elsewhere" / "small"))
    done = desk.typed("status", "small", "--json")
    assert json.loads(done.stdout)["run_dir"] == str(run.path)
    assert done.stderr == ""
    desk.folder = desk.folder / "state"  # this folder has no such run
    done = desk.typed("status", "small", "--json")
    assert json.loads(done.stdout)["run_dir"] == str(newer.path)
    said(done.stderr)
    for command in ("cancel", "requeue", "resume"):
        done = desk.typed(command, "small")
        assert (done.returncode, done.stdout) == (2, "")
        said(done.stderr)


def test_a_damaged_group_hides_no_other_run(desk):
    desk.submit()
    bad = desk.folder / "runs/bad"
    bad.mkdir()
    (bad / "sweep.json").write_text('{"points": [{}]}')
    done = desk.typed("status")
    assert (done.returncode, "runs/small" in done.stdout) == (0, True)
    assert "sweep.json" in done.stderr
