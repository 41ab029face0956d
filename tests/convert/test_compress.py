"""Factors of a dense model under one budget: exact where the weights are low-rank, the best ranks, clear refusals."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.config.architecture import parameter_count
from boost.convert.calibration import InputMoments
from boost.convert.compress import Candidate, Compression, allot, corrected, linear_parameters
from boost.convert.importing import Imported, import_weights
from boost.convert.spectrum import moment_root, solve_right
from boost.errors import BoostError, ConfigError
from tests import toy
from tests.convert.toys import LLAMA, all_logits, llama_folder, loaded, write_folder


def low_rank_folder(folder: Path, store: Path, rank: int, **changes: Any) -> None:
    """A LLaMA folder whose linears all have this rank, or with `changes` that of a Qwen3 with biases."""
    tensors = llama_folder(folder, vocab_size=300)
    generator = torch.Generator().manual_seed(3)

    def product(w: Tensor) -> Tensor:
        out, width = w.shape
        b, a = (torch.randn(shape, generator=generator) for shape in ((out, rank), (rank, width)))
        return b @ a * 0.2 / rank**0.5

    made = {name: product(w) if name.endswith("_proj.weight") else w for name, w in tensors.items()}
    for layer in range(LLAMA["num_hidden_layers"]) if changes else ():
        path = f"model.layers.{layer}.self_attn"
        made |= {f"{path}.{name}_norm.weight": torch.linspace(0.5, 1.5, 8) for name in "qk"}
        for name in "qkvo":
            made[f"{path}.{name}_proj.bias"] = torch.linspace(-1, 1, len(made[f"{path}.{name}_proj.weight"]))
    write_folder(folder, {**LLAMA, "vocab_size": 300, **changes}, made)
    (folder / "tokenizer.json").write_text((store / "tokenizer.json").read_text())


def compressed(source: Path, out: Path, store: Path, budget: float, **how: Any) -> Imported:
    compression = Compression(budget, str(store), **{"tokens": 2048, "multiple": 4, **how})
    return import_weights(source, out, None, None, compression, 10**9)


@pytest.mark.parametrize("changes", [{}, {"model_type": "qwen3", "attention_bias": True, "head_dim": 8}], ids=str)
def test_low_rank_weights_lose_nothing(changes: dict[str, Any], tmp_path: Path, store: Path) -> None:
    low_rank_folder(tmp_path / "theirs", store, 4, **changes)
    import_weights(tmp_path / "theirs", tmp_path / "dense", None, None, None, 10**9)
    done = compressed(tmp_path / "theirs", tmp_path / "svd", store, 0.5)
    dense, (svd, checkpoint) = loaded(tmp_path / "dense")[0], loaded(tmp_path / "svd")
    tokens, _ = toy.toy_tokens(toy.toy_config())
    expected = all_logits(dense, tokens)
    # Damping shows in directions that few tokens of the text have, and these tokens are random.
    assert (all_logits(svd, tokens) - expected).abs().max() <= 1e-2 * expected.abs().max()
    report = done.report
    assert report is not None and json.loads((tmp_path / "svd" / "report.json").read_text()) == report
    assert all(row["cost"] < 1e-8 and row["energy"] > 1 - 1e-6 for row in report["linears"])
    assert report["heldout"]["factorized"] == pytest.approx(report["heldout"]["dense"], abs=1e-4)
    assert report["parameters"]["factors"] <= 0.5 * linear_parameters(dense.model)
    freed = linear_parameters(dense.model) - report["parameters"]["factors"]
    assert parameter_count(dense.model) - parameter_count(checkpoint.config.model) == freed
    assert checkpoint.tokenizer.is_file()


def test_more_budget_loses_less(tmp_path: Path, store: Path) -> None:
    low_rank_folder(tmp_path / "theirs", store, 16)
    reports = [
        compressed(tmp_path / "theirs", tmp_path / f"svd{budget}", store, budget).report for budget in (0.4, 0.7, 1.0)
    ]
    costs = [sum(row["cost"] for row in report["linears"]) for report in reports if report]
    assert costs[0] > costs[1] > costs[2]
    for row in (row for report in reports if report for row in report["linears"]):
        larger = row["rank"] * (row["d_out"] + row["d_in"]) > row["d_out"] * row["d_in"]
        assert not larger or row["rank"] == 8, "no factors larger than the matrix, but for the least rank"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"budget": 0.0}, r"--budget = 0.0 must be in"),
        ({"budget": 1.2}, r"--budget = 1.2 must be in"),
        ({"budget": 0.1}, r"--budget = 0.1 is too small for factors of rank 4 .* smallest valid value: 0\.\d+"),
        ({"multiple": 0}, r"--multiple = 0 is out of range \(1 to 16.* nearest valid value: 1"),
        ({"multiple": 17}, r"--multiple = 17 is out of range .* nearest valid value: 16"),
        ({"tokens": 0}, r"--calibrate-tokens = 0 is too small"),
    ],
)
def test_what_cannot_be_made(tmp_path: Path, store: Path, how: dict[str, Any], message: str) -> None:
    low_rank_folder(tmp_path / "theirs", store, 4)
    with pytest.raises(ConfigError, match=message):
        compressed(tmp_path / "theirs", tmp_path / "out", store, **{"budget": 0.5, **how})
    assert not (tmp_path / "out").exists()


def test_calibration_text_needs_the_models_tokenizer(tmp_path: Path, store: Path) -> None:
    low_rank_folder(tmp_path / "theirs", store, 4)
    theirs = json.loads((tmp_path / "theirs" / "tokenizer.json").read_text())
    theirs["normalizer"] = {"type": "NFC"}
    (tmp_path / "theirs" / "tokenizer.json").write_text(json.dumps(theirs))
    with pytest.raises(BoostError, match="differs from that of the model"):
        compressed(tmp_path / "theirs", tmp_path / "out", store, 0.5)
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    llama_folder(tmp_path / "small", **{**config, "vocab_size": 64})
    with pytest.raises(ConfigError, match=r"--calibrate = .*, but model.vocab_size = 64"):
        compressed(tmp_path / "small", tmp_path / "out", store, 0.5)


def moments(x_TI: Tensor, low_TI: Tensor) -> list[InputMoments]:
    """Of two halves of the tokens."""
    pairs = zip(x_TI.tensor_split(2), low_TI.tensor_split(2), strict=True)
    return [InputMoments(low.T @ low / len(x_TI), x.T @ low / len(x_TI)) for x, low in pairs]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def test_equal_inputs_need_no_correction() -> None:
    w, x = random(6, 8, seed=0), random(40, 8, seed=1)
    found, share = corrected(w, moments(x, x), moment_root(torch.eye(6)))
    assert share == 0 and torch.equal(found, w)


def test_what_the_factorized_model_distorts_is_undone() -> None:
    w, x, distort = random(6, 8, seed=0), random(400, 8, seed=1), torch.eye(8) + 0.3 * random(8, 8, seed=2)
    found, share = corrected(w, moments(x, x @ distort.T), moment_root(torch.eye(6)))
    assert share == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(found @ distort, w, rtol=0, atol=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_taken_for_a_correction(seed: int) -> None:
    """x' lacks something of x that it says nothing about."""
    w, low, missing = random(6, 32, seed=0), random(128, 32, seed=10 + seed), random(128, 32, seed=20 + seed)
    halves = moments(low + missing, low)
    target, share = corrected(w, halves, moment_root(torch.eye(6)))
    whole = halves[0] + halves[1]
    fully = solve_right(w @ (whole.cross - whole.low), whole.low)
    assert share < 0.2 and (target - w).norm() < 0.2 * fully.norm()


