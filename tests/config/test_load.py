"""Configurations: what is legal is resolved, what is not is one line naming field, value and nearest valid value."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from boost.config import for_weights, load, presets, to_toml
from boost.config.architecture import parameter_count
from boost.config.load import from_tree, read_source
from boost.config.optimizers import Cosine
from boost.errors import ConfigError

BAD = [
    (["--data.mixture", "{ a = 0 }"], ["data.mixture.a = 0", "greater than 0"]),
    (["--data.mixture", "{ a = 'x' }"], ["data.mixture.a = 'x'", "number", '{ "data/c4" = 0.7, "data/code" = 0.3 }']),
    (["--data.mixture", "a"], ["data.mixture = 'a'", "table of numbers", '{ "data/c4" = 0.7, "data/code" = 0.3 }']),
    (["--data.store", "a", "--data.mixture", "{ b = 1 }"], ["data.store = 'a' and data.mixture are both set"]),
    (["--train.step", "3"], ["train.step", "did you mean 'train.steps'"]),
    (["--train.tp", "2"], ["train.tp", "did you mean 'parallel.tp'"]),
    (["--lr", "1"], ["--lr", "did you mean '--optim.lr'"]),
    (["stray"], ["stray"]),
    (["--run.dir", "r\udcff"], ["run.dir = 'r\\udcff' contains bytes that are not valid UTF-8"]),
    (["--train.sample_prompts", '["a", "\udcff"]'], ["train.sample_prompts", "not valid UTF-8"]),
    (["--train.steps"], ["train.steps", "no value", "integer"]),
    (["--train.steps", "abc"], ["train.steps", "'abc'", "integer", "1000"]),
    (["--train.steps", "1.5"], ["train.steps", "1.5", "integer"]),
    (["--train.steps", "0"], ["train.steps = 0", "smallest valid value: 1"]),
    (["--parallel.grouping", "False"], ["parallel.grouping", "'False'", "true or false"]),
    (["--optim.beta1", "1.5"], ["optim.beta1 = 1.5", "less than 1"]),
    (["--model.dim", "257"], ["model.dim = 257", "nearest valid value: 256"]),
    (["--model.dim", "33", "--model.heads", "3"], ["model.dim = 33", "nearest valid value: 36"]),
    (["--model.dim", "24", "--model.heads", "8", "--model.kv_heads", "4"], ["heads = 8", "odd head_dim of 3", "valid value: 12"]),
    (["--model.heads", "18", "--model.kv_heads", "4", "--model.dim", "72", "--parallel.tp", "2"], ["kv_heads = 4", "value: 6"]),
    (["--run.dir="], ["run.dir is empty"]),
    (["--optim.lr", "nan"], ["optim.lr"]),
    (["--model.family", "colla"], ["model.family = 'colla'", "did you mean 'cola'"]),
    (["--model.heads", "7"], ["model.heads = 7", "model.dim = 512", "nearest valid value: 8"]),
    (["--model.head_dim", "31"], ["head_dim = 31 must be even", "nearest valid value: 32"]),
    (["--model.nope_layers", "[1, 99]"], ["nope_layers = [1, 99] names block 99", "largest valid value: "]),
    (["--model.heads", "512"], ["model.heads = 512", "odd head_dim of 1", "nearest valid value: 256"]),
    (["--model.kv_heads", "3"], ["model.kv_heads = 3", "model.heads = 8", "nearest valid value: 4"]),
    (["--model.rank", "9000"], ["model.rank = 9000", "largest valid value: 512"]),
    (["--model.family", "dense", "--model.rank", "8"], ["model.rank = 8", "not to 'dense'; remove it", "'svd', 'cola' or"]),
    (["--model.family", "dense", "--model.ranks.attn", "8"], ["model.ranks.attn = 8", "not to 'dense'", "remove it"]),
    (["--model.factor_init", "none"], ["factor_init = 'none'", "cola, xavier, spectral"]),
    (["--model.family", "lax", "--model.gate", "none"], ["model.gate = 'none' is not one of identity, tensor, dense"]),
    (["--model.family", "lax", "--model.ranks.layers.1.attn.q", "8"], ["ranks.layers.1.attn.q", "use ranks.attn.q"]),
    (["--model.ranks.attn.w", "8"], ["model.ranks.attn.w", "attn.q", "layers.0.attn.q"]),
    (["--model.ranks.layers.8.attn.q", "8"], ["model.ranks.layers.8.attn.q", "layers.7.mlp.down"]),
    (["--model.ranks.layers.00.attn.q", "8"], ["model.ranks.layers.00.attn.q", "not a linear in this model"]),
    (["--model.ranks.attn", "9000"], ["model.ranks.attn = 9000", "largest valid value: 512"]),
    (["--model.ranks.attn", "many"], ["model.ranks.attn = 'many'", "integer"]),
    (["--model.ranks.attn"], ["--model.ranks.attn has no value", "integer"]),
    (["--model.ranks", "7"], ["model.ranks = 7", "table of integers", "{ attn = 128, mlp = 256 }"]),
    (
        ["--parallel.tp", "2", "--parallel.layout", "vanilla", "--model.ranks.mlp", "31"],
        ["tp = 2", "model.ranks.mlp = 31", "value: 1"],
    ),
    (
        ["--model.family", "lax", "--model.gate", "tensor", "--model.rank=40", "--parallel.layout", "vanilla", "--parallel.tp=4"],
        ["model.rank = 40", "5 x 8", "cannot shard 5 rows evenly", "parallel.tp = 4", "nearest valid value: 44"],
    ),
    (["--parallel.tp", "3"], ["parallel.tp = 3", "model.heads = 8", "nearest valid value: 4"]),
    (["--parallel.tp", "2", "--model.ffn_dim", "5461"], ["parallel.tp = 2", "model.ffn_dim = 5461", "nearest valid value: 1"]),
    (["--parallel.tp", "2", "--parallel.layout", "single"], ["parallel.layout = 'single'", "parallel.tp = 2"]),
    (["--parallel.tp", "2", "--model.family", "dense"], ["model.family = 'dense'", "use 'megatron-sp'"]),
    (
        ["--parallel.tp", "2", "--parallel.layout", "megatron"],
        ["layout = 'megatron' shards dense linears, but model.family = 'cola' has none; use 'btp', ", "or 'ulysses'", "'dense'"],
    ),
    (["--parallel.tp", "2", "--parallel.layout", "btpsp"], ["parallel.layout = 'btpsp'", "did you mean 'btp-sp'"]),
    (
        ["--parallel.tp", "2", "--parallel.layout", "btp-sp", "--parallel.norm", "sync"],
        ["parallel.norm = 'sync' belongs to parallel.layout = 'btp', not to 'btp-sp'; remove it, or use parallel.layout = 'btp'"],
    ),
    (["--parallel.tp", "4", "--model.dim", "30", "--model.heads", "5"], ["tp = 4", "dim = 30", "heads = 5", "valid value: 1"]),
    (["--parallel.tp", "4", "--model.vocab_size", "30"], ["parallel.tp = 4", "model.vocab_size = 30", "nearest valid value: 2"]),
    (
        ["--parallel.tp", "4", "--model.dim", "768", "--model.heads", "24", "--model.kv_heads", "6"],
        ["model.kv_heads = 6", "parallel.tp = 4", "nearest valid value: 8"],
    ),
    (["--parallel.tp", "4", "--parallel.layout", "vanilla", "--model.rank", "30"], ["model.rank = 30", "nearest valid value: 2"]),
    (
        ["--parallel.tp", "4", "--parallel.layout", "btp-sp", "--train.micro_batch", "1", "--train.seq_len", "30"],
        ["seq_len = 30", "gives 30 tokens", "parallel.tp = 4", "nearest valid value: 32"],
    ),
    (["--train.global_batch", "30"], ["train.global_batch = 30", "= 8", "nearest valid value: 32"]),
    (["--optim.schedule", "constant", "--optim.decay_steps", "2000"], ["optim.decay_steps = 2000", "optim.decay_steps: 1000"]),
    (["--optim.decay_steps", "5"], ["optim.decay_steps = 5", "optim.schedule = 'constant', not to 'cosine'", "remove it"]),
    (["--optim.schedule", "restarts"], ["optim.schedule = 'restarts'", "did you mean 'cosine-restarts'"]),
    (["--optim.lr_schedule", "cosine"], ["unknown key 'optim.lr_schedule'", "did you mean 'optim.schedule'"]),
    (["--model.family", "dense", "--train.recompute", "low-rank"], ["recompute = 'low-rank'", "dense", "'full-block'"]),
    (["--train.recompute", "low-rank-sharded"], ["recompute = 'low-rank-sharded'", "'btp'", "use 'low-rank'"]),
    (["--train.recompute_every", "99"], ["recompute_every = 99", "largest valid value:"]),
    (["--parallel.pp", "9"], ["pp x virtual = 9 x 1", "model.layers = 8", "valid value of parallel.pp: 8"]),
    (["--parallel.pp", "2", "--parallel.split", "[5, 4]"], ["split = [5, 4]", "2 numbers", "model.layers = 8"]),
    (["--parallel.split", "[5, 3]"], ["split = [5, 3]", "pp > 1"]),
    (
        ["--parallel.pp", "5", "--parallel.schedule", "interleaved-1f1b", "--parallel.virtual", "5"],
        ["pp x virtual = 5 x 5", "nearest valid value of model.layers: 25"],
    ),
    (
        ["--parallel.pp", "2", "--parallel.dp", "2", "--parallel.schedule", "interleaved-1f1b", "--parallel.virtual", "4",
         "--parallel.shard", "optimizer"],
        ["virtual = 4", "three stages", "largest valid value: 3"],
    ),
    (["--train.sample_prompts", "[1, 2]"], ["train.sample_prompts", "an item 1", "a list of texts", "['Once upon a time']"]),
    (["--train.sample_prompts", "[1"], ["train.sample_prompts", "list of texts"]),
    (["--parallel.pp", "2", "--parallel.split", "4"], ["split = 4", "list of integers", "[9, 7]"]),
    (["--parallel.pp", "2", "--parallel.split", "[4.5, 3]"], ["parallel.split", "an item 4.5", "a list of integers"]),
    (["--parallel.pp", "2", "--parallel.virtual", "2"], ["virtual = 2", "'1f1b': 1"]),
    (["--parallel.virtual", "2"], ["virtual = 2", "pp > 1", "valid value: 1"]),
    (
        ["--parallel.pp", "2", "--parallel.schedule", "interleaved-1f1b", "--parallel.virtual", "1"],
        ["virtual = 1", "set it to 2, or use '1f1b'"],
    ),
    (["--parallel.pp", "8"], ["global_batch = 32", "4 micro-batches", "'1f1b'", "nearest valid value: 64"]),
    (
        ["--parallel.pp", "2", "--parallel.schedule", "interleaved-1f1b", "--train.global_batch", "40"],
        ["5 micro-batches", "divisible by n // ", "nearest valid value: 48"],
    ),
    (["--parallel.shard_outer", "true"], ["shard_outer = true", "shard = 'none'", "'full' or 'optimizer'"]),
    (
        ["--parallel.tp", "2", "--parallel.shard", "full", "--parallel.shard_outer", "true"],
        ["shard_outer = true", "'btp-sp'", "'btp' replicates none; set shard_outer"],
    ),
    (["--train.profile", "[5, 2]"], ["train.profile = [5, 2] must be", "nearest valid value: [2, 5]"]),
    (["--train.param_dtype", "bfloat16"], ["train.param_dtype = 'bfloat16'", "'float32'"]),
    (["--optim.name", "loro"], ["optim.name = 'loro'", "latent_act = 'silu'", "model.family = 'svd'"]),
    (["--optim.name", "loro", "--model.family", "lax", "--model.over", "svd"], ["model.family = 'lax'", "'svd'"]),
    (["--optim.name", "muon", "--model.family", "dense"], ["optim.name = 'muon'", "dense", "'svd'"]),
    (
        ["--optim.muon_lr", "0.5"],
        ["optim.muon_lr = 0.5 belongs to optim.name = 'muon', not to 'adamw'; remove it, or use optim.name = 'muon'"],
    ),
    (["--optim.schedule", "cosine-restarts"], ["'cosine-restarts'", "optim.name = 'loro'"]),
    (
        ["--optim.name", "loro", "--model.family", "svd", "--optim.schedule", "cosine-restarts", "--optim.restart_delay", "1500"],
        ["restart_delay = 1500", "train.steps = 1000", "largest valid value of optim.restart_delay: 1000"],
    ),
    (
        ["--optim.name", "loro", "--model.family", "svd", "--optim.schedule", "cosine-restarts", "--optim.restart_delay", "1300"],
        ["restart_delay = 1300", "exact_every = 500", "nearest valid value: 1000"],
    ),
    (
        ["--optim.name", "loro", "--model.family", "svd", "--optim.schedule", "cosine-restarts", "--optim.exact_every", "4"],
        ["restart_warmup_steps = 5", "exact_every = 4", "largest valid value: 4"],
    ),
    (
        ["--optim.name", "loro", "--model.family", "svd", "--optim.schedule", "cosine-restarts", "--optim.warmup_steps", "1000"],
        ["warmup_steps = 1000", "largest valid value: 999"],
    ),
    (["--train.compute_dtype", "float16"], ["train.compute_dtype = 'float16'", "bfloat16"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words"), BAD, ids=[" ".join(o) for o, _ in BAD])
def test_a_mistake_is_one_line_with_field_value_and_way_out(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, overrides)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("source", "overrides", "micro"),
    [
        ("laptop", ["--parallel.dp", "2"], 8),
        ("demo", ["--train.global_batch", "7", "--train.micro_batch", "2"], 1),
        (None, ["--parallel.pp", "8"], 4),
        (None, ["--parallel.pp", "2", "--parallel.schedule", "interleaved-1f1b", "--train.global_batch", "40"], 5),
        (
            None,
            ["--parallel.tp", "4", "--parallel.layout", "btp-sp", "--train.micro_batch", "1", "--train.seq_len", "30"],
            2,
        ),
        (None, ["--parallel.tp", "2", "--parallel.overlap", "halves", "--train.global_batch", "36"], 6),
        (None, ["--parallel.dp", "3"], None),
    ],
)
def test_advice_that_does_not_change_the_training_comes_first(
    source: str | None, overrides: list[str], micro: int | None
) -> None:
    with pytest.raises(ConfigError) as error:
        load(source, overrides)
    before, found, rest = str(error.value).partition("set train.micro_batch = ")
    assert "nearest valid value" not in before or micro is None
    if micro is None:
        assert not found
        return
    assert rest.startswith(f"{micro}, which trains the same, or change the training: ")
    assert load(source, [*overrides, "--train.micro_batch", str(micro)]).train.micro_batch == micro


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[trian]\nsteps = 3", ["trian", "did you mean 'train'"]),
        ("train = 3", ["train = 3", "[train]"]),
        ("[train", ["not valid TOML"]),
        ("[train]\nsteps = true", ["train.steps = True", "integer"]),
        ("[run]\ndir = 3", ["run.dir = 3", "text"]),
        ('[model]\nfamily = ["x"]', ["model.family = ['x'] is not one of dense"]),
        ('[optim]\nschedule = ["constant"]', ["optim.schedule = ['constant'] is not one of cosine"]),
        ('[optim]\nschedule = "constant"\ndecay_steps = true', ["optim.decay_steps = True", "integer"]),
        ('[model]\nfamily = "dense"\n[model.ranks]\nattn.q = 64', ["model.ranks.attn.q = 64", "not to 'dense'"]),
    ],
)
def test_a_mistake_in_a_file(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load(str(tmp_path / "x.toml"))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("preset", presets())
def test_a_resolved_preset_is_a_configuration_of_the_same_run(preset: str, tmp_path: Path) -> None:
    config = load(preset)
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load(str(tmp_path / "resolved.toml")) == config
    assert read_source(preset)["model"].items() <= config.model.model_dump().items()


PUBLISHED = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008, "smollm2-1.7b": 1_711_376_384, "mistral-7b": 7_248_023_552, "llama3-8b": 8_030_261_248,
}  # fmt: skip
"""Parameters in the published weights."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_of_published_weights_have_their_size(name: str) -> None:
    assert parameter_count(load(name).model) == PUBLISHED[name]


