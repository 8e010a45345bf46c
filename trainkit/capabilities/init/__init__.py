"""Implements `trainkit init`, which writes a cluster profile, a first run config or a task template."""
