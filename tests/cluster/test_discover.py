"""What a cluster offers, from what its commands print."""

from __future__ import annotations

import pytest

from tests.support.fake_slurm import FakeSlurm
from trainkit.cluster.discovery import (
    Association,
    ClusterFacts,
    NodeType,
    cluster_facts,
    has_slurm,
    parse_associations,
    parse_gpus,
    parse_node_types,
    parse_partitions,
    parse_usable,
    with_usable,
)
from trainkit.slurm.client import FIELD, RECORD

PARTITIONS = """\
PartitionName=cpu AllowGroups=staff,hpc AllowAccounts=a,b AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A \
DefaultTime=NONE DisableRootJobs=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 \
Nodes=c[1-2] PreemptMode=OFF State=DOWN TotalCPUs=64 TotalNodes=2
PartitionName=gpu AllowGroups=ALL DenyAccounts=guest AllowQos=normal,long AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=01:00:00 GraceTime=30 MaxNodes=16 MaxTime=2-00:00:00 Nodes=g[1-3] PreemptMode=REQUEUE State=UP \
TotalCPUs=384 TotalNodes=3 TRES=cpu=384,mem=3T,node=3,gres/gpu=24
"""
CONFIG = """\
AccountingStorageType   = {storage}
ClusterName             = west
JobRequeue              = 1
MaxArraySize            = 2001
SLURM_VERSION           = 23.11.4
"""


def node_line(*fields: str) -> str:
    return FIELD.join(fields) + f"{RECORD}\n"


NODES = (
    node_line("cpu", "2", "32", "128000", "idle", "c[1-2]", "(null)", "(null)")
    + node_line("gpu", "1", "128", "1000000", "mixed", "g1", "gpu:h100:8(S:0-1)", "ib,h100")
    + node_line("gpu", "1", "128", "1000000", "drained*", "g3", "gpu:h100:8(S:0-1)", "ib,h100")
    + node_line("gpu", "1", "64+", "500000", "idle", "g2", "gpu:a100:2,gpu:a100:2,nvme:1", "ib")
)


def prints(fake: FakeSlurm, program: str, text: str, when: str = "") -> str:
    """Shell that prints this, under a condition."""
    (fake.folder / f"{program}{abs(hash(when))}").write_text(text)
    return f'{when} /bin/cat "$here/{program}{abs(hash(when))}"\n'


def discovered(
    fake: FakeSlurm, storage: str = "accounting_storage/slurmdbd", sacctmgr: str = ""
) -> ClusterFacts:
    fake.add(
        "scontrol",
        prints(fake, "scontrol", CONFIG.format(storage=storage), '[ "$2" = config ] &&')
        + prints(fake, "scontrol", PARTITIONS, '[ "$2" = partition ] &&')
        + "exit 0",
    )
    fake.add("sinfo", prints(fake, "sinfo", NODES))
    fake.add("sacctmgr", sacctmgr or prints(fake, "sacctmgr", "a|a||normal,long|normal\na|b|gpu|normal|\n"))
    fake.add("srun", "echo '      --container-image=[USER@][REGISTRY#]IMAGE   [pyxis] the image'")
    return cluster_facts(fake.environ, user="me")


def test_facts(fake: FakeSlurm) -> None:
    fake.add("apptainer")
    fake.add("enroot")
    facts = discovered(fake)
    assert (facts.name, facts.version, facts.max_array_size) == ("west", (23, 11, 4), 2001)
    assert facts.requeues_by_default
    assert [partition.name for partition in facts.partitions] == ["gpu", "cpu"]
    assert facts.partition(None) is facts.partition("gpu") is facts.partitions[0]
    assert facts.partition("nope") is None
    assert (facts.has_pyxis, facts.containers) == (True, ("apptainer", "enroot"))
    assert facts.associations == (
        Association("a", True, "", ("normal", "long"), "normal"),
        Association("b", False, "gpu", ("normal",), ""),
    )


def test_few_calls(fake: FakeSlurm) -> None:
    discovered(fake)
    assert sorted(fake.programs) == ["sacctmgr", "scontrol", "scontrol", "scontrol", "sinfo", "srun"]
    assert "name=me" in next(call for call in fake.calls if call[0] == "sacctmgr")


