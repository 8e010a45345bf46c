"""Tests spare nodes beyond the training nodes, and hosts that failed a while ago."""

from tests.on_slurm.broken_cases import changed_host
from tests.on_slurm.login import agents_of, log_of, settings
from trainkit.cluster.bad_nodes import excluded, memory_file, note_failure


def test_the_job_has_a_node_to_spare_and_leaves_out_one_that_failed(login):
    name, bad = login.cluster.name, login.cluster.hosts[0]
    note_failure(name, bad, "died", "it was away", run="/runs/big", attempt=3, environ=login.env)
    args = ["--nodes", "2", "--gpus-per-node", "2", *settings("resources.spare_nodes=1")]
    shown = login.trainkit("check", str(login.config), *args)
    assert shown.returncode == 0, shown.stderr
    assert "spare_nodes: 1: the job gets 3 nodes, of which 2 train" in shown.stdout
    assert f"exclude: {bad}: it was away (big, attempt 3, " in shown.stdout
    assert f"`rm {memory_file(name, login.env)}` clears the list" in shown.stdout
    run = login.submit_listeners(*args, num_ranks=4)
    job = login.cluster.job(login.job_id(run))
    assert (job["NumNodes"], job["ExcNodeList"]) == ("3", bad)
    assert [host for _, host in agents_of(run)][::2] == login.cluster.hosts[1:3]
    assert "#SBATCH --no-kill\n" in run.script_file.read_text()
    assert login.status(run)["num_nodes"] == 2
    # The job now needs all four hosts, so it uses the one that failed.
    args += ["--nodes", "3", *settings("train.global_batch_size=null")]
    full = login.trainkit("check", str(login.config), *args)
    assert f"exclude: not {bad}, " in full.stdout
    memory_file(name, login.env).unlink()
    forgotten = login.trainkit("check", str(login.config), *args)
    assert (forgotten.returncode, "exclude:" in forgotten.stdout) == (0, False)


def test_a_host_that_fails_a_check_is_given_up_and_left_out_from_then_on(login):
    small = "/var/tmp/small"  # each host has a separate /var/tmp
    mount = ["sh", "-c", f"mkdir {small} && mount -t tmpfs -o size=8m tmpfs {small}"]
    with changed_host(login, 2, mount, ["sh", "-c", f"umount --lazy {small} && rmdir {small}"]):
        values = settings("resources.spare_nodes=1", f"launch.env.TMPDIR={small}")
        run = login.submit("--nodes", "2", "--per", "node", *values, "--", "python", "listens.py")
        for rank in range(2):
            login.wait_for_log(run, f"attempt 2 rank {rank}", rank, attempt=2)
    first, second, third = login.cluster.hosts[:3]
    end = login.wait_for_end(run)
    assert end["action"] == "restart"
    verdict = end["verdict"]
    assert (verdict["type"], verdict["host"]) == ("PreflightFailed", second)
    assert verdict["message"].startswith(f"{small} on {second} has only 8.0 MiB ")
    assert log_of(run, rank=1) == ""  # rank 1 of attempt 1 was never started
    assert [host for _, host in agents_of(run, attempt=2)] == [first, third]
    assert list(excluded(login.cluster.name, environ=login.env)) == [second]
    again = login.trainkit("check", str(login.config))
    assert f"exclude: {second}: {verdict['message']} ({run.path.name}, attempt 1, " in again.stdout
