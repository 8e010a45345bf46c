"""MkDocs hooks: the README becomes the first page, and links to files outside docs/ point to the repository.

The site also contains each page as Markdown, and `llms.txt`, which lists the pages for language models.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_CONSOLE = re.compile(r"^```console slow$", re.MULTILINE)


_navigation: list[Page] = []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Store the order of the pages for `on_post_build`."""
    _navigation[:] = nav.pages
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside docs/ to the repository, and store the text for `on_post_build`."""
    folder = ROOT if page.file.src_uri == "index.md" else ROOT / "docs"
    repository = str(config.repo_url).rstrip("/")

    def absolute(match: re.Match[str]) -> str:
        target, hash_, anchor = match[1].partition("#")
        if not target or "://" in target or files.get_file_from_path(target) is not None:
            return match[1]
        path = (folder / target).resolve().relative_to(ROOT)
        if not (ROOT / path).exists():
            return match[1]  # MkDocs reports this broken link
        return f"{repository}/blob/main/{path}{hash_}{anchor}"

    text = _CONSOLE.sub("```console", _LINK.sub(absolute, markdown))
    page.meta["text"] = text
    return text


def on_post_build(config: MkDocsConfig) -> None:
    """Write each page as Markdown next to its HTML, and llms.txt."""
    site, base = Path(config.site_dir), str(config.site_url or "")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    for page in _navigation:
        (site / page.file.src_uri).write_text(page.meta["text"])
        lines.append(f"- [{page.title}]({base}{page.file.src_uri})")
    (site / "llms.txt").write_text("\n".join([*lines, ""]))
