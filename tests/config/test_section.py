"""Sections whose class is selected by one key: registration, listing, and additions by other packages."""

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from boost.config import load, rules
from boost.config.families import LowRankConfig
from boost.config.load import dense_of, fields
from boost.config.optimizers import AdamWConfig, Constant, Cosine, CosineRestarts, LOROConfig, MuonConfig
from boost.config.schema import Config, ModelConfig, OptimConfig
from boost.config.section import PLUGINS, Natural, load_plugins
from boost.errors import ConfigError
from boost.families import CoLAConfig, DenseConfig, LaXConfig, SVDConfig
from boost.optim.adamw import build_optimizer
from boost.parallel.mesh import Mesh
from tests import toy


def test_a_tag_selects_the_class() -> None:
    families = [type(ModelConfig.model_validate({"family": name})) for name in ("dense", "svd", "cola", "lax")]
    assert families == [DenseConfig, SVDConfig, CoLAConfig, LaXConfig]
    assert [type(OptimConfig(name=name)) for name in ("adamw", "loro", "muon")] == [AdamWConfig, LOROConfig, MuonConfig]
    schedules = [OptimConfig.model_validate({"schedule": name}).lr_schedule for name in ("cosine", "constant")]
    assert schedules == [Cosine(), Constant()]
    assert type(OptimConfig()) is AdamWConfig and type(ModelConfig()) is CoLAConfig  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        SVDConfig.model_validate({"family": "cola"})


def test_every_family_has_a_value_for_the_fields_that_all_code_reads() -> None:
    read = ("family", "rank", "ranks", "latent_act", "factor_init", "mlp_silu", "low_rank", "equation")
    answers = {
        name: tuple(getattr(ModelConfig.model_validate({"family": name}), f) for f in read)
        for name in ModelConfig.choices
    }
    assert answers["dense"] == ("dense", None, {}, "none", "none", True, False, "W x")
    assert answers["svd"] == ("svd", 128, {}, "none", "xavier", True, True, "B A x")
    assert answers["cola"] == ("cola", 128, {}, "silu", "cola", True, True, "B silu(A x)")
    gated = "B silu(A x), latents gated with those of the previous block"
    assert answers["lax"] == ("lax", 128, {}, "silu", "cola", True, True, gated)
    dense = ModelConfig.model_validate({"family": "dense"})
    assert (dense.rank_of(0, "attn.q"), dense.title) == (None, "dense")
    with pytest.raises(AttributeError, match="muon_lr"):
        OptimConfig().muon_lr  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.parametrize(
    "words", ["--model.family dense", "--model.family lax --optim.name muon", "--optim.schedule constant"]
)
def test_configurations_are_equal_pickled_copied_and_through_json(words: str) -> None:
    config = load(None, words.split())
    for again in (
        pickle.loads(pickle.dumps(config)), copy.deepcopy(config), config.model_copy(), config.model_copy(deep=True),
        Config.model_validate(config.model_dump()), Config.model_validate_json(config.model_dump_json()),
    ):  # fmt: skip
        assert again == config
        assert (type(again.model), type(again.optim)) == (type(config.model), type(config.optim))
    assert config.model_dump() == {section: getattr(config, section).model_dump() for section in Config.model_fields}


def test_a_copy_with_another_tag_is_of_another_class() -> None:
    cola = ModelConfig.model_validate({"dim": 64, "mlp_silu": False})
    dense = cola.model_copy(update={"family": "dense"})
    assert dense == DenseConfig.model_validate({"dim": 64})
    assert cola.model_copy(update={"rank": 7, "family": "cola"}).rank == 7
    loro = OptimConfig.model_validate({"name": "loro", "schedule": "cosine-restarts", "lr": 0.5})
    assert isinstance(loro.lr_schedule, CosineRestarts)
    assert loro.model_copy(update={"name": "adamw"}) == OptimConfig(lr=0.5)
    decaying = loro.model_copy(update={"schedule": "constant", "decay_steps": 7})
    assert (decaying.lr_schedule, decaying.lr, decaying.name) == (Constant(decay_steps=7), 0.5, "loro")
    with pytest.raises(ValidationError, match="belongs to model.family"):
        dense.model_copy(update={"rank": 8})


