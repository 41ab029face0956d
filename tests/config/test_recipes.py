"""Published recipes: what they run, how they are shortened, and the command that a missing store needs."""

from boost.config import load, presets
from boost.config.recipes import find_recipe, heals, prepare_command, recipes, tokens_of


def test_every_recipe_is_its_preset() -> None:
    for name, recipe in recipes().items():
        config, preset = recipe.config(), load(recipe.preset)
        assert recipe.preset in presets() and name.startswith("c4-")
        assert (config.model, config.optim, config.train) == (preset.model, preset.optim, preset.train)
        assert config.run.dir == f"runs/{name}" and config.data.store == f"data/c4-{tokens_of(config)}"
        assert find_recipe(name) is find_recipe(recipe.preset) is recipe


def test_recipes_that_heal_are_short_enough_for_two_cores() -> None:
    for name, heal in heals().items():
        assert find_recipe(name) is heal and name.startswith("heal-") and name not in recipes()
        model = load(heal.preset).model
        assert model.family == "dense" and heal.seq_len <= 2048 and 0 < heal.size < 1
        assert heal.calibrate_tokens <= 8192 and heal.steps * heal.batch * heal.seq_len <= 40_000


def test_all_official_presets_have_a_recipe() -> None:
    official = {name for name in presets() if load(name).data.store == "data/c4"}
    shapes = {name for name in official if name.startswith("boost-")}
    assert {recipe.preset for recipe in recipes().values()} == official - shapes


def test_a_short_run_keeps_its_proportions() -> None:
    recipe = recipes()["c4-60m"]
    config = recipe.config(steps=100)
    assert (config.train.steps, config.optim.warmup_steps, config.train.eval_every) == (100, 20, 10)
    small = recipe.config(["--train.global_batch", "4", "--train.micro_batch", "4"], steps=10)
    assert small.train.steps == 10 and small.data.store == "data/c4-10240"
    own = recipe.config(["--optim.warmup_steps", "7", "--data.store", "data/mine", "--run.dir=runs/a"], steps=100)
    assert (own.optim.warmup_steps, own.data.store, own.run.dir) == (7, "data/mine", "runs/a")
    for each in recipes().values():
        for steps in (1, 20, 1500):
            assert each.config(steps=steps).train.steps == steps


def test_the_command_of_a_missing_store() -> None:
    command = prepare_command(load("cola-130m"))
    assert command.startswith("boost prepare --hf allenai/c4:en --max-tokens 2621440000 --heldout-split validation ")
    assert command.endswith("--out data/c4, or run the whole recipe with: boost recipe c4-130m")
    assert "boost recipe" not in prepare_command(load("boost-7b"))
    assert prepare_command(load("demo")) == "boost prepare --stdlib --out data/stdlib"
    mine = load("demo", ["--data.store", "data/mine"])
    assert prepare_command(mine) == "boost prepare INPUT --tokenizer train:4096 --out data/mine"


def test_the_command_of_a_missing_store_of_a_mixture() -> None:
    """Its share of the tokens, and the tokenizer of the first store."""
    mixed = load("cola-130m", ["--data.mixture", '{ "data/c4" = 3, "data/mine" = 1 }'])
    command = prepare_command(mixed, "data/c4")
    assert f"--max-tokens {2621440000 * 3 // 4} " in command and command.endswith("--out data/c4")
    assert prepare_command(mixed, "data/mine") == "boost prepare INPUT --tokenizer data/c4 --out data/mine"
