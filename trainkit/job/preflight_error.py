"""The error of a node on which no rank should start."""

from __future__ import annotations

from trainkit.errors import EXIT_FAILED, TrainkitError


class PreflightFailed(TrainkitError):
    """A check failed before the ranks started."""

    def __init__(self, message: str, hint: str = "", *, is_node: bool = True) -> None:
        super().__init__(message, hint, EXIT_FAILED)
        self.is_node = is_node
        """Whether another node may do better."""