def test_every_key_says_which_choices_have_it() -> None:
    known = dict(fields())
    meanings = {key: info.description or "" for key, info in known.items()}
    assert len(list(fields())) == len(known), "each key once"
    for key, prefix in {
        "optim.muon_lr": "Only with optim.name = muon. ",
        "optim.exact_every": "Only with optim.name = loro. ",
        "optim.decay_steps": "Only with optim.schedule = constant. ",
        "optim.restart_delay": "Only with optim.schedule = cosine-restarts. ",
        "model.rank": "Only with model.family = svd | cola | lax. ",
        "model.gate": "Only with model.family = lax. ",
    }.items():
        assert meanings[key].startswith(prefix), key
    for tag, root in (("model.family", ModelConfig), ("optim.name", OptimConfig)):
        assert all(f"{value}: " in meanings[tag] for value in root.choices)
    assert not any("Only with" in meanings[key] for key in ("optim.lr", "model.dim", "optim.schedule"))


@pytest.fixture
def outside() -> Iterator[None]:
    """Registers an optimizer and a family of another package during a test."""

    class Lion(OptimConfig):
        """The sign of the momentum."""

        name: Literal["lion"] = "lion"
        lion_warmth: Natural = 3
        """Nothing in particular."""

        builder = f"{__name__}:built"

    class Ternary(LowRankConfig):
        """y = B sign(A x)."""

        family: Literal["ternary"] = "ternary"

    yield
    del OptimConfig.choices["lion"], ModelConfig.choices["ternary"]


def test_a_tag_value_belongs_to_one_class() -> None:
    with pytest.raises(TypeError, match="optim.name = 'adamw' is already registered to AdamWConfig"):

        class Other(OptimConfig):
            name: Literal["adamw", "other"] = "other"

    with pytest.raises(TypeError, match="Odd.name = 'even' is not one of the values in its annotation"):

        class Odd(OptimConfig):
            name: Literal["odd"] = "even"  # type: ignore[assignment]


def built(fused_params: object, config: Config, mesh: Mesh) -> Any:
    return "built", config.optim.lr


@pytest.mark.usefixtures("outside")
def test_a_class_of_another_package_is_a_choice_by_being_imported() -> None:
    config = load(None, ["--optim.name", "lion", "--optim.lion_warmth", "9", "--model.family", "ternary"])
    assert config.optim.model_dump()["lion_warmth"] == 9
    assert (config.model.rank, config.model.low_rank, config.model.family) == (128, True, "ternary")
    assert build_optimizer([], config, Mesh(toy.CPU)) == ("built", 3e-3)
    assert "lion: The sign of the momentum." in (dict(fields())["optim.name"].description or "")
    with pytest.raises(ConfigError, match="lion_warmth = 9 belongs to optim.name = 'lion', not"):
        load(None, ["--optim.lion_warmth", "9"])
    with pytest.raises(ConfigError, match="'lino' is not one of .*; did you mean 'lion'"):
        load(None, ["--optim.name", "lino"])


PLUGIN = """
from typing import Literal
from boost.families import CoLAConfig
from boost.config.section import Natural

class Narrow(CoLAConfig):
    \"\"\"CoLA of another package.\"\"\"

    family: Literal["narrow"] = "narrow"
    own_field: Natural = 3
    \"\"\"Its own.\"\"\"

    def problems(self, config):
        yield from super().problems(config)
        if config.parallel.tp > 2:
            yield f"parallel.tp = {config.parallel.tp} is too large"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a package whose plugin is a module with this text."""

    def write(text: str) -> None:
        (tmp_path / "narrow_plugin.py").write_text(text)
        points = {PLUGINS: [metadata.EntryPoint("narrow", "narrow_plugin", PLUGINS)]}
        monkeypatch.setattr(metadata, "entry_points", lambda group: points.get(group, []))
        monkeypatch.syspath_prepend(tmp_path)
        load_plugins.cache_clear()

    yield write
    ModelConfig.choices.pop("narrow", None)
    sys.modules.pop("narrow_plugin", None)
    load_plugins.cache_clear()


