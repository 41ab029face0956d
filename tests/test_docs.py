"""The documentation: links hold on GitHub and in the site, reference pages are complete, examples run."""

import argparse
import ast
import dataclasses
import html
import importlib
import json
import re
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import boost
import boost.nn
from benchmarks.experiments import headline, report
from boost.cli.main import build_parser
from boost.config import load
from boost.config.architecture import parameter_count
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
    names = ("stage", "gen_reference", "draw", "facts", "by_gpus")
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
    text = re.sub(r"!!python\S+|!ENV", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

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
    listed = [page for page in navigation() if not page.endswith(".html")]
    assert len(listed) == len(set(listed))
    assert set(listed) == written | set(docs_modules.stage.NAVIGATION.values())


def test_figures_are_those_of_their_result_files(docs_modules: types.SimpleNamespace) -> None:
    """`python docs/facts.py` rewrites them."""
    facts = docs_modules.facts
    wrong, marked = [], 0
    for page in facts.pages():
        text = page.read_text(encoding="utf-8")
        current, problems = facts.updated(page)
        marked += len(facts.FACT.findall(text))
        wrong += [f"{page.relative_to(ROOT)}: {problem}" for problem in problems]
        wrong += [
            f"{page.relative_to(ROOT)}: {old} is now {new}"
            for old, new in zip(text.splitlines(), current.splitlines(), strict=False)
            if old != new
        ]
    assert marked > 150
    assert wrong == []


def test_the_headline_is_one_pair(docs_modules: types.SimpleNamespace) -> None:
    facts = docs_modules.facts
    results = [(result.facts, result.goals) for result in report.read_results([ROOT / "benchmarks" / "results"])]
    shown = [number[:2] for number in map(dataclasses.astuple, headline.numbers(results))]
    wire = (ROOT / "benchmarks" / "results" / "wire.md").read_text(encoding="utf-8")
    for baseline in ("vanilla, published", "megatron-sp"):
        pair = facts.cell(wire, f"TP 2: step > {baseline} > share-matched, time")
        for page in ("README.md", "docs/index.md", "docs/results.md"):
            assert f"[{pair}](" in (ROOT / page).read_text(encoding="utf-8"), page
        value, _, interval = pair.removesuffix(")").partition(" (")
        assert (f"{value}x", interval) in shown, "the report's first screen"


def test_pages_are_few_and_short() -> None:
    """Whoever adds a page or a section looks for what can go. Link targets do not count."""

    def words_of(page: Path) -> list[str]:
        text = re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8"))
        return [word for word in text.split() if re.search(r"\w", word)]

    pages = list(DOCS.rglob("*.md"))
    words = [word for page in pages for word in words_of(page)]
    assert len(pages) <= 20
    assert len(words) <= 25_000
    assert len(words_of(ROOT / "README.md")) <= 800


def test_a_figure_that_differs_is_found(docs_modules: types.SimpleNamespace, tmp_path: Path) -> None:
    facts = docs_modules.facts
    (tmp_path / "result.md").write_text("Measured.\n\n| layout | ms |\n|---|--:|\n| btp | 437 (429 to 457) |\n")
    (tmp_path / "result.json").write_text('{"kills": {"all": 200}, "seconds": [1.0, 2.0, 9.0], "part": 0.317}')
    page = tmp_path / "page.md"
    right = '[437](result.md "btp > ms") [437 (429 to 457)](result.md "Measured > btp > ms") [200](result.json "kills > all") '
    right += '[2.0](result.json "seconds") [32%](result.json "part")'
    page.write_text(right)
    assert facts.updated(page) == (right, [])
    page.write_text(right.replace("437", "436").replace("[200", "[199"))
    assert facts.updated(page) == (right, [])
    page.write_text('[1](result.md "vanilla > ms") [1](result.json "kills > none")')
    assert len(facts.updated(page)[1]) == 2


MEASURED = re.compile(
    r"\d\.\d+ ?(?:x|\u00d7)(?!\w)"  # a ratio
    r"|\dx? \([-+]?\d[\d.]* to [-+]?\d"  # an interval
    r"|\d ?± ?\d"  # a spread
    r"|\d ms\b|\d s per step|tok(?:ens)?/s(?:ec)?\b.{0,4}\d"
    r"|\d%? (?:mean error|faster|slower)"
)
"""What a measured or predicted figure looks like."""


def test_no_measured_figure_is_typed_by_hand(docs_modules: types.SimpleNamespace) -> None:
    """Each is a link to its result file, except in code."""
    facts = docs_modules.facts
    wrong = []
    for page in facts.pages():
        text = facts.FACT.sub("", prose(page))
        text = re.sub(r"^ {4}.*$|`[^`]*`", "", text, flags=re.MULTILINE)
        wrong += [f"{page.relative_to(ROOT)}: {line.strip()}" for line in text.splitlines() if MEASURED.search(line)]
    assert wrong == []


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


def test_symptoms_quote_messages_of_the_code() -> None:
    rows = tomllib.loads((DOCS / "troubleshooting.toml").read_text(encoding="utf-8"))["symptoms"]
    said = [
        node.value
        for path in (ROOT / "boost").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [row["message"] for row in rows if not any(row["message"] in text for text in said)] == []


def test_shares_of_parameters_are_those_of_the_presets() -> None:
    page = " ".join((DOCS / "families.md").read_text(encoding="utf-8").split())
    shares = [
        f"{parameter_count(load(f'cola-{size}').model) / parameter_count(load(f'llama-{size}').model):.0%}"
        for size in ("60m", "130m", "350m", "7b")
    ]
    assert "{} of the parameters remain at 60M, {} at 130M, {} at 350M".format(*shares) in page
    assert f"| `B silu(A x)` | {shares[3]} (" in page


def test_percentages_follow_from_the_published_perplexities() -> None:
    text = " ".join((DOCS / "worth.md").read_text(encoding="utf-8").split())
    rows = dict(re.findall(r"\| ([^|]+?) \| (\d[\d. |-]*\d) \|", text.partition("| 60M | 130M |")[2]))
    adamw, cola, apollo = (
        [[float(number) for number in cell.split(" - ")] for cell in rows[name].split(" | ")]
        for name in ("dense, AdamW", "`cola`", "dense, APOLLO")
    )
    against = [low[0] / number - 1 for low, numbers in zip(cola, adamw, strict=True) for number in numbers]
    worse = [low[0] / best[0] - 1 for low, best in zip(cola, apollo, strict=True)]
    assert f"is at best {-min(against):.1%} better and at worst {max(against):.1%} worse" in text
    for page in (text, " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())):
        assert f"{min(worse):.1%} to {max(worse):.1%}" in page


COMMAND = re.compile(r"(?:\bboost|-m boost\.cli\.main) (?P<name>plan calibrate|[a-z]+)\b(?P<words>[^`#]*)")
"""A command in a line of code: the rest of the line, without a comment."""


def test_commands_in_the_pages_have_their_flags() -> None:
    commands = next(action for action in build_parser()._actions if action.dest == "command").choices
    assert commands is not None
    keys = {f"--{key}" for key, _ in fields()}
    wrong, seen = [], 0
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        # What it launches; its own options are torchrun's.
        text = re.sub(r"\bboost launch [^`\n]*? -- ", "boost ", text)
        for line in re.findall(r"^ {4}.*$|^boost .*$|`boost [^`]*`", text, re.MULTILINE):
            for found in COMMAND.finditer(line):
                if found["name"] not in commands:
                    continue
                known = keys | flags(dict(commands)[found["name"]])
                used = re.findall(r"(?<!\S)--[a-z][\w.-]*", found["words"])
                seen += len(used)
                wrong += [
                    f"{page.name}: boost {found['name']} {flag}"
                    for flag in used
                    if flag not in known and not flag.startswith("--model.ranks.")
                ]
    assert seen > 170
    assert wrong == []


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """The flags of a command and of those below it."""
    own = {option for action in parser._actions for option in action.option_strings}
    below = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return own.union(*(flags(child) for children in below for child in children))


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
    assert len(drawn) == 6
    for name, text in drawn.items():
        assert text == (DOCS / "pictures" / name).read_text(encoding="utf-8"), (
            f"python docs/draw.py writes another {name}"
        )


@pytest.mark.slow
def test_the_fastest_layouts_are_what_the_planner_predicts_now(docs_modules: types.SimpleNamespace) -> None:
    by_gpus = docs_modules.by_gpus
    stored = {(cell["tokens"], cell["gpus"]): cell for cell in json.loads(by_gpus.RESULT.read_text())["cells"]}
    assert len(stored) == len(by_gpus.SEQUENCES) * len(by_gpus.GPUS)
    for sequences, gpus in ((4, 256), (64, 128)):
        assert by_gpus.cell(sequences, gpus) == stored[sequences * by_gpus.SEQ_LEN, gpus], "python docs/by_gpus.py"


FAMILY, OPTIMIZER, SCHEDULE = 0, 5, 6
"""Code blocks of docs/extend.md."""


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
    example("extend.md", OPTIMIZER, "lion")
    config = toy.toy_config(optim={"name": "lion", "lr": 1e-3, "weight_decay": 0.0})
    trained = Trained(config, 3)
    moved = {
        name: (value - trained.initial[name]).abs().max().item() for name, value in toy.weights(trained.model).items()
    }
    assert moved
    assert all(0 < each <= 3.001e-3 for each in moved.values()), moved  # three steps of at most lr


@pytest.mark.usefixtures("forgets")
def test_the_schedule_of_the_page_is_a_choice() -> None:
    example("extend.md", SCHEDULE, "schedules")
    optim = toy.toy_config(optim={"schedule": "inverse-sqrt", "warmup_steps": 4, "lr": 1.0}).optim
    assert [learning_rate(optim, step, 100) for step in (0, 3, 15)] == [0.25, 1.0, 0.5]


@pytest.mark.usefixtures("forgets")
def test_the_family_of_the_page_trains() -> None:
    example("extend.md", FAMILY, "narrow")
    config = toy.toy_config(model={"family": "narrow", "rank": 8})
    assert config.model.ranks == {"attn": 4}
    assert toy.weights(Trained(config, 2).model)["layers.0.attn.q.A"].shape == (4, 32)
    decoder = boost.nn.Decoder(family="narrow", vocab_size=64, dim=32, ffn_dim=48, layers=1, heads=4, rank=8)
    assert decoder.layers[0].attn.q_proj.rank == 4 and decoder.layers[0].mlp.up_proj.rank == 8
