"""What the name of a file says about it: code, or a key or password."""

from __future__ import annotations

import re
from fnmatch import translate


def _matcher(*patterns: str) -> re.Pattern[str]:
    """One expression for file names that match any of some patterns such as ``*.py``."""
    return re.compile("|".join(map(translate, patterns)))


_SOURCE = _matcher(
    *("*.py", "*.pyi", "*.pyx", "*.pxd", "*.ipynb", "*.c", "*.cc", "*.cpp", "*.cu", "*.cuh", "*.h", "*.hpp"),
    *("*.so", "*.yaml", "*.yml", "*.json", "*.toml", "*.cfg", "*.ini", "*.conf", "*.txt", "*.md", "*.rst"),
    *("*.sh", "*.bash", "*.sbatch", "*.slurm", "*.j2", "*.jinja", "*.def", "*.typed"),
    *("Makefile", "Dockerfile*", "LICENSE*", "MANIFEST.in", "Snakefile"),
)
_SECRET = _matcher(
    *(".env", ".env.*", "*.env", ".netrc", "_netrc", ".pypirc", ".git-credentials", ".htpasswd"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    "kaggle.json",
)
_HARMLESS = re.compile(r"\.pub$|example|sample|template|\.dist$", re.IGNORECASE)


def looks_like_source(name: str) -> bool:
    """Whether a file of this name belongs to a project's code."""
    return _SOURCE.match(name) is not None


def looks_secret(name: str) -> bool:
    """Whether a file of this name usually holds a key or a password."""
    return _SECRET.match(name) is not None and not _HARMLESS.search(name)
