"""Write requirements-lock.txt, which lists every package in the test environment with its hashes.

To run this script, use ``python -m tools.lock`` or `make lock`. The hashes are computed from the files that
pip would install for this platform and Python version. The list includes the extras `tensorboard` and
`watch`.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from trainkit import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements-lock.txt"
HEAD = """\
# What the tests run with: `pip install --require-hashes -r requirements-lock.txt`, then
# `pip install --no-deps PATH`, of a checkout or a wheel. For {place};
# `make lock` writes it for another environment, such as one with CUDA.
"""


def main() -> int:
    """Resolve the requirements in setup.cfg to installed versions, and write the packages' hashes."""
    installed = {item.metadata["Name"]: item.version for item in distributions()}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in sorted(installed.items()))
        constraints.flush()
        options = ("--dry-run", "--ignore-installed", "--quiet", "--report", "-", "-c", constraints.name)
        argv = [sys.executable, "-m", "pip", "install", *options, f"{ROOT}[tensorboard,watch]"]
        report = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)
    lines = []
    for item in report["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        if name != DISTRIBUTION:
            digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{name.lower()}=={version} --hash=sha256:{digest}\n")
    place = (
        f"{platform.system()} on {platform.machine()}, Python {'.'.join(platform.python_version_tuple()[:2])}"
    )
    LOCK.write_text(HEAD.format(place=place) + "".join(sorted(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
