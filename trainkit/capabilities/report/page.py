"""Renders report pages as HTML that loads no external resources.

The content security policy of the page allows only the script contained in the page.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from typing import Any

from trainkit.folders import shipped_templates
from trainkit.formats import GIB, duration, hours_text, mask_secrets, masked_value, number, size, worker_time

REPORT_FILE = "report.html"
PLACE = "<script></script>"
"""Placeholder for the script in the page. No value can contain the placeholder, because `<` is escaped in
values."""

_DATA = re.compile(
    r'((?<=src=")data:image/png;base64,[A-Za-z0-9+/=]*(?=")'
    r'|(?:(?<="[xy]":\[)|(?<="spread":\[))[-\d.eE,nul]*(?=\]))'
)
"""Matches base64 image data and the numbers of a chart in a page.

No user-provided value can match, because quotes in values are escaped.
"""


def _gib(amount: float | None) -> str:
    """Convert an amount of memory, in GiB, to text with a suitable unit."""
    return "unknown" if amount is None else size(amount * GIB)


def result_figure(value: float | None) -> str:
    """Return a result as text with five significant digits, but keep all digits before the decimal point."""
    if value is None:
        return "unknown"
    return f"{value:,.5g}" if abs(value) < 99_999.5 else number(value)


def render_page(template: str, **values: Any) -> str:
    """Render a template to a page. All `values` are escaped, including the chart data."""
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
    # Insert the script last and unchanged, because the page's content security policy contains its hash.
    return _masked(page).replace(PLACE, f"<script>{script}</script>", 1)


def _masked(page: str) -> str:
    """Return a page, replacing everything that looks like a secret with `***`.

    Images and numbers of charts are not searched for secrets, because they are long and cannot contain any.
    """
    parts = _DATA.split(page)
    parts[::2] = map(mask_secrets, parts[::2])
    return "".join(parts)
