"""Asks Slurm to start a job without hosts that failed, where it can."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainkit.errors import TrainkitError
from trainkit.plan.slurm_request import SlurmRequest, option_argv, with_excluded
from trainkit.slurm.client import SlurmRefused
from trainkit.slurm.control import exclude_hosts
from trainkit.slurm.submit import would_start

ASK_TIMEOUT_S = 20.0


def exclude_from(job_id: str, hosts: Sequence[str], request: SlurmRequest) -> list[str]:
    """Have Slurm leave hosts out when it starts a job that is back in the queue; those that it will.

    `request` is what the job asked for. That it cannot be done is said, and is no reason not to come back.
    """
    try:
        wanted = excludable(hosts, request)
        if wanted:
            exclude_hosts(job_id, str(with_excluded(request, wanted).sbatch["exclude"]))
    except TrainkitError as error:
        print(f"{', '.join(hosts)} cannot be left out: {error.message}", flush=True)
        return []
    return wanted


def excludable(hosts: Sequence[str], request: SlurmRequest) -> list[str]:
    """As many of these hosts as Slurm could start the job without: with too few it would wait for ever.

    Raises as `_refusal`.
    """
    if not hosts or _refusal(hosts, request) is None:
        return list(hosts)
    found: list[str] = []
    for host in hosts:
        refusal = _refusal([*found, host], request)
        if refusal is None:
            found.append(host)
        else:
            print(f"{host} cannot be left out: {refusal}", flush=True)
    return found


def _refusal(hosts: Sequence[str], request: SlurmRequest) -> str | None:
    """Why Slurm would not take the job without these hosts; None when it would.

    Raises SlurmUnreachable, and TrainkitError when this host has no room for the question.
    """
    options = {**with_excluded(request, hosts).sbatch, "comment": False, "dependency": False}
    try:
        return _ask(option_argv(options))
    except OSError as error:
        raise TrainkitError(f"Slurm cannot be asked on this host: {error}") from error


def _ask(options: Sequence[str]) -> str | None:
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        script = Path(folder) / "nothing.sh"
        script.write_text("#!/bin/sh\n", encoding="utf-8")
        try:
            would_start(
                script,
                environ=os.environ,
                cwd=script.parent,
                timeout_s=ASK_TIMEOUT_S,
                extra_argv=options,
            )
        except SlurmRefused as error:
            return error.message
    return None
