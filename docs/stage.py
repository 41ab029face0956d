"""Stages the documentation site's sources: `python docs/stage.py build/docs`, then `mkdocs build` (`make docs` runs both).

Pages in docs/ are also read on GitHub, so they link to files outside docs/ by relative paths. The site has a copy of each such
file under `repo/`: Markdown and source code become pages; other files are copied unchanged. Reference pages are generated from the
code (`gen_reference.py`). Staging needs no site-builder plugin, so another builder that reads `mkdocs.yml` can use the result.
"""

import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import gen_reference

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NAVIGATION = tuple(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
"""Pages in the navigation that are outside docs/."""

FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash"}
COPIED = (".svg", ".png", ".html", ".json", ".css")


def stage(folder: Path) -> None:
    """Writes all of the site's sources to an empty folder."""
    for uri, content in gen_reference.pages().items():
        _write(folder / uri, content)
    seen: set[Path] = set()
    todo = [path for path in sorted(DOCS.rglob("*")) if path.suffix in (".md", *COPIED)] + list(NAVIGATION)
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        target = folder / site_path(path)
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            _write(target, relinked(text, path))
            todo += linked(text, path)
        elif path.suffix in COPIED:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        else:
            _write(target, source_page(path))


def site_path(path: Path) -> str:
    """The site's path of a repository file."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = f"repo/{path.relative_to(ROOT).as_posix()}"
    return name if path.suffix in (".md", *COPIED) else f"{name}.md"


def target_of(link: str, page: Path) -> Path | None:
    """The repository file that a page's link refers to. None for other links and for missing files; their links stay
    unchanged, and the builder reports missing files."""
    if ":" in link or link.startswith("/"):
        return None
    path = (page.parent / link).resolve()
    if path == ROOT / "README.md":
        return DOCS / "index.md"
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def linked(text: str, page: Path) -> list[Path]:
    """Repository files that a page links to."""
    prose = FENCE.sub("", text)
    return [path for match in LINK.finditer(prose) if (path := target_of(match[2], page))]


def relinked(text: str, page: Path) -> str:
    """A page's text, with links to repository files replaced by links to the site's copies."""
    here = posixpath.dirname(site_path(page)) or "."

    def one(match: re.Match[str]) -> str:
        path = target_of(match[2], page)
        return f"{match[1]}{posixpath.relpath(site_path(path), here)}{match[3]}" if path else match[0]

    return "".join(LINK.sub(one, part) if prose else part for prose, part in _parts(text))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Alternating prose and fenced code."""
    last = 0
    for match in FENCE.finditer(text):
        yield True, text[last : match.start()]
        yield False, match[0]
        last = match.end()
    yield True, text[last:]


def source_page(path: Path) -> str:
    """A source file as a page."""
    text = path.read_text(encoding="utf-8")
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"# {path.relative_to(ROOT).as_posix()}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    destination = Path(sys.argv[1])
    shutil.rmtree(destination, ignore_errors=True)
    stage(destination)
