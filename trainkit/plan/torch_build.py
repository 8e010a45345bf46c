"""Describes an interpreter's torch build: the GPUs it supports, and whether the trainer can use it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

Version = tuple[int, int]
BUILDS: dict[Version, tuple[Version, Version]] = {(13, 0): ((7, 5), (99, 0)), (12, 6): ((5, 0), (9, 0))}
"""Maps the CUDA version of a wheel on download.pytorch.org to its lowest and highest supported compute
capability. There is no build of torch 2.15 for CUDA 12: https://github.com/pytorch/pytorch/issues/190385."""
_CONSTANT = re.compile(r"^(\w+)(?: *:[^=\n]+)? *= *(None|'[^'\n]*'|\"[^\"\n]*\")", re.MULTILINE)


def _version(text: str | None) -> Version | None:
    """Return the first two numbers of a version, or None if there are none, as in a build from source."""
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return None if found is None else (int(found[1]), int(found[2]))


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


@dataclass(frozen=True)
class TorchBuild:
    """The torch build that an interpreter imports, and the hardware it was built for."""

    python: str
    version: str = ""
    """torch version; empty if unknown."""
    cuda: str | None = ""
    """CUDA version; empty if unknown, None for a build without CUDA."""
    hip: str | None = None
    """ROCm version; None for a build without ROCm."""
    oldest: Version | None = None
    """Lowest compute capability supported by the build's kernels; None if only the CUDA version is known."""

    @classmethod
    def read(cls, python: str, file: str | None) -> TorchBuild:
        """Read the torch build from its version.py, because importing torch would take seconds."""
        text = ""
        with suppress(OSError, ValueError):
            text = Path(file or "").with_name("version.py").read_text(encoding="utf-8")
        found = {name: None if value == "None" else value[1:-1] for name, value in _CONSTANT.findall(text)}
        return cls(python, found.get("__version__") or "", found.get("cuda", ""), found.get("hip"))

    def problem(
        self, gpu: str = "", capability: Version | None = None, driver: Version | None = None
    ) -> tuple[str, str] | None:
        """Return why the torch build cannot use a GPU, and a hint, or None if no reason is known.

        `driver` is the newest CUDA version supported by the GPU's driver.
        """
        name, cuda = f"torch {self.version or 'of unknown version'} of {self.python}", _version(self.cuda)
        oldest = self.oldest or ((7, 5) if cuda is not None and cuda >= (12, 8) else (0, 0))
        if self.cuda is None and self.hip is None:
            message = f"the run uses GPUs, but {name} was built without CUDA"
        elif cuda is not None and driver is not None and driver[0] < cuda[0]:
            message = f"{name} needs a driver for CUDA {cuda[0]}, and has one for {_dotted(driver)}"
        elif capability is not None and capability < oldest:
            message = f"{name} has no kernels for the GPU {gpu} (compute capability {_dotted(capability)})"
        else:
            return None
        for build, (first, last) in BUILDS.items():
            if (driver or build)[0] >= build[0] and first <= (capability or first) <= last:
                hint = (
                    f"`{quote(self.python)} -m pip install --force-reinstall torch --index-url "
                    f"https://download.pytorch.org/whl/cu{build[0]}{build[1]}` installs a build for CUDA "
                    f"{_dotted(build)}"
                )
                more = "; `nvidia-smi` on a GPU node shows the newest CUDA version that the driver supports"
                other = "; a run without GPUs needs `--set device=cpu`" if self.cuda is None else ""
                return message, hint + more * (driver is None) + other
        return message, "install a newer driver, or request other GPUs with resources.gpu_type"


OLDEST = (2, 11)
"""The oldest supported torch release, which `make test-oldest` uses; also set in setup.cfg."""
REQUIREMENT = "torch>=2.11,<2.16"
"""The torch version requirement, the same as in setup.cfg."""
ELSEWHERE = "set launch.venv, conda, modules or container to an environment with a supported torch"


def release_problem(version: str) -> tuple[str, str] | None:
    """Return why the trainer does not support a torch version, and a hint; None for a supported version.

    Versions without a release number, such as builds from source, are accepted.
    """
    if (_version(version) or OLDEST) >= OLDEST:
        return None
    oldest = _dotted(OLDEST)
    return (
        f"has torch {version}, but the trainer requires torch {oldest} or newer",
        f"`pip install '{REQUIREMENT}'` in this environment, or {ELSEWHERE}",
    )
