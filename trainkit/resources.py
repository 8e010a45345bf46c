"""The files that ship with trainkit: configs that run as they are, and templates of scripts."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
FIRST_RUN = "first-run.yaml"
"""The run config that `trainkit init` writes into a folder. Commands typed there without CONFIG take it when
there is no config.yaml."""


def shipped_configs() -> Path:
    """The folder of shipped configs: inside the package when installed, beside it in a checkout."""
    return _shipped("configs")


def shipped_templates() -> Path:
    """The folder of shipped templates: inside the package when installed, beside it in a checkout."""
    return _shipped("templates")


def _shipped(name: str) -> Path:
    installed = PACKAGE / "_shipped" / name
    return installed if installed.is_dir() else PACKAGE.parent / name
