"""Which failures speak against a host, so that it is excluded when they repeat there."""

from __future__ import annotations

import pytest

from trainkit.job.failure.first_failure import suspect_host
from trainkit.run.failure import RankFailure

NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error\nLast error:\nCuda failure 101"


@pytest.mark.parametrize(
    ("message", "is_suspect"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        (f"{NCCL} 'unspecified launch failure'", True),
        # A process that sees one GPU asks for another: no host can help.
        (f"{NCCL} 'invalid device ordinal'", False),
        ("CUDA error: invalid device ordinal", False),
        ("index 3 is out of bounds", False),
    ],
)
def test_hardware_and_what_only_looks_like_it(message: str, is_suspect: bool) -> None:
    failure = RankFailure(host="h1", type="RuntimeError", message=message, exit_code=1)
    assert suspect_host(failure) == (("h1", "culprit") if is_suspect else None)
