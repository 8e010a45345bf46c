"""``python -m trainkit`` is ``trainkit``."""

import sys

from trainkit.cli.main import main

sys.exit(main())
