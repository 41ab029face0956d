"""A headless browser, for tests of how pages look."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")


def rendered(markup: str, folder: Path) -> str:
    """A page's HTML after its scripts have run. It may look into frames that show other files."""
    page = folder / "page.html"
    page.write_text(markup, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    command = [str(BROWSER), *options, f"--user-data-dir={folder}", "--virtual-time-budget=20000", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
