"""Imports the modules for ranks in tests, once for all of them. See `tests.support.ranks`."""

import torch.distributed.pipelining  # noqa: F401

import trainkit.trainer.worker  # noqa: F401
