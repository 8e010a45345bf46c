"""Implements `trainkit watch`, which shows runs live in a terminal, or prints their state once."""
