"""What the pages of reports share: HTML that requests nothing, with one script that its own policy allows."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from typing import Any

from trainkit.folders import shipped_templates
from trainkit.formats import GIB, duration, hours_text, mask_secrets, masked_value, number, size, worker_time

REPORT_FILE = "report.html"
PLACE = "<script></script>"
"""Where the script goes in a page; no value can be that, since it is escaped."""

_IMAGE = re.compile('((?<=src=")data:image/png;base64,[A-Za-z0-9+/=]*(?="))')
"""An image in a page; no value can be that with its quotes, which are escaped."""


def _gib(amount: float | None) -> str:
    """An amount of memory that is in GiB, in the unit that suits it."""
    return "unknown" if amount is None else size(amount * GIB)


def result_figure(value: float | None) -> str:
    """A result with five digits, and a large one with all digits before the point."""
    if value is None:
        return "unknown"
    return f"{value:,.5g}" if abs(value) < 99_999.5 else number(value)


def render_page(template: str, **values: Any) -> str:
    """The page of a template; everything in `values` is escaped, also in the data of its charts."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(shipped_templates()),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters.update(masked=masked_value, figure=result_figure, gib=_gib)
    environment.filters.update(duration=duration, hours=hours_text, worker_time=worker_time)
    script = (shipped_templates() / "charts.js").read_text(encoding="utf-8")
    allowed = b64encode(sha256(script.encode()).digest()).decode()
    page = environment.get_template(template).render(**values, script_hash=allowed)
    # The script last, as it is in its file: the policy of the page has its hash.
    return _masked(page).replace(PLACE, f"<script>{script}</script>", 1)


def _masked(page: str) -> str:
    """A page with `***` for what looks like a secret; images, which are much text, are not searched."""
    parts = _IMAGE.split(page)
    parts[::2] = map(mask_secrets, parts[::2])
    return "".join(parts)
