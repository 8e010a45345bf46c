"""Records a window of steps with torch.profiler."""

from __future__ import annotations

from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from trainkit.config.running import ProfilerConfig
from trainkit.trainer.distributed import World

log = getLogger(__name__)


class ProfileWindow:
    """Records the steps `start_step` to `start_step + num_steps - 1` into a trace for Perfetto or Chrome."""

    def __init__(self, config: ProfilerConfig, folder: Path, world: World) -> None:
        enabled = config.start_step is not None and world.rank in config.ranks
        self._first = config.start_step if enabled else None
        self._last = (config.start_step or 0) + config.num_steps - 1
        self._file = folder / f"rank-{world.rank:04d}.json"
        self._cuda = world.device.type == "cuda"
        self._profile: Any = None

    def before(self, step: int) -> None:
        """Start recording if this is the first step of the window; call right before a step."""
        if step != self._first:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True, with_flops=True)
        self._profile.start()

    def after(self, step: int) -> None:
        """Stop recording if this is the last step of the window; call right after a step."""
        if self._profile is not None and step >= self._last:
            self.close()

    def close(self) -> None:
        """Stop recording and write the trace, even of an incomplete window."""
        if self._profile is None:
            return
        self._profile.stop()
        try:
            self._file.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            log.error(f"cannot write the profile to {self._file} ({error})")
        else:
            log.info(f"profile written to {self._file}; open it at ui.perfetto.dev")
        self._profile = None