def test_the_modules_of_installed_packages_are_imported_for_an_unknown_name(install: Callable[[str], None]) -> None:
    install(PLUGIN)
    config = load("demo", ["--model.own_field", "4", "--model.family", "narrow"])
    assert type(config.model).__name__ == "Narrow" and isinstance(config.model, CoLAConfig)
    assert config.model.model_dump()["own_field"] == 4
    with pytest.raises(ConfigError, match="narow"):
        load("demo", ["--model.family", "narow"])
    with pytest.raises(ConfigError, match="own_field = 4 belongs to model.family = 'narrow', not to 'cola'"):
        load("demo", ["--model.own_field", "4"])
    dense = dense_of(config)
    assert dense.model.family == "dense" and dense.model.dim == config.model.dim and dense.train == config.train


def test_a_rule_of_a_family_may_read_the_mesh(install: Callable[[str], None]) -> None:
    """Also after another configuration with the same model has passed all checks, as in the planner."""
    install(PLUGIN)
    config = load("demo", ["--model.family", "narrow", "--parallel.tp", "2"])
    with pytest.raises(ConfigError, match="parallel.tp = 4 is too large"):
        rules.check(config.changed(parallel={"tp": 4}))


@pytest.mark.parametrize(("field", "value"), [("latent_act", "gelu"), ("factor_init", "he"), ("gate", "mine")])
def test_what_models_do_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch, field: str, value: str) -> None:
    """Otherwise it would be, without a word, what they compute if none of the names fits: the identity, CoLA's initialization."""
    monkeypatch.setattr(ModelConfig, "choices", dict(ModelConfig.choices))

    class Own(LaXConfig):
        family: Literal["own"] = "own"
        latent_act: Literal["silu", "none", "gelu"]  # type: ignore[assignment]
        factor_init: Literal["cola", "he"]  # type: ignore[assignment]
        gate: Literal["identity", "mine"] = "identity"  # type: ignore[assignment]

    config = load("demo", ["--model.family", "own", "--parallel.tp", "1"])
    with pytest.raises(
        ConfigError, match=rf"^model.{field} = '{value}' of .*'own' is not implemented; valid values: \w+, "
    ):
        load("demo", ["--model.family", "own", f"--model.{field}", value])
    with pytest.raises(ConfigError, match=rf"^model.{field} = '{value}' of"):
        toy.toy_decoder(config.changed(model={field: value}))


@pytest.mark.parametrize("text", ["import nothing_like_it", "raise SystemExit(3)", "class X("])
def test_a_plugin_that_cannot_be_imported_is_named(install: Callable[[str], None], text: str) -> None:
    install(text)
    with pytest.raises(
        ConfigError, match=r"^plugin 'narrow' cannot be imported: \w+: .*; fix 'narrow_plugin', or unin"
    ):
        load("demo")


def test_sections_are_keys_by_value() -> None:
    """Also with tables among their fields; a copy does not keep the hash of its original."""
    one, same = (load("demo", ["--model.ranks={ attn = 16, mlp = 32 }"]) for _ in range(2))
    assert one is not same and {one: 1}[same] == 1 and len({one.model, same.model}) == 1
    changed = one.train.model_copy(update={"seq_len": 2 * one.train.seq_len})
    assert {one.train, changed} == {same.train, changed} and hash(changed) != hash(one.train)
    assert hash(pickle.loads(pickle.dumps(one))) == hash(one) and pickle.loads(pickle.dumps(one)) == one
