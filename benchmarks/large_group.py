"""Run a group of more trials than the cluster allows per array and per user, and cancel another group.

    python -m benchmarks.large_group               # 300 trials, MaxArraySize 100, 20 jobs at once
    python -m benchmarks.large_group --trials 30 --array-size 12 --jobs 8

Starts a Slurm cluster of four hosts on this machine (as root; see tools/slurm_cluster). Each trial of the
first group writes its number. Each trial must have run exactly once, in one group. The second group is
cancelled while two of its trials are running. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cluster_256 import rpcs, words
from tests.on_slurm.login import Login, wait_for
from tests.on_slurm.test_groups import status, submit
from tests.on_slurm.test_large_groups import cancelled_as_one, limit
from tools.slurm_cluster.cluster import up
from tools.slurm_cluster.processes import Pid
from trainkit.run.group import RunGroup

PATIENCE_S = 1800.0


def all_run(login: Login, num_trials: int) -> None:
    """Submit a group, and wait until every trial has run."""
    rpcs(login.cluster)
    began_s = time.monotonic()
    ran = login.folder / "ran"
    append = 'echo "$SLURM_ARRAY_TASK_ID" >> "$0"'
    group = submit(login, "--array", f"0-{num_trials - 1}", "--", "sh", "-c", append, str(ran))
    print(
        f"submitted after {time.monotonic() - began_s:.1f} s; {len(group.unsubmitted)} trials wait for room"
    )

    def is_over() -> bool:
        return not RunGroup(group.path).unsubmitted and not login.jobs()

    wait_for(is_over, f"{num_trials} trials", PATIENCE_S, poll_s=5.0)
    took_s = time.monotonic() - began_s
    parts = RunGroup(group.path).parts
    print(f"all have run after {took_s:.0f} s, as {len(parts)} arrays of one group")
    print(f"RPCs: {words(rpcs(login.cluster))}")
    numbers = sorted(map(int, ran.read_text().split()))
    assert numbers == list(range(num_trials)), numbers
    assert status(login, group)["states"] == {"finished": num_trials}


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=300, help="trials of the first group")
    parser.add_argument("--array-size", type=int, default=100, help="MaxArraySize of the cluster")
    parser.add_argument("--jobs", type=int, default=20, help="jobs that the QOS allows per user")
    args = parser.parse_args()
    cluster = up(owner=Pid.of(os.getpid()), options={"MaxArraySize": f"{args.array_size}"})
    try:
        limit(cluster, args.jobs)
        with tempfile.TemporaryDirectory() as folder:
            login = Login(cluster, Path(folder))
            all_run(login, args.trials)
            began_s = time.monotonic()
            cancelled_as_one(login, args.trials, args.jobs)
            seconds = time.monotonic() - began_s
            print(f"a second group was submitted and cancelled with one command in {seconds:.0f} s")
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        cluster.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
