import json

from steering import wait_for

from trainkit.run.files import read_json


def test_requeue_of_a_live_run_comes_back_by_itself(desk):
    run = desk.submit("--nodes", "2")
    done = desk.trainkit("requeue", "last", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["attempt"] == 2
    desk.wait_for_log(run, "attempt 2 rank 0", attempt=2)
    assert read_json(run.attempt(1).end_file)["reason"] == "saved after SIGUSR2; resumes (restart 1)"
    assert desk.status(run)["attempt"] == 2


def test_requeue_twice(desk):
    run = desk.submit()
    for _ in range(2):
        assert desk.trainkit("requeue", str(run.path)).returncode == 0
    wait_for(lambda: desk.status(run)["attempt"] >= 2)
    assert desk.trainkit("cancel", str(run.path), "--wait").returncode == 0
    assert desk.status(run)["state"] == "cancelled"


def test_requeue_of_an_ended_run_keeps_config_and_plan(desk):
    desk.works("")
    run = desk.submit()
    desk.wait_for_end(run)
    done = desk.trainkit("requeue", "small")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(run.path)
    desk.wait_for_end(run, attempt=2)
    for name in ("config.yaml", "plan.json"):
        assert (run.attempt(2).path / name).read_bytes() == (run.attempt(1).path / name).read_bytes()


def test_logs_follow_a_run_over_its_attempts(desk):
    run = desk.submit()
    reader = desk.start("logs", str(run.path), "-f")
    first = reader.stdout.readline()
    desk.trainkit("requeue", str(run.path))
    desk.wait_for_log(run, "attempt 2 rank 0", attempt=2)
    desk.trainkit("cancel", str(run.path), "--wait")
    shown, _ = reader.communicate(timeout=120)
    assert (first + shown).splitlines() == [
        "attempt 1 rank 0",
        "asked by SIGTERM",
        "attempt 2 rank 0",
        "asked by SIGTERM",
    ]
