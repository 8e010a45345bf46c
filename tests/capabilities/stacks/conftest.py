"""Fixtures of the tests that type commands."""

from steering import desk

__all__ = ["desk"]
