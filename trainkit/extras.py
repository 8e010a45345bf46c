"""Lists trainkit's optional packages, and formats the commands that install them.

The names of the extras are defined in setup.cfg. Messages name packages instead of extras, because the PyPI
distribution called `trainkit` is a different project.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit

from trainkit import DISTRIBUTION

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "plot": ("matplotlib>=3.8",),
    "float8": ("torchao>=0.18",),
    "hf": ("transformers>=5", "pyarrow>=17"),
    "vision": ("pillow>=10",),
    "peft": ("transformers>=5", "peft>=0.18"),
    "qlora": ("transformers>=5", "peft>=0.18", "bitsandbytes>=0.50"),
    "tensorboard": ("tensorboard>=2.16",),
    "watch": ("textual>=8,<9",),
    "mlflow": ("mlflow>=3",),
    "wandb": ("wandb>=0.22",),
}


def install_line(*names: str, python: str | None = None) -> str:
    """Return the command that installs the packages of extras with pip for the interpreter `python`.

    Names that are not extras are treated as package names, as used by external capabilities.
    """
    pip = "pip install" if python is None else f"{quote(python)} -m pip install"
    packages = dict.fromkeys(package for name in names for package in PACKAGES.get(name, (name,)))
    return f"{pip} {' '.join(map(quote, packages))}"


def own_install_line(python: str) -> str | None:
    """Return the command that installs this trainkit from its checkout or wheel for another Python.

    Returns None if the checkout or wheel is unknown or no longer exists. The command never refers to a
    package index, because trainkit may not be published there. The source is read from ``direct_url.json``,
    as specified by PyPA.
    """
    from importlib.metadata import distributions

    texts = (item.read_text("direct_url.json") for item in distributions(name=DISTRIBUTION))
    if (text := next(filter(None, texts), None)) is None:
        return None
    source = json.loads(text)
    place = url = str(source["url"])
    if "vcs_info" in source:
        place = f"{source['vcs_info']['vcs']}+{url}@{source['vcs_info']['commit_id']}"
    elif urlsplit(url).scheme == "file":
        place = unquote(urlsplit(url).path)
        if not Path(place).exists():
            return None
    return f"{quote(python)} -m pip install {quote(place)}"
