"""``python -m trainkit`` is ``trainkit``."""

import sys

from trainkit.cli.main import program

sys.exit(program())
