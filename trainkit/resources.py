"""The files that ship with trainkit: configs that run as they are."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped_configs() -> Path:
    """The folder of shipped configs: inside the package when installed, beside it in a checkout."""
    installed = PACKAGE / "_shipped" / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"
