"""The configs and templates that ship with trainkit, and the config that commands use by default."""

from __future__ import annotations

from pathlib import Path, PurePath

PACKAGE = Path(__file__).resolve().parent
PROJECT_CONFIG = "config.yaml"
FIRST_RUN = "first-run.yaml"
"""The run config that `trainkit init` writes."""
QUICKSTART = "quickstart"
NOT_RUNS = ("clusters", "profiles")
"""Folders of shipped files that are layered over a run config and do not describe a run themselves."""


def shipped_configs() -> Path:
    """The folder of shipped configs: inside the package when installed, next to it in a checkout."""
    return _shipped("configs")


def shipped_templates() -> Path:
    """The folder of shipped templates: inside the package when installed, next to it in a checkout."""
    return _shipped("templates")


def _shipped(name: str) -> Path:
    installed = PACKAGE / "_shipped" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def default_config(cwd: Path) -> tuple[str, str]:
    """The default config, a file in `cwd` or else the quickstart, and a text that says where it is from."""
    if (cwd / PROJECT_CONFIG).is_file():
        return PROJECT_CONFIG, "in this folder"
    if (cwd / FIRST_RUN).is_file():
        return FIRST_RUN, "written by `trainkit init`"
    return QUICKSTART, "shipped"


def find_shipped_config(name: str) -> Path | None:
    """The file of a shipped config such as ``quickstart``, ``models/8b.yaml`` or ``configs/models/8b.yaml``.

    None if no such config ships.
    """
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix not in ("", ".yaml"):
        return None
    if path.parts[:1] == ("configs",):
        path = path.relative_to("configs")
    found = shipped_configs() / path.with_suffix(".yaml") if path.name else None
    return found if found is not None and found.is_file() else None


def shipped_config_names() -> list[str]:
    """The names of the shipped run configs, such as ``quickstart`` and ``models/8b``."""
    folder = shipped_configs()
    others = [
        file
        for file in sorted(folder.glob("*/*.yaml"))
        if file.parent.name not in NOT_RUNS and "." not in file.stem  # those are profiles of one config
    ]
    files = [folder / f"{QUICKSTART}.yaml", *others]
    return [str(file.relative_to(folder).with_suffix("")) for file in files]
