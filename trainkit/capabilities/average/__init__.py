"""Implements `trainkit ckpt average`, which averages the weights of several checkpoints of a run."""
