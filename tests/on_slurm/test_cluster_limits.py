"""Tests `check`, `submit` and `init` on a real cluster: their facts about it, and Slurm's answer."""

from pathlib import Path

import pytest

from tests.on_slurm.login import Login, settings
from tests.support.torch_builds import make_torch
from trainkit.cluster.discovery import NODES_ARGV, PARTITIONS_ARGV, parse_assoc_mgr, parse_nodes

QUICKSTART = str(Path(__file__).resolve().parents[2] / "configs/quickstart.yaml")


@pytest.fixture
def cuda(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return variables with which a torch for CUDA is found.

    A torch for CPUs is refused on nodes with GPUs.
    """
    package = make_torch(tmp_path_factory.mktemp("site"), "2.13.0+cu130", "13.0")
    return {"PYTHONPATH": str(package.parent)}


def profile_of(login: Login) -> Path:
    return login.folder / ".config" / "trainkit" / "clusters" / f"{login.cluster.name}.yaml"


def problems(login: Login, *args: str) -> list[str]:
    """Return the problems that `submit` reports, as lines.

    Check that `check` reports the same and that no file is written.
    """
    before = sorted(login.folder.rglob("*"))
    said = [login.trainkit(command, QUICKSTART, *args) for command in ("submit", "check")]
    assert [done.returncode for done in said] == [2, 2], said[0].stdout + said[0].stderr
    assert said[0].stderr == said[1].stderr
    assert sorted(login.folder.rglob("*")) == before
    assert login.jobs() == []
    return [line for line in said[0].stderr.removeprefix("error: ").splitlines() if not line.startswith("  ")]


@pytest.mark.parametrize("has_profile", [False, True])
def test_what_slurm_and_the_profile_of_the_cluster_say(login, cuda, has_profile):
    """Slurm accepts jobs that it never starts. A node that is drained now is no problem of the config."""
    if has_profile:
        assert login.trainkit("init").returncode == 0
    name = login.cluster.name
    args = ["--partition", "debug", "--nodes", "2", "--time", "00:10:00", "--account", "reserch"]
    assert problems(login, *args, "--set", "device=cpu") == [
        "3 problems",
        "",
        f"--account reserch: resources.account: is reserch, but you have no such account on {name}",
        "--time 00:10:00: resources.time: is 00:10:00, but partition debug allows at most 00:05:00",
        "--nodes 2: resources.nodes: is 2, but a job in partition debug can have at most 1 node",
    ]
    options = ["--partition=debug", "--time=10", "--nodes=1", "--test-only", "--wrap=true"]
    assert login.run(["sbatch", *options]).returncode == 0  # sbatch itself accepts these options

    done = login.trainkit("submit", QUICKSTART, "--set", "resources.time=null", "--dry-run", env=cuda)
    assert done.returncode == 0, done.stderr
    asked = {"--gpus-per-node=4", "--ntasks-per-node=4", "--cpus-per-task=2", "--signal=USR2@120"}
    assert asked <= {line.removeprefix("#SBATCH ") for line in done.stdout.splitlines()}
    assert "#SBATCH --time" not in done.stdout
    source = f"{profile_of(login).relative_to(login.folder)}, because ClusterName is"
    assert (source if has_profile else "no profile found") in done.stderr

    host = login.cluster.hosts[0]
    login.run(["scontrol", "update", f"nodename={host}", "state=drain", "reason=test"], check=True)
    done = login.trainkit("check", QUICKSTART, *args[:2], "--time", "5", "--set", "device=cpu")
    assert done.returncode == 0, done.stderr
    assert "node configuration" in done.stdout


def test_what_slurm_would_not_take(login, cuda):
    args = ["check", QUICKSTART, "--set", "resources.reservation=nope"]
    done = login.trainkit(*args, env=cuda)
    assert done.returncode == 2
    assert "reservation" in done.stderr.splitlines()[0]
    assert login.trainkit(*args, "--no-estimate", env=cuda).returncode == 0


def test_init(login, cuda):
    done = login.trainkit("init")
    assert done.returncode == 0, done.stderr
    profile = profile_of(login)
    assert done.stdout.splitlines() == [str(profile), "first-run.yaml"]
    text = profile.read_text()
    assert "  low:\n    default: true\n" in text
    assert "  research: {default: true" in text
    assert login.trainkit("check", "first-run.yaml", env=cuda).returncode == 0
    assert "first-run.yaml (" in login.trainkit("check", env=cuda).stderr
    # A second `init` keeps the existing files.
    first_run = (login.folder / "first-run.yaml").read_text()
    done = login.trainkit("init")
    assert done.returncode == 2
    assert str(profile) in done.stderr
    assert (login.folder / "first-run.yaml").read_text() == first_run


def test_the_first_run_completes_without_its_gpus(login):
    assert login.trainkit("init").returncode == 0
    short = ("train.steps=2", "train.eval_every=null", "device=cpu", "model.preset=nano", "data.seq_len=32")
    small = ("resources.gpus_per_node=1", "train.global_batch_size=null")
    run = login.finish(login.submit(*settings(*short, *small), config=login.folder / "first-run.yaml"))
    assert login.cluster.job(login.job_id(run))["Partition"] == "low"


def test_an_ordinary_user_gets_the_same_answers(login):
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    assert login.run([*nobody, *PARTITIONS_ARGV], check=True).stdout == login.run(PARTITIONS_ARGV).stdout
    kinds = parse_nodes(login.run([*nobody, *NODES_ARGV], check=True).stdout)
    assert kinds == parse_nodes(login.run(NODES_ARGV).stdout) != {}
    assert "ClusterName" in login.run([*nobody, "scontrol", "show", "config"], check=True).stdout
    argv = ["scontrol", "--oneliner", "show", "assoc_mgr", "users=root", "flags=assoc,qos"]
    accounts, qos = parse_assoc_mgr(login.run([*nobody, *argv], check=True).stdout, "root")
    assert {item.name for item in accounts} >= {"research", "teaching"}
    assert [item.name for item in accounts if item.is_default] == ["research"]
    assert {item.parents for item in accounts if item.name != "root"} == {("root",)}
    assert ("short", 600) in [(item.name, item.max_time_s) for item in qos]
