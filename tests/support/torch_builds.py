"""Provides packages called torch that can be found but not imported, built for CUDA or for CPUs."""

from pathlib import Path

VERSION = """from typing import Optional

__all__ = ["__version__", "debug", "cuda", "git_version", "hip"]
__version__ = {version!r}
debug = False
cuda: Optional[str] = {cuda!r}
git_version = "0123abc"
hip: Optional[str] = {hip!r}
"""


def make_torch(
    folder: Path, version: str = "2.13.0+cpu", cuda: str | None = None, hip: str | None = None
) -> Path:
    """Create a package torch in a folder with the given build information, and return the package."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nobody may import this')\n")
    (package / "version.py").write_text(VERSION.format(version=version, cuda=cuda, hip=hip))
    return package
