"""The documentation site: links hold on GitHub and in the site, reference pages are complete, examples run, nothing comes from
another host."""

import html
import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import boost
import boost.nn
from boost.cli.main import build_parser
from boost.config.families import ModelConfig
from boost.config.load import fields
from boost.config.optimizers import LRSchedule, OptimConfig
from boost.optim.schedule import learning_rate
from tests import toy
from tests.trained import Trained

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\)")


@pytest.fixture
def docs_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The scripts of docs/, which is not a package."""
    monkeypatch.syspath_prepend(str(DOCS))
    names = ("stage", "gen_reference", "draw")
    yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)


def prose(path: Path) -> str:
    """A page without fenced code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def relative_links(path: Path) -> list[str]:
    return [link for link in LINK.findall(prose(path)) if ":" not in link]


def test_links_lead_somewhere_in_the_repository() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
    wrong = [f"{page.relative_to(ROOT)}: {link}" for page in pages for link in relative_links(page)
             if not (page.parent / link).exists()]  # fmt: skip
    assert wrong == []


def test_links_lead_somewhere_in_the_site(docs_modules: types.SimpleNamespace, tmp_path: Path) -> None:
    docs_modules.stage.stage(tmp_path)
    pages = list(tmp_path.rglob("*.md"))
    assert len(pages) > len(list(DOCS.rglob("*.md"))) + 10  # generated ones and copies
    wrong = [f"{page.relative_to(tmp_path)}: {link}" for page in pages for link in relative_links(page)
             if not (page.parent / link).is_file()]  # fmt: skip
    assert wrong == []


def navigation() -> list[str]:
    """Every page listed in mkdocs.yml."""
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def leaves(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        elif isinstance(node, list):
            for item in node:
                yield from leaves(item)
        else:
            yield from leaves(list(node.values()))

    return list(leaves(yaml.safe_load(text)["nav"]))


def test_every_page_is_in_the_navigation_once(docs_modules: types.SimpleNamespace) -> None:
    written = {
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    } | docs_modules.gen_reference.pages().keys()
    listed = navigation()
    assert len(listed) == len(set(listed))
    assert {page for page in listed if not page.startswith("repo/")} == written


def test_numbers_of_negative_results_are_those_of_the_experiment() -> None:
    """Its tables of losses have fewer columns than those of the experiment's page: each number is looked up in that page's rows."""
    results = (ROOT / "benchmarks/results/families.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/negative-results.md").read_text(encoding="utf-8")
    rows = [
        row.strip("| ").split(" | ") for row in page.splitlines() if row[:1] == "|" and (" ± " in row or " to " in row)
    ]
    assert len(rows) == 8
    for name, *numbers in rows:
        of_model = " ".join(row for row in results.splitlines() if row.startswith(f"| {name.strip('`')} |"))
        assert all(number in of_model for number in numbers), name


def test_reference_has_every_key_command_and_name(docs_modules: types.SimpleNamespace) -> None:
    pages = docs_modules.gen_reference.pages()
    configuration, commands, python = (
        pages[f"reference/{name}.md"] for name in ("configuration", "commands", "python")
    )
    for key, info in fields():
        assert f"### `{key}` {{ #{key} }}" in configuration, key
        assert info.description, key
    choices = next(action for action in build_parser()._actions if action.dest == "command").choices
    assert choices is not None
    for name, parser in dict(choices).items():
        section = commands.partition(f"## `boost {name}` {{")[2].partition("\n## ")[0]
        for option in (option for action in parser._actions for option in action.option_strings):
            assert option in section or option in ("-h", "--help"), f"boost {name} {option}"
    for module in (boost, boost.nn):
        for name in module.__all__:
            full = f"{module.__name__}.{name}"
            assert f'"{full}"' in python or full == "boost.nn", full


def test_text_is_shown_unchanged(docs_modules: types.SimpleNamespace) -> None:
    import markdown  # mkdocs's

    text = r"d_ff * 2 [x] <NAME> auto|PATH `code` # a\b _under_"
    page = markdown.markdown(docs_modules.gen_reference.escaped(text))
    assert html.unescape(re.sub(r"<[^>]+>", "", page)) == text


def test_pictures_are_those_that_the_code_draws(docs_modules: types.SimpleNamespace, tmp_path: Path) -> None:
    draw = docs_modules.draw
    draw.PICTURES = tmp_path
    draw.draw()
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(drawn) == 3
    for name, text in drawn.items():
        assert text == (DOCS / "pictures" / name).read_text(encoding="utf-8"), (
            f"python docs/draw.py writes another {name}"
        )


def example(page: str, index: int, name: str) -> types.ModuleType:
    """A code block of a page, imported as a module."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(blocks[index], page, "exec"), module.__dict__)
    return module


@pytest.fixture
def forgets() -> Iterator[None]:
    """Unregisters what examples register."""
    before = {root: dict(root.choices) for root in (OptimConfig, ModelConfig, LRSchedule)}
    yield
    for root, choices in before.items():
        root.choices.clear()
        root.choices.update(choices)
    for name in ("lion", "schedules", "narrow"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("forgets")
def test_the_optimizer_of_the_page_trains() -> None:
    example("how-to/own-optimizer.md", 0, "lion")
    config = toy.toy_config(optim={"name": "lion", "lr": 1e-3, "weight_decay": 0.0})
    trained = Trained(config, 3)
    moved = {
        name: (value - trained.initial[name]).abs().max().item() for name, value in toy.weights(trained.model).items()
    }
    assert moved
    assert all(0 < each <= 3.001e-3 for each in moved.values()), moved  # three steps of at most lr


@pytest.mark.usefixtures("forgets")
def test_the_schedule_of_the_page_is_a_choice() -> None:
    example("how-to/own-optimizer.md", 1, "schedules")
    optim = toy.toy_config(optim={"schedule": "inverse-sqrt", "warmup_steps": 4, "lr": 1.0}).optim
    assert [learning_rate(optim, step, 100) for step in (0, 3, 15)] == [0.25, 1.0, 0.5]


@pytest.mark.usefixtures("forgets")
def test_the_family_of_the_page_trains() -> None:
    example("how-to/own-family.md", 0, "narrow")
    config = toy.toy_config(model={"family": "narrow", "rank": 8})
    assert config.model.ranks == {"attn": 4}
    assert toy.weights(Trained(config, 2).model)["layers.0.attn.q.A"].shape == (4, 32)


OUTSIDE = re.compile(
    r"<(?:script|img|iframe|source|embed|object|video)\b[^>]*?\s(?:src|data|srcset)\s*=\s*[\"']?(?:https?:)?//[^\s>]*"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*?\shref\s*=\s*[\"']?(?:https?:)?//[^\s>]*",
)


def test_the_site_loads_nothing_from_elsewhere() -> None:
    site = ROOT / "build" / "site"
    if not site.is_dir():
        pytest.skip("make docs builds it, as CI does before the tests")
    for path in site.rglob("*"):
        if path.suffix == ".html":
            assert OUTSIDE.findall(path.read_text(encoding="utf-8")) == [], path
        elif path.suffix == ".css":
            assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")) == [], path
    assert (site / "reference" / "python.html").stat().st_size > 20_000
