"""Tests cluster profiles as files: their meaning, and every problem with its line."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.said import said
from trainkit.capabilities.init.init_files import profile_text
from trainkit.cluster.model import Account, Cluster, NodeKind, Partition, Qos
from trainkit.cluster.profile import ClusterProfile, read_profile
from trainkit.errors import ConfigError
from trainkit.folders import shipped_configs


def problems(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "west.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_profile(file, "west.yaml")
    return [problem.render() for problem in error.value.problems]


def test_every_shipped_profile_is_right():
    files = sorted((shipped_configs() / "clusters").glob("*.yaml"))
    assert files
    for file in files:
        assert file.read_text().startswith("# ")
        profile, _ = read_profile(file, file.name)
        assert profile.to_cluster().partition(None) is not None


def test_the_example_has_every_key():
    text = (shipped_configs() / "clusters" / "example.yaml").read_text()
    schema = ClusterProfile.model_json_schema()
    sections = [schema, *(item for item in schema["$defs"].values() if "properties" in item)]
    assert all(f"{key}:" in text for section in sections for key in section["properties"])


def test_what_a_profile_means(tmp_path):
    file = tmp_path / "west.yaml"
    file.write_text(
        "name: west\nslurm_version: 23.11.4\ngpu_option: gres\ncontainers: [pyxis]\nmodules: true\n"
        "accounts: {physics: {default: true, qos: [normal]}, chem: null}\n"
        "qos: {normal: null, long: {max_time: 7-0, overrides: [time]}}\n"
        "partitions:\n"
        "  gpu: {default: true, max_time: 2-00:00:00, default_time: '30', max_nodes: 4,\n"
        "    nodes: [{count: 2, cpus: 64, memory: 512G, gpus: {h100: 8}, features: [ib]}, {gpus: 2}]}\n"
        "  cpu:\n"
        "defaults: {launch: {network: ib}}\n"
    )
    profile, defaults = read_profile(file, "west.yaml")
    assert profile.to_cluster("somebody said so", "look again") == Cluster(
        "west",
        (
            Partition(
                "gpu",
                is_default=True,
                max_time_s=172800,
                default_time_s=1800,
                max_nodes=4,
                nodes=(NodeKind(2, 64, 524288, {"h100": 8}, ("ib",)), NodeKind(1, gpus={"": 2})),
            ),
            Partition("cpu"),
        ),
        gpu_option="gres",
        accounts=(Account("physics", True, qos=("normal",)), Account("chem")),
        qos=(Qos("normal"), Qos("long", 604800, ("time",))),
        slurm_version=(23, 11, 4),
        containers=("pyxis",),
        has_modules=True,
        reason="somebody said so",
        out_of_date_hint="look again",
    )
    assert defaults.plain() == {"launch": {"network": "ib"}}
    assert defaults.value["launch"].origin == "west.yaml:12"


def test_every_problem_in_the_order_of_the_file(tmp_path):
    text = """\
slurm_version: 22.05
gpu_optoin: gres
gpu_option: gre
containers: [docker]
accounts:
  research: {defalt: true}
qos: 5
partitions:
  low:
    default: yes
    max_time: 12:00:00x
    nodes:
      - {count: 0, cpus: 8, memory: 64}
      - {feature: [a], gpus: -1}
  high: 3
defaults: 3
profile_version: 2
"""
    said("\n".join(problems(tmp_path, text)))


def test_what_is_no_yaml(tmp_path):
    said("\n".join(problems(tmp_path, "name: [west")))
    assert "duplicate key" in problems(tmp_path, "name: a\nname: b\n")[0]


WORDS = st.text("ab12-_.:#'\"{}[],&*!|>%@`~?=\\/é漢😀", min_size=1, max_size=8)
NAMES = st.lists(WORDS, unique=True, max_size=3).map(tuple)
NUMBERS = st.none() | st.integers(1, 10**8)
GPUS = st.dictionaries(WORDS | st.just(""), st.integers(1, 16), max_size=2)


def named(kind: type, *more: st.SearchStrategy[Any], **fields: st.SearchStrategy[Any]) -> Any:
    """Return strategies for mappings from different names to values of a kind."""
    made = st.builds(kind, WORDS, *more, **fields)
    return st.lists(made, min_size=1, max_size=3, unique_by=lambda item: item.name).map(tuple)


KINDS = st.builds(NodeKind, st.integers(1, 10**4), NUMBERS, NUMBERS, GPUS, NAMES)
PARTITIONS = named(
    Partition,
    *(st.booleans(), st.booleans()),
    **dict.fromkeys(("max_time_s", "default_time_s", "min_nodes", "max_nodes", "max_cpus_per_node"), NUMBERS),
    **dict.fromkeys(("max_mem_mib", "max_mem_per_cpu_mib"), NUMBERS),
    **dict.fromkeys(("allowed_accounts", "allowed_groups"), st.none() | NAMES),
    denied_accounts=NAMES,
    nodes=st.lists(KINDS, max_size=3).map(tuple),
    allowed_qos=st.none() | NAMES,
    denied_qos=NAMES,
)
OVERRIDES = st.sampled_from([(), ("time",), ("nodes",), ("time", "nodes")])
CLUSTERS = st.builds(
    Cluster,
    WORDS,
    PARTITIONS,
    st.sampled_from(["gpus-per-node", "gres"]),
    st.none() | named(Account, st.booleans(), st.none() | NAMES, st.none() | NAMES),
    st.none() | named(Qos, NUMBERS, OVERRIDES),
    st.sampled_from([(22, 5, 8), (24, 11, 0), (25, 11, 10)]),
    st.sampled_from([(), ("apptainer",), ("pyxis", "enroot"), ("singularity",)]),
    st.booleans(),
)


@settings(max_examples=25)
@given(cluster=CLUSTERS)
def test_what_is_written_is_read_back(cluster, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "written.yaml"
    file.write_text(profile_text(cluster, date(2026, 1, 2)), encoding="utf-8")
    profile, _ = read_profile(file, "written.yaml")
    assert profile.to_cluster() == cluster
