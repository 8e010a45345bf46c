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

# The source of the row | Gres of a node | the GPUs that `init` writes
GRES = """
slurm docs            | gpu                                          | 1
slurm docs            | gpu:4(S:0-1)                                 | 4
slurm docs            | gpu:2,shard:64                               | 2
slurm docs            | gpu:2,mps:200                                | 2
slurm docs            | gpu:tesla:1,gpu:kepler:1,bandwidth:lustre:no_consume:4G | tesla: 1, kepler: 1
slurm docs            | gpu:tesla:2,gpu:kepler:2,mps:400,bandwidth:lustre:no_consume:4G | tesla: 2, kepler: 2
slurm testsuite       | gpu:a100:1,gpu:a100_3g.20gb:2                | a100: 1, a100_3g.20gb: 2
ReFrame               | gpu_mem:16280,gpu:1                          | 1
SkyPilot              | gpu:8                                        | 8
SkyPilot              | gpu:H100:8                                   | H100: 8
SkyPilot              | (null)                                       |
SkyPilot              | N/A                                          |
clusterscope          | gpu:a100:2(S:0-1)(mem:40960M)                | a100: 2
a benchmark installer | gpu:a100_3g.20gb:2                           | a100_3g.20gb: 2
a workflow manager    | gpu:2K(S:0-2023)                             | 2048
a workflow manager    | gpu:p100:2(S:0-1),gpu:v100:2(S:0-1)          | p100: 2, v100: 2
a metrics exporter    | gpu:(null):3(IDX:0-7)                        | 3
a metrics exporter    | gpu:a40:0(IDX:N/A)                           |
a job launcher        | gpu:modelA:6(S:0-1),gpu:1g.10gb:28(S:0-1)    | modelA: 6, 1g.10gb: 28
a job launcher        | other:nameA:2,gpu:modelA:3,other:nameB:2     | modelA: 3
a job launcher        | gpu:brand_model-pcie.10:2(S:0-1)             | brand_model-pcie.10: 2
a node monitor        | gpu:v100:4(S:0-1),min-vram:no_consume:32G    | v100: 4
a biomedical site     | gpu:a100:4(S:0-3),lscratch:3200              | a100: 4
a university          | gpu:V100-PCIE-32GB:2(S:0-1),shard:V100-PCIE-32GB:40(S:0-1) | V100-PCIE-32GB: 2
a state's site        | pfsdir:scratch:1,pfsdir:ess:1,ime:1,gpfs:project:1 |
others                | nvme:1,gpu:v100:4                            | v100: 4
others                | gpu:no_consume:4,craynetwork:4               | 4
others                | craynetwork:4,gpu:a100:no_consume:4(S:0,1)   | a100: 4
others                | gpu:1080ti:4,gpu_mem:11178                   | 1080ti: 4
others                | gpu:a100:2(S:0),gpu:a100:2(S:1),gpu:1        | a100: 4, '': 1
others                | fpgagpu:3,mps:gpu:400                        |
others                | gpu:a100:4,gpu:h100:0                        | a100: 4
"""
NODES = [{"count": 4, "cpus": 64, "memory": "500G", "gpus": {"a100": 8}, "features": ["ib", "gpu"]}]
ROWS = [[cell.strip() for cell in line.split("|")] for line in GRES.strip().splitlines()]
FULL = (
    "AllocNodes=ALL QoS=N/A DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 LLN=NO NodeSets=ns1 "
    "MaxCPUsPerSocket=UNLIMITED PriorityJobFactor=1 PriorityTier=2 OverSubscribe=NO OverTimeLimit=NONE "
    "PreemptMode=OFF SelectTypeParameters=NONE JobDefaults=DefMemPerGPU=29440 "
    "TRES=cpu=64,mem=250G,node=1,gres/gpu=4 TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=9.0"
)
# The fields of a partition | the profile that `init` writes | options, and the answer of `check`
PARTITIONS = """
Default=YES MaxTime=6-00:00:00 DefaultTime=01:00:00 MaxNodes=1 MinNodes=0 MaxMemPerNode=UNLIMITED State=UP
    default: true, max_time: '6-00:00:00', default_time: '01:00:00', max_nodes: 1
    --time 7-0: resources.time is 7-00:00:00, but partition p0 allows at most 6-00:00:00
    --nodes 2: resources.nodes is 2, but a job in partition p0 can have at most 1 node
MaxTime=UNLIMITED DefaultTime=NONE MaxNodes=UNLIMITED MaxCPUsPerNode=UNLIMITED MaxMemPerCPU=UNLIMITED State=UP
    max_time: null
    --time 30-0:
MaxTime=INFINITE DefaultTime=UNLIMITED DenyAccounts=none DenyQos=none AllowGroups=ALL State=UP
    max_time: null, denied_qos: [none], denied_accounts: [none]
    --account none: resources.account is none, which partition p2 does not accept
MaxTime=365-00:00:00 DefaultTime=00:05:00 MinNodes=2 MaxNodes=4 State=UP
    max_time: '365-00:00:00', default_time: '00:05:00', min_nodes: 2, max_nodes: 4
    --nodes 1: resources.nodes is 1, but a job in partition p3 needs at least 2 nodes
    --nodes 2:
MaxTime=00:15:00 DefMemPerCPU=920 MaxMemPerCPU=1840 Nodes=nid[001008-001011,001020-001023]-ib State=UP
    max_time: '00:15:00', max_memory_per_cpu: 1840M
    --time 20: resources.time is 00:20:00, but partition p4 allows at most 00:15:00
    --time 15 --set resources.mem=1T: resources.mem is 1T, but a job in partition p4 can use at most 115G
MaxTime=UNLIMITED MaxMemPerNode=64000 MaxCPUsPerNode=24 OverSubscribe=FORCE:1 State=UP
    max_time: null, max_cpus_per_node: 24, max_memory_per_node: 64000M
    --set resources.mem=63GB: resources.mem is 63G, but a job in partition p5 can use at most 64000M
    --set resources.mem=62.5GB:
MaxTime=UNLIMITED Hidden=YES State=UP
    hidden: true, max_time: null
    :
MaxTime=UNLIMITED AllowGroups=admins,otherlab AllowAccounts=priority AllowQos=normal,scavenge State=UP
    max_time: null, qos: [normal, scavenge], accounts: [priority], groups: [admins, otherlab]
    : resources.partition is p7, which only members of admins or otherlab may use
    --account pi_lab01: resources.account is pi_lab01, which partition p7 does not accept
    --qos long: resources.qos is long, which partition p7 does not accept
MaxTime=UNLIMITED RootOnly=YES State=UP
    max_time: null, groups: [root]
    : resources.partition is p8, which only members of root may use
MaxTime=UNLIMITED ReqResv=YES State=UP
    max_time: null, needs_reservation: true
    : resources.reservation is not set, but partition p9 accepts only jobs with a reservation
    --set resources.reservation=course:
MaxTime=UNLIMITED State=DRAIN
    max_time: null
    :
"""


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
    """Return the problems with resources that `check` reports."""
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
