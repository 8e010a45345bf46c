"""What ranks in tests need, imported once; see `tests.support.ranks`."""

import torch.distributed.pipelining  # noqa: F401

import trainkit.trainer.worker  # noqa: F401
