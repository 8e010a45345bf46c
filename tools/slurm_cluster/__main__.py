"""Start and manage a Slurm cluster of four hosts on this machine: `python -m tools.slurm_cluster`."""

import sys

from tools.slurm_cluster.cli import main

sys.exit(main())
