"""`boost export` of families: each says what code of transformers computes it."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from boost.config.families import ModelConfig
from boost.convert.formats import form_of, read_folder
from boost.errors import ConfigError
from boost.families import CoLAConfig, DenseConfig
from boost.train.checkpoint import Checkpoint, open_checkpoint
from tests import toy
from tests.convert.toys import all_logits, bring, give, loaded, save

FAMILY = '''
from typing import ClassVar, Literal

from boost.families import CoLAConfig


class CopyConfig(CoLAConfig):
    """CoLA under another name."""

    family: Literal["cola-copy"] = "cola-copy"
    modeling: ClassVar[str] = f"{__name__}:modeling_copy.py"
    note: str = "none"
    """Its own."""
'''

MODELING = """
import torch.nn.functional as F

from .modeling_boost import BoostBottleneck, BoostConfig, BoostForCausalLM, BoostModel


class CopyBottleneck(BoostBottleneck):
    def forward(self, x, prev_latents):
        h = F.silu(self.A(x))
        return self.B(h), h


class CopyConfig(BoostConfig):
    bottleneck = CopyBottleneck


class CopyModel(BoostModel):
    config_class = CopyConfig


class CopyForCausalLM(BoostForCausalLM):
    config_class = CopyConfig
"""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families of this test are forgotten after it."""
    monkeypatch.setattr(ModelConfig, "choices", dict(ModelConfig.choices))


@pytest.fixture
def checkpoint(own: None, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Checkpoint]:
    """Saves a model of the family `cola-copy`, whose folder has this modeling file."""
    (tmp_path / "plugin").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "plugin")

    def make(modeling: str) -> Checkpoint:
        (tmp_path / "plugin" / "copy_family.py").write_text(FAMILY)
        (tmp_path / "plugin" / "modeling_copy.py").write_text(modeling)
        monkeypatch.delitem(sys.modules, "copy_family", raising=False)
        importlib.import_module("copy_family")
        model = {"family": "cola-copy", "note": "kept", "init_std": 0.5, "ranks": {"mlp": 6}}
        return open_checkpoint(save(tmp_path / "c", toy.toy_config("float32", model=model), store / "tokenizer.json"))

    return make


@pytest.mark.slow
@torch.no_grad()
def test_transformers_loads_the_familys_own_code(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    path, out = checkpoint(MODELING).path, tmp_path / "out"
    give(path, out)
    ours, _ = loaded(path)
    tokens, _ = toy.toy_tokens(toy.toy_config())
    expected = all_logits(ours, tokens)

    for folder in (out, tmp_path / "again"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(theirs).__name__ == "CopyForCausalLM" and theirs.config.note == "kept"
        assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "CopyBottleneck"
        assert (theirs(tokens).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        body = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
        torch.testing.assert_close(theirs.lm_head(body(tokens).last_hidden_state), theirs(tokens).logits)
        theirs.save_pretrained(tmp_path / "again")
        # Where `Trainer` looks before it shifts labels for label smoothing.
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        assert "CopyForCausalLM" in names.values()

        back = bring(folder, tmp_path / f"back from {folder.name}")
        assert back.model == ours.model
        assert not [note for note in back.notes if "config.json" in note]
        assert torch.equal(all_logits(loaded(back.path)[0], tokens), expected)


def test_a_family_without_code_is_refused_before_anything_is_written(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subclass of a built-in family, too: it may compute something else."""
    path, out = checkpoint(MODELING.replace("class CopyForCausalLM", "class OtherForCausalLM")).path, tmp_path / "out"
    family: Any = ModelConfig.choices["cola-copy"]
    for modeling, reason in (
        (family.modeling, "substring not found"),
        ("copy_family:modeling_none.py", "No such file"),
        ("no_module:modeling_copy.py", "No module named 'no_module'"),
        ("", "modeling = ''"),
        (None, "modeling = ''"),
    ):
        monkeypatch.setattr(family, "modeling", modeling)
        if modeling is None:
            monkeypatch.delattr(family, "modeling")
            assert family.modeling == CoLAConfig.modeling
        with pytest.raises(ConfigError, match=r"model\.family = 'cola-copy' .*set `modeling` in ") as refused:
            give(path, out)
        assert reason in str(refused.value) and "\n" not in str(refused.value)
        assert not out.exists()
    monkeypatch.setattr(family, "modeling", "boost")
    give(path, out)
    content = json.loads((out / "config.json").read_text())
    assert (content["architectures"], content["note"]) == (["BoostForCausalLM"], "kept")
    del ModelConfig.choices["cola-copy"]
    with pytest.raises(ConfigError, match=r"cannot train: model\.family.*'cola-copy'") as refused:
        read_folder(out)
    assert "\n" not in str(refused.value)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"family": "dense"}, "llama"),
    ({"family": "svd"}, "merged"),
    ({"family": "cola", "latent_act": "none"}, "merged"),
    ({"family": "ours", "latent_act": "none"}, "merged"),
    ({"family": "ours"}, "cola"),
    ({"family": "svd", "latent_act": "silu"}, "cola"),
    ({"family": "ours", "ranks": {"mlp": 6}}, "boost"),
    ({"family": "lax", "over": "svd"}, "boost"),
    ({"family": "plain"}, "boost"),
    ({"family": "bare"}, "boost"),
]


@pytest.mark.parametrize(("model", "form"), FORMS, ids=str)
def test_what_a_model_computes_decides_its_form(own: None, model: dict[str, Any], form: str) -> None:
    """Not the family's name: `ours` is CoLA with other defaults, `plain` and `bare` do not say that transformers computes them."""

    class OursConfig(CoLAConfig):
        family: Literal["ours"] = "ours"
        modeling = "boost"

    class PlainConfig(DenseConfig):
        family: Literal["plain"] = "plain"
        modeling = "plain:modeling_plain.py"

    class BareConfig(DenseConfig):
        family: Literal["bare"] = "bare"

    assert form_of(toy.toy_config(model={"kv_heads": 8, **model}).model, merge=True) == form
