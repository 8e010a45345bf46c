"""`python -m tools.slurm_cluster`: a Slurm cluster of four hosts on this machine."""

import sys

from tools.slurm_cluster.cli import main

sys.exit(main())
