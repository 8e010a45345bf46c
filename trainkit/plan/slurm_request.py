"""The Slurm options of a job, by their long names for sbatch and srun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Value = str | int | bool
Options = dict[str, Value]


@dataclass(frozen=True)
class SlurmRequest:
    """The Slurm options of one job, in reading order."""

    sbatch: Options = field(default_factory=dict)
    """sbatch options by long name; True for an option without a value."""
    srun: Options = field(default_factory=dict)
    """srun options of the step that starts the ranks."""
    version: tuple[int, ...] = ()
    """The version of Slurm; empty if unknown."""
    clusters: tuple[str, ...] = ()
    """The clusters of which any one may take the job; empty for the one here."""

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> SlurmRequest:
        """The request that `dataclasses.asdict` wrote."""
        names = (tuple(value.get(name, ())) for name in ("version", "clusters"))
        return cls(dict(value["sbatch"]), dict(value["srun"]), *names)

    def comment(self, token: str) -> str:
        """The comment of a job: the token of its submission, then the config's."""
        own = self.sbatch.get("comment")
        return f"{token} {own}" if own else token


def with_excluded(request: SlurmRequest, hosts: Sequence[str]) -> SlurmRequest:
    """The request with these hosts excluded too."""
    before = str(request.sbatch.get("exclude") or "")
    new = [host for host in hosts if host not in before.split(",")]
    exclude = ",".join([*([before] if before else []), *new])
    return replace(request, sbatch={**request.sbatch, "exclude": exclude}) if new else request


def option_argv(options: Options) -> list[str]:
    """Options as command-line arguments, such as ``--nodes=2``; False omits an option."""
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if value is not False
    ]