def test_loro_recipes_are_the_published_scripts() -> None:
    """scripts/loro_c4 of repository mzf666/LORO-main: learning rate, K, warm-up, delay, steps; parameters as in its log and
    paper."""
    published = {
        "60m": (0.01, 500, 1000, 1000, 10_000, 42.77),
        "130m": (0.01, 500, 2000, 2000, 20_000, 94.00),
        "350m": (0.01, 500, 2000, 6000, 60_000, 185.22),
        "1b": (0.005, 200, 10_000, 10_000, 100_000, 609.31),
    }
    for size, facts in published.items():
        config = load(f"loro-{size}")
        o: Any = config.optim
        parameters = parameter_count(config.model) / 1e6
        assert (o.lr, o.exact_every, o.warmup_steps, o.restart_delay, config.train.steps, round(parameters, 2)) == facts
        assert (o.eps, o.weight_decay, o.clip, o.min_lr_ratio, o.restart_warmup_steps) == (1e-6, 0, 0, 0.1, 5)
        assert (config.model.family, config.model.factor_init, config.model.mlp_silu) == ("svd", "xavier", True)


def test_ranks_of_single_linears(tmp_path: Path) -> None:
    """The most specific name wins; a bare dotted name, which TOML parses as nested tables, is that name."""
    file = tmp_path / "run.toml"
    file.write_text('[model.ranks]\nmlp = 96\nattn.q = 64\n"layers.3.attn.q" = 32\n')
    model = load(str(file), ["--model.ranks.attn.o", "48", "--model.ranks.layers.2.mlp.up=80"]).model
    ranks = {"mlp": 96, "attn.q": 64, "layers.3.attn.q": 32, "attn.o": 48, "layers.2.mlp.up": 80}
    assert model.ranks == ranks
    assert [model.rank_of(3, slot) for slot in ("attn.q", "attn.o", "attn.k", "mlp.up")] == [32, 48, 128, 96]
    assert [model.rank_of(2, slot) for slot in ("attn.q", "mlp.up")] == [64, 80]
    again = tmp_path / "again.toml"
    again.write_text(to_toml(load(str(file))))
    assert load(str(again)).model.ranks == {"mlp": 96, "attn.q": 64, "layers.3.attn.q": 32}
    assert load(str(file), ["--model.family", "dense"]).model.ranks == {}


