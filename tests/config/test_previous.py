"""Configurations written by the previous release, which listed every field of every choice, load to the same settings.

The .toml files are resolved run files; the .json files are the "config" entry of checkpoints.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from boost.config import load, to_toml
from boost.config.load import from_tree
from boost.errors import ConfigError

FOLDER = Path(__file__).parent / "previous"
NAMES = sorted(path.name for path in FOLDER.iterdir())


def document(name: str) -> dict[str, Any]:
    text = (FOLDER / name).read_text()
    return json.loads(text) if name.endswith(".json") else tomllib.loads(text)


def test_every_family_optimizer_and_schedule_is_among_them() -> None:
    written = [document(name) for name in NAMES]
    assert {each["model"]["family"] for each in written} == {"dense", "svd", "cola", "lax"}
    assert {each["optim"]["name"] for each in written} == {"adamw", "loro", "muon"}
    assert {each["optim"]["schedule"] for each in written} == {"cosine", "constant", "cosine-restarts"}


@pytest.mark.parametrize("name", NAMES)
def test_a_document_of_the_previous_release_has_the_same_settings(name: str) -> None:
    written, config = document(name), from_tree(document(name))
    written["train"]["compile"] = {False: "none", True: "blocks"}[
        written["train"]["compile"]
    ]  # was whether to compile blocks
    usual = json.loads(from_tree({}).model_dump_json())
    for section, now in json.loads(config.model_dump_json()).items():
        new = now.keys() - written[section].keys()  # of a later release: it says nothing, so that nothing changes
        assert {key: now[key] for key in new} == {key: usual[section][key] for key in new}, section
        assert {key: now[key] for key in now.keys() - new}.items() <= written[section].items(), section
        # A field of another choice: read, it still has its neutral value.
        for key in written[section].keys() - now.keys():
            assert getattr(getattr(config, section), key, written[section][key]) == written[section][key]


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".toml")])
def test_a_run_file_of_the_previous_release_is_rewritten_without_what_has_no_meaning(name: str, tmp_path: Path) -> None:
    config = load(str(FOLDER / name))
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load(str(tmp_path / "again.toml")) == config == from_tree(document(name.replace(".toml", ".json")))


def test_another_choice_over_a_document_of_the_previous_release() -> None:
    dense = str(FOLDER / "dense-adamw.toml")
    model = load(dense, ["--model.family", "cola", "--optim.name", "muon"]).model
    assert (model.rank, model.latent_act, model.factor_init) == (128, "silu", "cola")
    assert load(dense, ["--model.family", "svd", "--optim.name", "loro"]).optim.exact_every == 500
    lax = load(str(FOLDER / "cola-constant.toml"), ["--model.family", "dense", "--optim.schedule", "cosine"])
    assert (lax.model.rank, lax.model.ranks, lax.model.mlp_silu, lax.optim.schedule) == (None, {}, True, "cosine")


@pytest.mark.parametrize(
    ("name", "section", "key", "value"),
    [
        ("dense-adamw.json", "model", "rank", 8),
        ("dense-adamw.json", "model", "latent_act", "silu"),
        ("cola-muon.json", "model", "gate", "tensor"),
        ("cola-muon.json", "optim", "exact_every", 500),
        ("cola-muon.json", "optim", "restart_warmup_steps", 5),
        ("svd-loro.json", "optim", "muon_momentum", 0.9),
    ],
)
def test_a_value_that_is_not_neutral_is_refused(name: str, section: str, key: str, value: object) -> None:
    tree = document(name)
    tree[section][key] = value
    with pytest.raises(ConfigError, match=f"{section}.{key} = {value!r} belongs to {section}"):
        from_tree(tree)
