"""What `trainkit doctor` says of nodes that differ."""

from __future__ import annotations

import pytest

from trainkit.contrib.doctor import NodeReport
from trainkit.contrib.doctor.nodes import compare_versions
from trainkit.job.preflight import Finding


@pytest.mark.parametrize(
    ("versions", "host", "text"),
    [
        (["2.13", "2.12", "2.13"], "b", "torch is 2.12, but 2.13 on 2 of 3 nodes"),
        (["2.13", "2.13", None], "c", "torch is missing, but 2.13 on 2 of 3 nodes"),
        (["2.13", "2.12"], None, "torch is 2.13 on a; 2.12 on b"),
    ],
)
def test_packages_that_differ(versions: list[str | None], host: str | None, text: str) -> None:
    """A node is blamed if most have another version."""
    reports = [
        NodeReport(name, 0, 7, versions={} if version is None else {"torch": version})
        for name, version in zip("abc", versions, strict=False)
    ]
    (found,) = compare_versions(reports)
    assert found == Finding("packages", "failure", text, found.hint, host)
