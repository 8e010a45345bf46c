"""Tests nodes and partitions of real sites and other programs' tests with init, check and a dry run.

They are partitions of one cluster, whose profile `init` writes once.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.fake_slurm import FakeSlurm
from trainkit.cli.main import main

GRES, PARTITIONS = Path(__file__).with_name("sites.txt").read_text().split("\n\n")
"""
GRES: the source of a row | Gres of a node | the GPUs that `init` writes.
PARTITIONS: the fields of a partition; the profile that `init` writes; options, and the answer of `check`.
"""
NODES = [{"count": 4, "cpus": 64, "memory": "500G", "gpus": {"a100": 8}, "features": ["ib", "gpu"]}]
ROWS = [[cell.strip() for cell in line.split("|")] for line in GRES.strip().splitlines()]
FULL = (
    "AllocNodes=ALL QoS=N/A DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 LLN=NO NodeSets=ns1 "
    "MaxCPUsPerSocket=UNLIMITED PriorityJobFactor=1 PriorityTier=2 OverTimeLimit=NONE "
    "PreemptMode=OFF SelectTypeParameters=NONE JobDefaults=DefMemPerGPU=29440 "
    "TRES=cpu=64,mem=250G,node=1,gres/gpu=4 TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=9.0"
)


def table() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return the fields of each partition, the written profile, and the answer to each option."""
    found: list[tuple[str, str, list[tuple[str, str]]]] = []
    for line in PARTITIONS.strip().splitlines():
        if not line.startswith(" "):
            found.append((line, "", []))
        elif not found[-1][1]:
            found[-1] = (found[-1][0], line.strip(), [])
        else:
            options, _, said = line.strip().partition(":" if line.strip() == ":" else ": ")
            found[-1][2].append((options.rstrip(":"), said.strip()))
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a folder on a cluster with a partition per row, and the partitions that `init` has written."""
    fake = FakeSlurm(tmp_path_factory.mktemp("slurm"))
    (fake.folder / "config").write_text(
        "ClusterName = peers\nSelectType = select/cons_tres\nSLURM_VERSION = 22.05.8\n"
        "AccountingStorageType = (null)\nAccountingStorageEnforce = none\n"
    )
    node = (
        "NodeName={0}n1 CPUAlloc=0 CPUEfctv={1} CPUTot={1} CPULoad=0.01 AvailableFeatures=ib,gpu "
        "ActiveFeatures=ib Gres={2} NodeAddr={0}n1 OS=Linux 5.14 #1 SMP RealMemory=512000 Sockets=2 "
        "State=IDLE+CLOUD Partitions={0}"
    )
    gres = [(f"g{number}", row[1]) for number, row in enumerate(ROWS)]
    rows = [(f"p{number}", fields) for number, (fields, *_) in enumerate(table())]
    (fake.folder / "node").write_text(
        "".join(f"{node.format(name, 4096, text)} \n" for name, text in gres)
        + "".join(f"{node.format(name, 64, 'gpu:a100:8(S:0-1)')} \n" * 4 for name, _ in rows)
    )
    (fake.folder / "partition").write_text(
        "".join(f"PartitionName={name} {FULL} MaxTime=1-00:00:00 State=UP\n" for name, _ in gres)
        + "".join(f"PartitionName={name} {FULL} {fields}\n" for name, fields in rows)
    )
    fake.add("scontrol", '/bin/cat "$here/$2"')
    fake.add("sbatch", "echo slurm 22.05.8")
    fake.add("squeue")
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", fake.environ["PATH"])
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.chdir(folder)
        assert main(["init"]) == 0
    (folder / "bin").symlink_to(fake.environ["PATH"])
    profile = yaml.safe_load((folder / "config/trainkit/clusters/peers.yaml").read_text())
    return folder, profile["partitions"]


@pytest.fixture
def written(site: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the partitions in the profile, for a user who is neither root nor restricted by a group."""
    folder, partitions = site
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setattr("trainkit.cluster.profile.user_groups", lambda: ("users",))
    monkeypatch.chdir(folder)
    return partitions


def problems(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    main(["check", "quickstart", "--json", "--backend", "sbatch", *options])
    found = json.loads(capsys.readouterr().out).get("problems", [])
    return [f"{item['key']} {item['message']}" for item in found if item["key"].startswith("resources.")]


def gpus_of(number: int) -> dict[str, int]:
    text = ROWS[number][2]
    return {"": int(text)} if text.isdigit() else yaml.safe_load(f"{{{text}}}")


def test_gres(written):
    expected = {f"g{number}": gpus_of(number) for number in range(len(ROWS))}
    found = {name: written[name]["nodes"][0].get("gpus", {}) for name in expected}
    assert found == {
        name: gpus.get("", gpus) if set(gpus) == {""} else gpus for name, gpus in expected.items()
    }


@pytest.mark.parametrize(
    "gres",
    [
        *("gpu", "gpu:8", "gpu:H100:8", "(null)", "gpu:p100:2(S:0-1),gpu:v100:2(S:0-1)", "gpu:2K(S:0-2023)"),
        *("gpu:a100:2(S:0),gpu:a100:2(S:1),gpu:1", "gpu:a100_3g.20gb:2", "gpu:brand_model-pcie.10:2(S:0-1)"),
    ],
)
def test_gpus_that_are_checked_and_requested(gres, written, capsys):
    number = next(number for number, row in enumerate(ROWS) if row[1] == gres)
    gpus, partition = gpus_of(number), f"g{number}"
    total = sum(gpus.values())
    ask = ["--partition", partition, "--set", "device=cuda", "--gpus-per-node", str(total + 1)]
    has = f"at most {total:,} GPU{'s' * (total > 1)}" if total else "no GPUs"
    said = f"is {total + 1}, but the nodes of partition {partition} have {has}"
    assert problems(capsys, *ask) == [f"resources.gpus_per_node {said}"]

    named = next((name for name in reversed(gpus) if name), "")
    of_type = ["--set", f"resources.gpu_type={named}"] if named else []
    asks = f"{named}:{gpus[named]}" if named else total
    command = ["submit", "--dry-run", "--backend", "sbatch", "--partition", partition, *of_type]
    assert main([*command, "--", "/bin/true"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#SBATCH --gpus")]
    assert lines == ([f"#SBATCH --gpus-per-node={asks}"] if total else [])


@pytest.mark.parametrize("number", range(len(table())))
def test_partition(number, written, capsys):
    _, section, rows = table()[number]
    assert written[f"p{number}"] == {**yaml.safe_load(f"{{{section}}}"), "nodes": NODES}
    for options, said in rows:
        found = problems(capsys, "--partition", f"p{number}", *shlex.split(options))
        assert any(text.startswith(said) for text in found) if said else not found
