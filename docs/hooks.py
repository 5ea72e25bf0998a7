"""MkDocs: the log is an archive, and no result of a search."""

from typing import Any

ARCHIVE = ("LOG.md",)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Called with each page before it is rendered; Material's search reads this key."""
    if page.file.src_uri in ARCHIVE:
        page.meta["search"] = {"exclude": True}