def test_partitions() -> None:
    cpu, gpu = parse_partitions(PARTITIONS, parse_node_types(NODES))
    assert (cpu.is_default, cpu.is_up, cpu.max_time_s, cpu.default_time_s, cpu.max_nodes) == (
        *(False, False, None, None, None),
    )
    assert (cpu.allowed_accounts, cpu.allowed_groups, cpu.allowed_qos) == (("a", "b"), ("staff", "hpc"), None)
    assert (gpu.is_default, gpu.is_up, gpu.max_time_s, gpu.default_time_s, gpu.max_nodes) == (
        *(True, True, 172800, 3600, 16),
    )
    assert (gpu.allowed_accounts, gpu.denied_accounts, gpu.allowed_qos) == (
        None,
        ("guest",),
        ("normal", "long"),
    )
    assert (gpu.preempt_mode, gpu.grace_s, gpu.num_nodes) == ("REQUEUE", 30, 3)
    assert (cpu.max_gpus_per_node, gpu.max_gpus_per_node) == (0, 8)


def test_nodes_that_are_alike_are_counted_together() -> None:
    types = parse_node_types(NODES)
    assert types["cpu"] == (NodeType(2, 2, 32, 128000, {}, (), "c[1-2]"),)
    assert types["gpu"] == (
        NodeType(2, 1, 128, 1000000, {"h100": 8}, ("ib", "h100"), "g1,g3"),
        NodeType(1, 1, 64, 500000, {"a100": 4}, ("ib",), "g2"),
    )


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:4(S:0,1),gpu:h100:2(S:1)", {"a100": 4, "h100": 2}),
        ("gpu:nvidia_a100_3g.20gb:2", {"nvidia_a100_3g.20gb": 2}),
        ("gpu:a100:no_consume:4", {"a100": 4}),
        ("nvme:2,gpu:1,shard:a:16", {"": 1}),
        ("fpgagpu:3,mps:gpu:400", {}),
    ],
)
def test_gpus(gres: str, gpus: dict[str, int]) -> None:
    assert parse_gpus(gres) == gpus


def test_associations_of_nobody() -> None:
    assert parse_associations("") == ()


@pytest.mark.parametrize(
    ("storage", "sacctmgr"),
    [("(null)", ""), ("accounting_storage/none", ""), ("accounting_storage/slurmdbd", "echo no >&2; exit 1")],
)
def test_no_accounting(fake: FakeSlurm, storage: str, sacctmgr: str) -> None:
    facts = discovered(fake, storage, sacctmgr)
    assert facts.associations is None
    assert ("sacctmgr" in fake.programs) == bool(sacctmgr)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (None, False),
        ("echo slurm 22.05.8", True),
        (
            "echo 'sbatch: error: fetch_config: DNS SRV lookup failed' >&2;"
            "echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1",
            False,
        ),
        ("echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1", True),
    ],
)
def test_has_slurm(fake: FakeSlurm, body: str | None, answer: bool) -> None:
    if body is not None:
        fake.add("sbatch", body)
    assert has_slurm(fake.environ) is answer


USABLE = """\
NodeName=c1 CPUAlloc=0 CPUEfctv=30 CPUTot=32 RealMemory=128000 AllocMem=0 MemSpecLimit=8000 OS=Linux
NodeName=g1 CPUAlloc=0 CPUTot=128 RealMemory=1000000 AllocMem=0 State=IDLE
NodeName=g2 CPUEfctv=64 CPUTot=64 CoreSpecCount=4 ThreadsPerCore=2 RealMemory=500000
NodeName=down CPUTot=0 RealMemory=1
"""


def test_what_jobs_can_have_of_a_node() -> None:
    assert parse_usable(USABLE) == {"c1": (30, 120000), "g1": (128, 1000000), "g2": (56, 500000)}


def test_one_node_of_each_kind_is_asked_what_jobs_can_have(fake: FakeSlurm) -> None:
    fake.add("scontrol", prints(fake, "scontrol", USABLE))
    types = with_usable(parse_node_types(NODES), fake.environ, 10)
    assert [call[-1] for call in fake.calls] == ["c1,g1,g2"]
    assert [(kind.cpus, kind.memory_mib) for kind in types["cpu"]] == [(30, 120000)]
    assert [(kind.cpus, kind.memory_mib) for kind in types["gpu"]] == [(128, 1000000), (56, 500000)]


def test_where_it_is_not_said_everything_can_be_had(fake: FakeSlurm) -> None:
    fake.add("scontrol", "exit 1")
    types = parse_node_types(NODES)
    assert with_usable(types, fake.environ, 10) == types
    assert with_usable({}, fake.environ, 10) == {}
    assert len(fake.calls) == 1
