"""What the pages of reports share: their files, and rendering to HTML that requests nothing."""

from __future__ import annotations

from typing import Any

from trainkit.config import read_effective
from trainkit.errors import TrainkitError
from trainkit.resources import shipped_templates
from trainkit.run.rundir import RunDir

REPORT_FILE = "report.html"


def render_page(template: str, **values: Any) -> str:
    """The page of a template; everything in `values` is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(shipped_templates()),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=duration)
    return environment.get_template(template).render(**values)


def duration(value: float | None) -> str:
    """Seconds as text: ``8.2 s``, ``3 min 05 s`` or ``2 h 10 min``."""
    if value is None:
        return "unknown"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def read_config(run: RunDir) -> dict[str, Any]:
    """The effective config of a run; empty when it cannot be read."""
    try:
        return read_effective(run.config_file).model_dump(mode="json", by_alias=True)
    except (OSError, TrainkitError):
        return {}
