"""``trainkit doctor``: what on this machine, or on the nodes of a job, would keep a run from training."""