def test_the_share_grows_with_the_text() -> None:
    w, distort = random(6, 32, seed=0), torch.eye(32) + 0.05 * random(32, 32, seed=2)
    shares = []
    for tokens in (128, 1024, 8192):
        low, missing = random(tokens, 32, seed=3), 0.5 * random(tokens, 32, seed=4)
        shares.append(corrected(w, moments(low @ distort.T + missing, low), moment_root(torch.eye(6)))[1])
    assert 0.05 < shares[0] < shares[1] < shares[2] and shares[2] > 0.95, shares


def gain(candidates: dict[str, Candidate], ranks: dict[str, int]) -> float:
    return sum(float(candidates[name].gains[:rank].sum()) for name, rank in ranks.items())


def size(candidates: dict[str, Candidate], ranks: dict[str, int]) -> int:
    return sum(candidates[name].size * rank for name, rank in ranks.items())


@pytest.mark.parametrize("multiple", [1, 2])
def test_no_other_choice_of_the_same_size_gains_more(multiple: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        candidates = {
            name: Candidate(
                torch.rand(6, generator=generator, dtype=torch.double).sort(descending=True).values, per_rank
            )
            for name, per_rank in (("a", 5), ("b", 7), ("c", 12))
        }
        budget = 24 * multiple + int(torch.randint(0, 60, (), generator=generator))
        ranks = allot(candidates, budget, multiple)
        assert all(rank % multiple == 0 and multiple <= rank <= 6 for rank in ranks.values())
        used = size(candidates, ranks)
        assert used <= budget
        others = itertools.product(range(multiple, 7, multiple), repeat=3)
        choices = [dict(zip("abc", each, strict=True)) for each in others]
        best = max(gain(candidates, each) for each in choices if size(candidates, each) <= used)
        # One step at most is lost where the best next one does not fit.
        assert gain(candidates, ranks) >= best - max(float(c.gains[:multiple].sum()) for c in candidates.values())
        left = budget - used
        for name, candidate in candidates.items():
            assert ranks[name] == 6 or multiple * candidate.size > left, "a step that fits is taken"


def test_a_linear_that_matters_more_gets_more() -> None:
    flat = torch.ones(8, dtype=torch.double)
    ranks = allot({"little": Candidate(flat, 10), "much": Candidate(2 * flat, 10)}, 110)
    assert ranks == {"little": 3, "much": 8}
