"""Lists trainkit's optional packages, and formats the command that installs them.

The names are the extras in setup.cfg. Messages name packages instead of extras, because the distribution
called `trainkit` on PyPI is a different project.
"""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote

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
    """Return the command that installs the packages of extras with the pip of the interpreter `python`.

    Names that are not extras are treated as package names, which external capabilities use.
    """
    pip = "pip install" if python is None else f"{quote(python)} -m pip install"
    packages = dict.fromkeys(package for name in names for package in PACKAGES.get(name, (name,)))
    return f"{pip} {' '.join(map(quote, packages))}"