def test_overrides_win_and_are_read_as_their_fields_type() -> None:
    config = load("demo", ["--train.steps=7", "--optim.lr", "1", "--run.dir", "123", "--parallel.grouping", "false"])
    assert config.train.steps == 7
    assert config.optim.lr == 1.0
    assert config.run.dir == "123"
    assert config.parallel.grouping is False


def test_lax_over_cola_is_cola_with_crossings() -> None:
    recipe = load("cola-350m").model
    crossing = load("cola-350m", ["--model.family", "lax"]).model
    assert not recipe.mlp_silu
    assert crossing.model_dump(exclude={"family", "over", "gate"}) == recipe.model_dump(
        exclude={"family", "over", "gate"}
    )
    other = load("cola-350m", ["--model.family", "lax", "--model.over", "svd"]).model
    assert (other.latent_act, other.factor_init, other.mlp_silu) == ("none", "xavier", True)


def test_another_family_takes_its_own_defaults_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "resolved.toml").write_text(to_toml(load("demo")))
    for source in ("demo", str(tmp_path / "resolved.toml")):
        dense = load(source, ["--model.family", "dense", "--parallel.tp", "1"]).model
        assert (dense.rank, dense.latent_act, dense.dim) == (None, "none", 256)
        svd = load(source, ["--model.family=svd"]).model
        assert (svd.rank, svd.latent_act) == (64, "none")
        bent = load(source, ["--model.family", "svd", "--model.latent_act", "silu"]).model
        assert bent.latent_act == "silu"
        assert load(source, ["--model.family", "cola"]) == load("demo")
    assert load("cola-1b").model.mlp_silu is False
    assert load("cola-1b", ["--model.family", "dense"]).model.mlp_silu is True


