"""Debuggers in ranks: `breakpoint()` in every run, `trainkit run --debug` and `trainkit debug`."""

from __future__ import annotations

from trainkit.capability import Capability


class Debugger(Capability):
    """The capability."""

    name = "debugger"


CAPABILITY = Debugger
