"""The built site: what a user searches for comes first, nothing is loaded from elsewhere. `make docs` builds it; CI does so before
the tests."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from mkdocs.config import load_config

from boost.version import __version__
from tests.browser import needs_browser, rendered

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


QUERIES = {
    "start.html": ["install", "gradient accumulation", "bf16", "mixed precision", "FSDP", "pipeline", "long context"],
    "reference/troubleshooting.html": ["out of memory", "OOM", "nan", "slow"],
    "reliability.html": ["resume", "checkpoint", "save checkpoint", "crash"],
    "clusters.html": ["multi node", "slurm", "kubernetes", "docker", "nccl", "hang"],
    "data.html": ["tokenizer", "dataset", "sft"],
    "hugging-face.html": ["export to hugging face", "import llama", "chat template", "lora"],
    "generate.html": ["generate text", "serve"],
    "reference/presets.html": ["mistral", "qwen3"],
    "reference/configuration.html": ["learning rate", "tied embeddings", "weight decay"],
    "reference/commands.html": ["calibrate", "evaluate"],
    "run-directory.html": ["loss curve", "tensorboard", "wandb"],
    "layouts.html": ["tensor parallelism", "activation checkpointing"],
    "families.html": ["muon"],
    "healing.html": ["distillation"],
    "verify.html": ["profile"],
}
"""The page that users need, and what they type."""
ANSWERS = {query: page for page, queries in QUERIES.items() for query in queries}


@pytest.mark.skipif(shutil.which("node") is None, reason="the site's search is JavaScript")
def test_the_search_finds_the_right_page_first() -> None:
    """Ranked by the script that the site itself runs in the browser."""
    command = ["node", str(ROOT / "tests" / "search.js"), str(SITE), *ANSWERS]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout)
    assert {query: pages[:1] for query, pages in found.items()} == {query: [page] for query, page in ANSWERS.items()}


def test_copies_of_repository_files_are_not_searched() -> None:
    entries = json.loads((SITE / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert len(entries) > 300
    assert [entry["location"] for entry in entries if entry["location"].startswith(("repo/", "changelog"))] == []


def test_pictures_have_no_background() -> None:
    """They are shown on light and dark pages."""
    pictures = list(SITE.glob("pictures/*.svg")) + list(SITE.glob("repo/**/*.svg"))
    assert len(pictures) > 30
    for path in pictures:
        text = path.read_text(encoding="utf-8")
        width, height = (float(number) for number in re.findall(r"[\d.]+", text.partition('viewBox="')[2])[2:4])
        corners = rf"{width:g}\b[^\"]*{height:g}\b|{height:g}\b[^\"]*{width:g}\b"
        filled = re.findall(rf'<path d="(?=[^"]*(?:{corners}))[^"]*"[^>]*#ffffff', text)
        assert filled == [], path


def test_commands_are_highlighted() -> None:
    page = (SITE / "start.html").read_text(encoding="utf-8")
    assert '<div class="language-bash highlight">' in page and '<span class="c1">#' in page


def test_the_home_page_names_version_and_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (SITE / "index.html").read_text(encoding="utf-8")
    assert f">{__version__}</a>" in page and "pictures/logo.svg" in page
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/boost")
    assert load_config(str(ROOT / "mkdocs.yml"))["repo_url"] == "https://example.org/boost"


WIDTHS = """<body>{frames}<script>
onload = () => document.title = [...document.querySelectorAll("iframe")].map(
  frame => frame.contentDocument.documentElement.scrollWidth);
</script>"""


@pytest.mark.slow
@needs_browser
def test_no_page_is_wider_than_a_phone(tmp_path: Path) -> None:
    """Tables, code blocks and pictures scroll by themselves; formulas and short code do not wrap."""
    pages = [*SITE.glob("*.html"), *SITE.glob("reference/*.html")]
    frame = '<iframe style="border: 0; width: 390px; height: 844px" src="{}"></iframe>'
    page = rendered(WIDTHS.format(frames="".join(frame.format(page.as_uri()) for page in pages)), tmp_path)
    widths = [int(width) for width in page.partition("<title>")[2].partition("</title>")[0].split(",")]
    assert {page.name: width for page, width in zip(pages, widths, strict=True) if width > 390} == {}
