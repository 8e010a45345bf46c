"""Makes runs that really fail on several hosts of a Slurm cluster, each for a different reason.

`python -m tests.on_slurm.broken_runs [NAME…]` makes runs, all of them without NAME, and prints the result of
`trainkit diagnose` for each next to the true cause. `--record` also writes their folders to
tests/capabilities/diagnose/broken_runs, without the names of the cluster and of this machine. `--keep DIR`
keeps the runs.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.on_slurm import broken_hosts, broken_ranks  # noqa: F401, they fill BROKEN
from tests.on_slurm.broken_cases import BROKEN
from tests.on_slurm.login import Login
from tests.support import broken_runs
from tools.slurm_cluster.cluster import Cluster, running
from trainkit.backends.jobs import query_jobs_or_warn, read_job_status
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.slurm.jobs import SlurmJob


def diagnosed(login: Login, run: RunDir, attempt: int) -> dict[str, Any]:
    """Return the diagnosis of an attempt by `trainkit diagnose`."""
    done = login.trainkit("diagnose", str(run.path), "--attempt", str(attempt), "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def neutral(text: str, cluster: Cluster, folder: str) -> str:
    """Return a text without the names of the cluster and of this machine."""
    text = broken_runs.neutral(text, folder)
    text = re.sub(rf"\b{cluster.name}-node(\d)", r"node0\1", text)
    text = text.replace(cluster.address(1).removesuffix(".1") + ".", "10.0.0.")
    return re.sub(rf"\b{cluster.name}\b", "cluster", text)


def slurm_job(login: Login, attempt: AttemptDir) -> SlurmJob | None:
    """Return Slurm's view of the job of an attempt, as the command sees it."""
    before = dict(os.environ)
    os.environ.update(login.cluster.variables)
    try:
        is_newest = attempt.number == attempt.run.attempt_numbers()[-1]
        if not is_newest:
            return None
        return read_job_status(attempt.run, lambda ids: query_jobs_or_warn(ids, print))[1].job
    finally:
        os.environ.clear()
        os.environ.update(before)


def write_recorded(name: str, login: Login, run: RunDir, found: dict[str, Any]) -> None:
    """Write a run with its true cause as one YAML file."""
    truth, cluster = BROKEN[name], login.cluster
    expect: dict[str, Any] = {"name": truth.name, "confidence": found["confidence"]}
    expect |= {} if truth.host is None else {"rank": truth.rank, "host": f"node0{truth.host}"}
    content: dict[str, Any] = {
        "about": f"Recorded by tests/on_slurm/broken_runs.py. {truth.about}".strip(),
        "expect": expect,
    }
    job = slurm_job(login, run.attempt(1))
    if job is not None:
        content["slurm"] = {"job_id": job.job_id, "state": job.state.value, "slurm_state": job.slurm_state}
        content["slurm"] |= {"reason": job.reason} if job.reason else {}
        content["slurm"] |= {"exit_code": job.exit_code} if job.exit_code else {}
        content["slurm"] |= {"exit_signal": job.exit_signal} if job.exit_signal else {}
    files = broken_runs.recorded_files(run.path, lambda text: neutral(text, cluster, str(login.folder)))
    own = "attempts/001/"
    content["files"] = {path: text for path, text in files.items() if path.startswith((own, "events"))}
    broken_runs.write(name, content)


def make(name: str, cluster: Cluster, folder: Path) -> tuple[Login, RunDir]:
    """Make one run below a folder, and wait for its end."""
    login = Login(cluster, folder)
    return login, BROKEN[name].make(login)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *BROKEN])
    parser.add_argument(
        "--record", action="store_true", help="write them to tests/capabilities/diagnose/broken_runs"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in this folder")
    options = parser.parse_args(argv)
    keep = options.keep or Path(tempfile.mkdtemp(prefix="broken-runs-"))
    chosen = options.names or list(BROKEN)
    wrong = 0
    for with_cgroups in (False, True):
        names = [name for name in chosen if BROKEN[name].cgroups == with_cgroups]
        if not names:
            continue
        with running(num_hosts=2 if with_cgroups else 4, with_cgroups=with_cgroups) as cluster:
            for name in names:
                wrong += not _run_one(name, cluster, keep / name, options.record)
                cluster.restore()
    if options.keep is None:
        shutil.rmtree(keep)
    print(f"{len(chosen) - wrong} of {len(chosen)} right")
    return 0


def _run_one(name: str, cluster: Cluster, folder: Path, record: bool) -> bool:
    truth = BROKEN[name]
    folder.mkdir(parents=True)
    began = time.monotonic()
    try:
        login, run = make(name, cluster, folder)
        found = diagnosed(login, run, 1)
    except Exception as error:
        print(f"{name}: not made: {type(error).__name__}: {str(error)[-3000:]}", flush=True)
        return False
    right = truth.is_right(found, cluster.hosts)
    if record:
        write_recorded(name, login, run, found)
    shown = {key: found[key] for key in ("name", "rank", "host", "state", "confidence")}
    wanted = (truth.name, truth.rank, truth.host)
    print(
        f"{name}: {'right' if right else 'WRONG'} after {time.monotonic() - began:.0f} s; wanted {wanted}",
        flush=True,
    )
    print(f"    {shown}\n    {found['cause'][:300]}", flush=True)
    if not right:
        print(f"    Slurm: {slurm_job(login, run.attempt(1))}")
    return right


if __name__ == "__main__":
    sys.exit(main())
