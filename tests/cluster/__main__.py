"""`python -m tests.cluster`: a Slurm cluster of four hosts on this machine."""

import sys

from tests.cluster.cli import main

sys.exit(main())
