"""Provides the fixtures of tests that type commands."""

from steering import desk

__all__ = ["desk"]
