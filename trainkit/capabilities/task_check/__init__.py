"""Tests a user-defined task on this machine, for `check --task-smoke` and `data validate CONFIG`."""
