"""What `trainkit doctor` says of nodes that differ."""

from __future__ import annotations

from trainkit.contrib.doctor import NodeReport
from trainkit.contrib.doctor.nodes import compare_versions
from trainkit.job.preflight import Finding


def result(host: str, **versions: str) -> NodeReport:
    return NodeReport(host, 0, 7, versions=versions)


def test_packages_that_differ_on_one_node_are_named() -> None:
    results = [result("a", torch="2.13"), result("b", torch="2.12"), result("c", torch="2.13")]
    (found,) = compare_versions(results)
    text = "torch is 2.12, but 2.13 on 2 of 3 nodes"
    assert found == Finding("packages", "failure", text, found.hint, "b")


def test_two_nodes_that_differ_are_not_blamed() -> None:
    (found,) = compare_versions([result("a", torch="2.13"), result("b", torch="2.12")])
    assert (found.host, found.value) == (None, "torch is 2.13 on a; 2.12 on b")


def test_missing_package_is_named() -> None:
    found = next(iter(compare_versions([result("a", peft="1"), result("b", peft="1"), result("c")])))
    assert (found.host, found.value) == ("c", "peft is missing, but 1 on 2 of 3 nodes")
