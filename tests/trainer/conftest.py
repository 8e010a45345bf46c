"""Provides the fixtures of the tests of the trainer."""

from tests.support.runs import attempt

__all__ = ["attempt"]
