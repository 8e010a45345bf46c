"""What a job reports, and runs that restart to continue without a slow host."""

from __future__ import annotations

import pytest

from tests.on_slurm.login import Login, agents_of, log_of, settings, wait_for
from tests.on_slurm.test_secrets import files_with
from tests.support.webhooks import SECRET, webhook
from tools.slurm_cluster.network import MACHINE_INDEX
from trainkit.rundir import read_json

LISTENS_ONCE = """
import json, os, signal, socket, sys, time
run, attempt = os.environ["TRAINKIT_JOB_RUN_DIR"], int(os.environ["TRAINKIT_JOB_ATTEMPT"])
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda n, f: asked.append(n))
is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
if attempt == 1 and is_last and sys.argv[1:] == ["slow"]:
    event = {"event": "slow_rank", "attempt": 1, "rank": int(os.environ["RANK"]), "ratio": 2.0}
    event |= {"host": socket.gethostname(), "since_step": 1200, "phase": "compute"}
    with open(run + "/events.jsonl", "a") as f:
        f.write(json.dumps(event) + "\\n")
print("attempt", attempt, flush=True)
while attempt == 1 and not asked:
    time.sleep(0.02)
sys.exit(75 if attempt == 1 else 0)
"""
"""Saves when it is asked to; its second attempt finishes."""


@pytest.mark.slow(seconds=25)
def test_a_job_reports_its_requeue_and_its_end_and_slurm_sends_emails(login: Login) -> None:
    script = login.script(LISTENS_ONCE)
    with webhook(login.cluster.address(MACHINE_INDEX)) as found:
        env = {"MY_HOOK": found.url}
        args = settings("notify.webhook=MY_HOOK", "notify.mail=me@example.org")
        run = login.submit(*args, "--", "python", script, env=env)
        login.wait_for_log(run, "attempt 1")
        assert login.cluster.job(login.job_id(run))["MailUser"] == "me@example.org"
        assert login.trainkit("requeue", str(run.path)).returncode == 0
        end = login.wait_for_end(run, attempt=2)
        assert end["state"] == "finished", login.logs_and_attempts(run)
        wait_for(lambda: len(found.messages) == 2, "two reports")
    first, last = found.messages
    assert [first["event"], last["event"]] == ["requeued", "finished"]
    assert first["text"].startswith("small is requeued: saved after SIGUSR2; resumes (restart 1) (job ")
    assert (last["job_id"], last["attempt"]) == (login.job_id(run), 2)
    text = run.script_file.read_text()
    assert "#SBATCH --mail-user=me@example.org\n#SBATCH --mail-type=END,FAIL,REQUEUE\n" in text
    assert files_with(run.path, SECRET) == []


@pytest.mark.slow(seconds=40)
def test_a_run_restarts_without_a_slow_host(login: Login) -> None:
    """Inside the allocation with a spare node, else in the queue."""
    script, hosts = login.script(LISTENS_ONCE), login.cluster.hosts
    policy = settings("requeue.slow_hosts=restart", "requeue.slow_after_s=1")
    command = ["--", "python", script, "slow"]
    spare = login.submit("--nodes", "2", *policy, *settings("resources.spare_nodes=1"), *command)
    login.wait_for_log(spare, "attempt 1")
    alone = login.submit(*policy, *command)
    ends = [login.wait_for_end(run) for run in (spare, alone)]
    assert [end["action"] for end in ends] == ["restart", "requeue"], login.logs_and_attempts(alone)
    assert ends[0]["reason"] == (
        f"restarts without {hosts[1]}: rank 1 slow since step 1200 (compute); resumes (restart 1)"
    )
    for run in (spare, alone):
        assert login.wait_for_end(run, attempt=2)["state"] == "finished", login.logs_and_attempts(run)
        assert log_of(run, attempt=2) == "attempt 2\n"
    assert [host for _, host in agents_of(spare, attempt=2)] == [hosts[0], hosts[2]]
    [(_, before)], [(_, after)] = agents_of(alone), agents_of(alone, attempt=2)
    assert before != after
    assert login.cluster.job(login.job_id(alone))["ExcNodeList"] == before
    shown = login.trainkit("status", str(alone.path)).stdout
    assert "1 (1 slow host)" in shown
    assert read_json(alone.attempt(1).end_file)["cause"] == "slow_host"
