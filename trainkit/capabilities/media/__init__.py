"""Stores images, histograms and texts that a task or a training loop logs, and shows them in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainkit.capability import Capability, MakeRecorder

if TYPE_CHECKING:
    from trainkit.run.history import RunHistory


class Media(Capability):
    """Writes logged media on rank 0 and adds the media to the report."""

    name = "media"

    def recorder(self) -> MakeRecorder:
        from trainkit.capabilities.media.recorder import MediaRecorder

        return MediaRecorder

    def report(self, history: RunHistory) -> Mapping[str, object]:
        from trainkit.capabilities.media.items import read_items, summary

        found = summary(read_items(history.run))
        return {"media": found} if found else {}

    def sections(self, history: RunHistory) -> Mapping[str, str]:
        from trainkit.capabilities.media.items import read_items
        from trainkit.capabilities.media.section import render

        items = read_items(history.run)
        return {"Images, histograms and texts": render(history.run, items)} if items else {}


CAPABILITY = Media
