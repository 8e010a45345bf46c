"""What `trainkit doctor` says of nodes that differ."""

from __future__ import annotations

from trainkit.contrib.doctor import NodeReport
from trainkit.contrib.doctor.nodes import compare_clocks, compare_versions
from trainkit.job.preflight import Finding


def result(host: str, offset_s: float = 0.0, **versions: str) -> NodeReport:
    """What a node reports whose clock is ahead of this host's by `offset_s`."""
    return NodeReport(host, 0, 7, versions=versions, time_s=1000.0 + offset_s, arrived_s=1000.0)


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


def clocks(*reports: NodeReport, caller: str = "login") -> list[tuple[str | None, str, str]]:
    return [(check.host, check.state, check.value) for check in compare_clocks(reports, caller)]


def test_clock_of_one_of_two_nodes_is_found_by_that_of_this_host() -> None:
    assert clocks(result("a"), result("b", 600.0)) == [("b", "failure", "600 s ahead of the other clocks")]
    assert clocks(result("a", -600.0), result("b")) == [("a", "failure", "600 s behind the other clocks")]


def test_clock_of_this_host_is_not_blamed_on_the_nodes() -> None:
    found = clocks(result("a", 600.0), result("b", 600.0))
    assert found == [(None, "warning", "this host, login, is 600 s behind the other clocks")]


def test_clocks_that_agree() -> None:
    assert clocks(result("a"), result("b", 1.5)) == [(None, "ok", "of 2 nodes within 1.5 s")]
