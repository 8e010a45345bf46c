"""Tests runs that restart to continue without a slow host, and the reports of their jobs."""

from tests.on_slurm.login import agents_of, log_of, settings, wait_for
from tests.on_slurm.test_secrets import files_with
from tests.support.webhooks import SECRET, webhook
from tools.slurm_cluster.network import MACHINE_INDEX

LISTENS_ONCE = """
import json, os, signal, socket, sys, time
run, attempt = os.environ["TRAINKIT_JOB_RUN_DIR"], int(os.environ["TRAINKIT_JOB_ATTEMPT"])
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda n, f: asked.append(n))
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
open(f"{run}/listens-{rank}", "w").close()
if attempt == 1 and rank == world_size - 1:
    while not all(os.path.exists(f"{run}/listens-{other}") for other in range(world_size)):
        time.sleep(0.02)
    event = {"event": "slow_rank", "attempt": 1, "rank": rank, "ratio": 2.0}
    event |= {"host": socket.gethostname(), "since_step": 1200, "phase": "compute"}
    with open(run + "/events.jsonl", "a") as f:
        f.write(json.dumps(event) + "\\n")
print("attempt", attempt, flush=True)
while attempt == 1 and not asked:
    time.sleep(0.02)
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)  # the second of Slurm's and the agent's may come during the exit
sys.exit(75 if attempt == 1 else 0)
"""
"""A script whose last rank reports itself as slow once all ranks listen.

The ranks save on a stop signal, and attempt 2 finishes.
"""


def test_runs_restart_without_a_slow_host_and_report_it(login):
    script, hosts = login.script(LISTENS_ONCE), login.cluster.hosts
    policy = settings("requeue.slow_hosts=restart", "requeue.slow_after_s=1")
    command = ["--", "python", script]
    with webhook(login.cluster.address(MACHINE_INDEX)) as found:
        spare = login.submit("--nodes", "2", *policy, *settings("resources.spare_nodes=1"), *command)
        login.wait_for_log(spare, "attempt 1")
        reports = settings("notify.webhook=MY_HOOK", "notify.mail=me@example.org")
        alone = login.submit(*policy, *reports, *command, env={"MY_HOOK": found.url})
        login.wait_for_log(alone, "attempt 1")
        login.trainkit("requeue", str(alone.path))
        ends = [login.wait_for_end(run) for run in (spare, alone)]
        assert [end["action"] for end in ends] == ["restart", "requeue"], login.logs_and_attempts(alone)
        for run in (spare, alone):
            assert login.wait_for_end(run, attempt=2)["state"] == "finished", login.logs_and_attempts(run)
            assert log_of(run, attempt=2) == "attempt 2\n"
        wait_for(lambda: len(found.messages) == 2, "two reports")
    assert ends[0]["reason"] == (
        f"restarts without {hosts[1]}: rank 1 has been slow since step 1200 (compute); resumes (restart 1)"
    )
    assert [host for _, host in agents_of(spare, attempt=2)] == [hosts[0], hosts[2]]
    [(_, before)], [(_, after)] = agents_of(alone), agents_of(alone, attempt=2)
    assert before != after
    job = login.cluster.job(login.job_id(alone))
    assert (job["ExcNodeList"], job["MailUser"]) == (before, "me@example.org")
    assert "1 (1 slow host)" in login.trainkit("status", str(spare.path)).stdout
    first, last = found.messages
    assert first["text"].startswith(f"{alone.name} is requeued: ")
    assert [(one["event"], one["attempt"]) for one in (first, last)] == [("requeued", 1), ("finished", 2)]
    assert last["job_id"] == login.job_id(alone)
    text = alone.script_file.read_text()
    assert "#SBATCH --mail-type=END,FAIL,REQUEUE\n" in text
    assert files_with(alone.path, SECRET) == []