def test_another_optimizer_takes_its_own_defaults_unless_told_otherwise(tmp_path: Path) -> None:
    plain: Any = load("loro-60m", ["--optim.name", "adamw"]).optim
    assert (plain.exact_every, plain.schedule, plain.lr_schedule, plain.lr) == (0, "cosine", Cosine(), 1e-2)
    cosine = load("loro-60m", ["--optim.schedule", "cosine"]).optim
    assert (cosine.exact_every, cosine.lr_schedule) == (500, Cosine())
    decaying = tmp_path / "decaying.toml"
    decaying.write_text('[optim]\nschedule = "constant"\ndecay_steps = 5\n')
    assert load(str(decaying), ["--optim.schedule", "cosine"]).optim == load(None).optim
    (tmp_path / "resolved.toml").write_text(to_toml(load("demo")))
    loro: Any = load(str(tmp_path / "resolved.toml"), ["--optim.name", "loro", "--model.family", "svd"]).optim
    assert (loro.exact_every, loro.schedule) == (500, "cosine")
    assert load("loro-60m", ["--optim.name", "loro"]) == load("loro-60m")


def test_configurations_are_frozen() -> None:
    config = from_tree({})
    with pytest.raises(Exception, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]


@pytest.mark.slow
def test_the_configuration_needs_no_torch() -> None:
    code = "import boost.config, boost.plan.collectives, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_a_mistake_is_answered_before_torch_is_imported() -> None:
    mistakes = {
        "train demo --train.step 3": "unknown key 'train.step'",
        "train demo --data.store /nope": "/nope: no token store here",
        "train demo --data.store /nope --start-from /nope": "no checkpoint at '/nope': no such folder",
        "eval /nope": "no checkpoint at '/nope': no such folder",
        "generate /nope@best --prompt x": "no checkpoint at '/nope@best': no such folder",
        "export /nope --out x": "no checkpoint at '/nope': no such folder",
        "checkpoint verify /nope": "no checkpoint at '/nope': no such folder",
        "checkpoint list /nope": "no checkpoint at '/nope': no such folder",
        "import /nope --out x": "there is no folder at '/nope'",
    }
    code = (
        "import sys; from boost.cli.main import main; codes = [main(words.split()) for words in sys.argv[1:]];"
        "assert 'torch' not in sys.modules; sys.exit(codes != [2] * len(codes))"
    )
    done = subprocess.run([sys.executable, "-c", code, *mistakes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, said in zip(done.stderr.splitlines(), mistakes.values(), strict=True):
        assert line.startswith(f"boost: error: {said}")


@pytest.mark.parametrize(
    "overrides",
    [
        "--parallel.tp 8 --model.kv_heads 2",
        "--parallel.tp 2 --parallel.layout btp --model.rank 5",
        "--parallel.tp 16 --parallel.layout vanilla --parallel.vanilla published",
        "--parallel.layout megatron",
        "--train.recompute low-rank-sharded --parallel.layout btp-sp",
        "--train.recompute full-block --model.family dense --train.recompute_every 2",
        "--parallel.pp 8 --train.micro_batch 1 --parallel.shard full",
        "--parallel.pp 3 --parallel.split [3,3,2] --train.micro_batch 1",
        "--parallel.pp 4 --parallel.schedule gpipe --train.micro_batch 32",
        "--parallel.pp 2 --parallel.schedule interleaved-1f1b --parallel.dp 2 --parallel.shard optimizer",
        "--parallel.pp 2 --parallel.schedule interleaved-1f1b --parallel.virtual 4",
        "--parallel.schedule interleaved-1f1b",
        "--optim.name muon --model.family lax --parallel.tp 2 --parallel.dp 2 --parallel.shard full",
    ],
)
def test_what_a_layout_can_carry_is_legal(overrides: str) -> None:
    load(None, overrides.split())


def test_a_mixture_and_a_store_replace_each_other(tmp_path: Path) -> None:
    config = load(None, ["--data.mixture", '{ "data/v1.2" = 3, b = 0.5 }'])
    assert config.data.sources == {"data/v1.2": 3.0, "b": 0.5}
    (file := tmp_path / "run.toml").write_text(to_toml(config))
    assert load(str(file)).data == config.data
    one = load(str(file), ["--data.store", "c"])
    assert one.data.sources == {"c": 1.0}
    file.write_text('[data]\nstore = "c"\n')
    assert load(str(file), ["--data.mixture", "{ a = 1, b = 2 }"]).data.sources == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(("family", "lr"), [("dense", 3e-4), ("svd", 3e-4), ("cola", 1e-4), ("lax", 1e-4)])
def test_defaults_suit_the_weights_that_a_run_starts_from(family: str, lr: float) -> None:
    source = load(None, ["--train.seq_len", "64"])
    words = ["--model.family", family, "--train.steps", "7"]
    config = for_weights(load(None, words), source)
    assert (config.optim.lr, config.train.seq_len, config.train.steps) == (lr, 64, 7)
    words += ["--optim.lr", "0.003", "--train.seq_len", "256"]  # chosen, even if as the defaults for new weights
    assert for_weights(load(None, words), source) == load(None, words)


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "run.toml"
    file.write_text('[run]\ndir = "~/x"\nfallback_dir = "~/y"\n[data]\nmixture = { "~/a" = 1, "b~" = 2 }\n')
    config = load(str(file), ["--distill.teacher=~/t"])
    paths = config.run.dir, config.run.fallback_dir, config.distill.teacher
    assert paths == ("/home/me/x", "/home/me/y", "/home/me/t")
    assert list(config.data.sources) == ["/home/me/a", "b~"]
