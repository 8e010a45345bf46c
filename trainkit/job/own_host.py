"""The name of this host."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def own_host(environ: Mapping[str, str] = os.environ) -> str:
    """This host by the name that Slurm has for it, where there is one: its own may be another.

    Only by that name can a host be left out of a step or a job.
    """
    return environ.get("SLURMD_NODENAME") or socket.gethostname()
