"""The releases of torch that the trainer supports."""

from __future__ import annotations

import re

OLDEST = (2, 11)
"""The oldest release, on which `make test-oldest` runs the tests of the trainer; setup.cfg names it too."""


def release_problem(version: str) -> tuple[str, str] | None:
    """Why the trainer cannot use a version of torch, and a hint; None if it can.

    Versions that have no release number, as of a build from source, are accepted.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) >= OLDEST:
        return None
    oldest = ".".join(map(str, OLDEST))
    return (
        f"has torch {version}, and the trainer requires torch {oldest} or newer",
        f"`pip install 'torch>={oldest}'` there, or set launch.venv, conda, modules or container to an"
        " environment that has it",
    )
