"""The built site: nothing is loaded from elsewhere. `make docs` builds it; CI does so before the tests."""

import json
import re
from pathlib import Path

import pytest
from mkdocs.config import load_config

from boost.version import __version__

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"

pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="make docs builds the site")

OUTSIDE = re.compile(
    r"<(?:script|img|iframe|source|embed|object|video)\b[^>]*?\s(?:src|data|srcset)\s*=\s*[\"']?(?:https?:)?//[^\s>]*"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*?\shref\s*=\s*[\"']?(?:https?:)?//[^\s>]*",
)


def test_the_site_loads_nothing_from_elsewhere() -> None:
    for path in SITE.rglob("*"):
        if path.suffix == ".html":
            text = path.read_text(encoding="utf-8")
            assert OUTSIDE.findall(text) == [], path
            assert 'data-md-component="source"' not in text, path  # would ask the repository's host for its stars
        elif path.suffix == ".css":
            assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")) == [], path
    assert (SITE / "reference" / "python.html").stat().st_size > 20_000


def test_copies_of_repository_files_are_not_searched() -> None:
    entries = json.loads((SITE / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert len(entries) > 300
    assert [entry["location"] for entry in entries if entry["location"].startswith(("repo/", "changelog"))] == []


def test_the_home_page_names_version_and_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (SITE / "index.html").read_text(encoding="utf-8")
    assert f">{__version__}</a>" in page and "pictures/logo.svg" in page
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/boost")
    assert load_config(str(ROOT / "mkdocs.yml"))["repo_url"] == "https://example.org/boost"
