"""Stages the documentation site's sources: `python docs/stage.py build/docs`, then `mkdocs build` (`make docs` runs both).

Pages in docs/ are also read on GitHub, so they link to files outside docs/ by relative paths. The site has a copy of each such
file under `repo/`, which the search leaves out: Markdown and source code become pages; other files are copied, and pictures lose
their white background. Reference pages are generated from the code (`gen_reference.py`). Staging needs no site-builder plugin, so
another builder that reads `mkdocs.yml` can use the result.
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
NAVIGATION = {ROOT / f"{name.upper()}.md": f"{name}.md" for name in ("changelog", "contributing", "security")}
"""Pages in the navigation that are outside docs/, with their paths in the site."""
REPORT = ROOT / "benchmarks" / "report.html"
"""All results as one page, in the navigation if it has been built."""
SEARCH = {
    "repo/": "exclude: true",
    "changelog.md": "exclude: true",
    "design.md": "boost: 0.5",
    "results.md": "boost: 0.5",
    "negative-results.md": "boost: 0.5",
    "reference/commands.md": "boost: 0.8",
    "reference/configuration.md": "boost: 0.8",
    "reference/python.md": "boost: 0.6",
}
"""How the search treats pages, by the beginning of their path: guides come first. What names everything answers nothing."""

FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\))")
CODE = re.compile(r"(^ {4}.*$)|`([^`\n]+)`", re.MULTILINE)
"""A line of an indented block, or code in a line of prose."""
PHONE = 40
"""Characters of code that fit in a line on a phone. Longer code may wrap (site.css)."""
BACKGROUND = re.compile(r'<path d="M ?0 [^"]*"[^>]*?(?:fill="|style="fill: )#ffffff"[^>]*/>')
"""The first path of a picture: a white rectangle below all else."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash"}
COPIED = (".svg", ".png", ".html", ".json", ".css")


def stage(folder: Path) -> None:
    """Writes all of the site's sources to an empty folder."""
    for uri, content in gen_reference.pages().items():
        _write(folder / uri, for_the_site(uri, content))
    seen: set[Path] = set()
    todo = [path for path in sorted(DOCS.rglob("*")) if path.suffix in (".md", ".svg", ".css")] + list(NAVIGATION)
    todo += [REPORT] * REPORT.is_file()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        target = folder / site_path(path)
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            _write(target, for_the_site(site_path(path), relinked(text, path)))
            todo += linked(text, path)
        elif path.suffix == ".svg":
            _write(target, BACKGROUND.sub("", path.read_text(encoding="utf-8"), count=1))
        elif path.suffix in COPIED:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        else:
            _write(target, for_the_site(site_path(path), source_page(path)))


def site_path(path: Path) -> str:
    """The site's path of a repository file."""
    if path in NAVIGATION:
        return NAVIGATION[path]
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


def for_the_site(uri: str, text: str) -> str:
    """A page with what the site builder must know about it."""

    def marked(match: re.Match[str]) -> str:
        return f"{match[0]}{{ .long }}" if match[2] and len(match[2]) > PHONE else match[0]

    head = "".join(f"---\nsearch: {{ {how} }}\n---\n\n" for start, how in SEARCH.items() if uri.startswith(start))
    return head + "".join(CODE.sub(marked, part) if prose else part for prose, part in _parts(text))


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
