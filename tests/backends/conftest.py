"""The folder of an attempt."""

from tests.support.runs import attempt

__all__ = ["attempt"]
