"""Tests `check`, `submit` and `init` on a real cluster: their facts about it, and Slurm's answer."""

import json
from pathlib import Path

import pytest

from tests.on_slurm.login import Login
from tests.support.tables import messages
from tests.support.torch_builds import make_torch
from tools.slurm_cluster.config_files import MEM_MB
from trainkit.cluster.discovery import NODES_ARGV, PARTITIONS_ARGV, parse_assoc_mgr, parse_nodes
from trainkit.run.rundir import RunDir

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


@pytest.fixture(params=["asked", "profile"])
def knowing(request: pytest.FixtureRequest, login: Login) -> Login:
    """Provide the cluster as Slurm describes it for each query, and as its profile does."""
    if request.param == "profile":
        done = login.trainkit("init")
        assert done.returncode == 0, done.stderr
    return login


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


def test_everything_that_slurm_takes_and_never_starts(knowing):
    args = ["--partition", "debug", "--nodes", "2", "--time", "00:10:00", "--set", "device=cpu"]
    assert problems(knowing, *args) == [
        "2 problems",
        "",
        "--time 00:10:00: resources.time: is 00:10:00, but partition debug allows at most 00:05:00",
        "--nodes 2: resources.nodes: is 2, but a job in partition debug can have at most 1 node",
    ]
    options = ["--partition=debug", "--time=10", "--nodes=1", "--test-only", "--wrap=true"]
    assert knowing.run(["sbatch", *options]).returncode == 0  # sbatch itself accepts these options


ONE_THING_TOO_MUCH = """
--account reserch
    --account reserch: resources.account: is reserch, but you have no such account on {name}
    hint: did you mean research? your accounts: root, research and teaching
--qos shrt
    --qos shrt: resources.qos: is shrt, but {name} has no such QOS
    hint: did you mean short? {name} has normal and short
--set resources.gpu_type=h10
    --set resources.gpu_type=h10: resources.gpu_type: is h10, but no node of partition low has such a GPU
    hint: did you mean h100? they have h100
--set resources.cpus_per_gpu=3
    --set resources.cpus_per_gpu=3: resources.cpus_per_gpu: is 3: 4 x 3 = 12 CPUs per node, but the nodes of
    partition low have 8
--constraint rakc1
    --constraint rakc1: resources.constraint: contains rakc1, but no node of partition low has this feature
    hint: did you mean rack1? they have rack1 and rack2
"""


def test_one_thing_too_much(login):
    for typed, message in messages(ONE_THING_TOO_MUCH):
        done = login.trainkit("submit", QUICKSTART, *typed.split())
        said = done.stderr.replace("\n\nhint: ", "\n  hint: ")
        wanted = message.format(name=login.cluster.name, mem=MEM_MB)
        assert (done.returncode, said.startswith(f"error: {wanted}")) == (2, True), said
    assert not (login.folder / "runs").exists()


def test_a_node_is_taken_as_it_is_and_the_time_that_the_partition_gives(knowing, cuda):
    done = knowing.trainkit("submit", QUICKSTART, "--set", "resources.time=null", "--dry-run", env=cuda)
    assert done.returncode == 0, done.stderr
    asked = {"--gpus-per-node=4", "--ntasks-per-node=4", "--cpus-per-task=2", "--signal=USR2@120"}
    assert asked <= {line.removeprefix("#SBATCH ") for line in done.stdout.splitlines()}
    assert "#SBATCH --time" not in done.stdout
    assert "00:10:00: resources.time is null" in done.stderr
    assert "low have 4 GPUs" in done.stderr
    profile = profile_of(knowing)
    source = f"{profile.relative_to(knowing.folder)}, because ClusterName is"
    assert (source if profile.exists() else "no profile found") in done.stderr


def test_what_slurm_would_not_take(login, cuda):
    args = ["check", QUICKSTART, "--set", "resources.reservation=nope"]
    done = login.trainkit(*args, env=cuda)
    assert done.returncode == 2
    assert "reservation" in done.stderr.splitlines()[0]
    assert login.trainkit(*args, "--no-estimate", env=cuda).returncode == 0


def test_nodes_out_of_service_are_no_problem_of_the_config(knowing):
    name = knowing.cluster.hosts[0]
    knowing.run(["scontrol", "update", f"nodename={name}", "state=drain", "reason=test"], check=True)
    args = ["--partition", "debug", "--time", "5", "--set", "device=cpu"]
    done = knowing.trainkit("check", QUICKSTART, *args)
    assert done.returncode == 0, done.stderr
    assert "node configuration is not" in done.stdout


def test_init(login, cuda):
    done = login.trainkit("init")
    assert done.returncode == 0, done.stderr
    profile = profile_of(login)
    assert done.stdout.splitlines() == [str(profile), "first-run.yaml"]
    assert f"{login.cluster.name}, Slurm " in done.stderr
    text = profile.read_text()
    assert "  low:\n    default: true\n" in text
    assert "  research: {default: true" in text
    assert login.trainkit("check", "first-run.yaml", env=cuda).returncode == 0
    assert "config: first-run.yaml (" in login.trainkit("check", env=cuda).stderr
    # A second `init` keeps the existing file.
    first_run = (login.folder / "first-run.yaml").read_text()
    done = login.trainkit("init")
    assert done.returncode == 2
    assert f"kept the existing file {profile}\n" in done.stderr
    assert done.stderr.endswith(" with --cluster NAME and --dir DIR\n")
    done = login.trainkit("init", "--dir", "other")
    assert done.returncode == 0
    assert done.stdout.split() == ["other/first-run.yaml"]
    done = login.trainkit("init", "--cluster", "mine", "--dir", "third", "--json")
    assert [Path(path).name for path in json.loads(done.stdout)["written"]] == ["mine.yaml", "first-run.yaml"]
    assert (login.folder / "first-run.yaml").read_text() == first_run


def test_the_first_run_completes_without_its_gpus(login):
    assert login.trainkit("init").returncode == 0
    short = ("train.steps=2", "train.eval_every=null", "device=cpu", "model.preset=nano", "data.seq_len=32")
    options = [word for pair in short for word in ("--set", pair)]
    done = login.trainkit("submit", "first-run.yaml", "--json", *options)
    assert done.returncode == 0, done.stderr
    run = RunDir(json.loads(done.stdout)["run_dir"])
    login.finish(run)
    assert login.cluster.job(login.job_id(run))["Partition"] == "low"


def test_without_accounting(cluster_without_accounting, tmp_path, cuda):
    login = Login(cluster_without_accounting, tmp_path)
    done = login.trainkit("init")
    assert done.returncode == 0, done.stderr
    assert "# Accounts are not" in profile_of(login).read_text()
    args = ["--account", "any", "--qos", "any", "--no-estimate"]
    assert login.trainkit("check", "first-run.yaml", *args, env=cuda).returncode == 0
    assert problems(login, "--partition", "hgih")


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
