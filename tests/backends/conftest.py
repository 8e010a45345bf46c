"""Provides the fixture of an attempt folder."""

from tests.support.runs import attempt

__all__ = ["attempt"]
