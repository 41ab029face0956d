"""What the fields of an optimizer must agree on, and on what models it is one. Each rule names field, value and legal value."""

from collections.abc import Iterator

from boost.config.schema import Config, OptimConfig

OWNERS = {
    "exact_every": "loro",
    "refresh_only": "loro",
    "frobenius_decay": "adamw",
    "muon_lr": "muon",
    "muon_momentum": "muon",
    "muon_nesterov": "muon",
    "muon_adjust": "muon",
    "muon_steps": "muon",
}
"""Fields that one optimizer only gives a meaning."""

RESTARTS = ("restart_warmup_steps", "restart_delay")
"""Fields of the schedule cosine-restarts."""


def optimizer_problems(config: Config) -> Iterator[str]:
    """The rules that `optim` breaks, each in one line."""
    yield from _misplaced(config.optim)
    yield from _unsuitable(config)
    yield from _restarts(config)


def _misplaced(optim: OptimConfig) -> Iterator[str]:
    """Fields of another optimizer or schedule."""
    usual = OptimConfig.model_validate({"name": "adamw"})
    for field, owner in OWNERS.items():
        value, legal = getattr(optim, field), getattr(usual, field)
        if optim.name != owner and value != legal:
            yield (
                f"optim.{field} = {_said(value)} belongs to optim.name = '{owner}', not to '{optim.name}'; the legal value is "
                f"{_said(legal)}"
            )
    for field in RESTARTS:
        if (value := getattr(optim, field)) and optim.schedule != "cosine-restarts":
            yield (
                f"optim.{field} = {value} belongs to optim.schedule = 'cosine-restarts', not to '{optim.schedule}'; the legal "
                "value is 0"
            )


def _unsuitable(config: Config) -> Iterator[str]:
    """Models that an optimizer of factors is not for."""
    model, optim = config.model, config.optim
    if optim.name != "adamw" and not model.low_rank:
        yield (
            f"optim.name = '{optim.name}' is for the factors of a bottleneck, which model.family = 'dense' has not; take 'adamw', "
            "or model.family = 'svd'"
        )
    if optim.frobenius_decay and not model.low_rank:
        yield (
            f"optim.frobenius_decay = {optim.frobenius_decay} is for the factors of a bottleneck, which model.family = 'dense' "
            "has not; the legal value is 0"
        )
    if optim.name != "loro" or optim.refresh_only:
        return
    # An exact step turns the basis of the latents, and only where y = B (A x) does that leave the function as it is.
    if model.crosses or model.latent_act != "none":
        what = f"model.latent_act = '{model.latent_act}'" if not model.crosses else "model.family = 'lax'"
        yield (
            f"optim.name = 'loro' changes the basis of latents, and {what} is another function in each; take "
            "model.family = 'svd', or optim.refresh_only = true"
        )


def _restarts(config: Config) -> Iterator[str]:
    optim, train = config.optim, config.train
    if optim.name == "loro" and not optim.exact_every:
        yield "optim.exact_every = 0 leaves optim.name = 'loro' without an exact step; the published values are 500 and 200"
    if optim.schedule != "cosine-restarts":
        return
    if not optim.exact_every:
        yield (
            "optim.schedule = 'cosine-restarts' restarts with the moments of optim.name = 'loro'; take that, or schedule = 'cosine'"
        )
        return
    if optim.restart_warmup_steps > optim.exact_every:
        yield (
            f"optim.restart_warmup_steps = {optim.restart_warmup_steps} is longer than the optim.exact_every = "
            f"{optim.exact_every} steps between restarts; the largest legal value is {optim.exact_every}"
        )
    most = max(train.steps - optim.warmup_steps, 0) // optim.exact_every * optim.exact_every
    if optim.restart_delay % optim.exact_every:
        best = max((2 * optim.restart_delay + optim.exact_every) // (2 * optim.exact_every), 1) * optim.exact_every
        best = min(best, most)
        yield (
            f"optim.restart_delay = {optim.restart_delay} must be a multiple of optim.exact_every = {optim.exact_every}, or the "
            f"rate would dip where nothing restarts; the nearest legal value is {best}"
        )
    if optim.restart_delay > most:
        yield (
            f"optim.restart_delay = {optim.restart_delay} puts the cosine's top behind the end of train.steps = {train.steps} with "
            f"optim.warmup_steps = {optim.warmup_steps}; the largest legal value is {most}"
        )
    if optim.warmup_steps >= train.steps:
        yield (
            f"optim.warmup_steps = {optim.warmup_steps} leaves nothing of train.steps = {train.steps} to optim.schedule = "
            f"'cosine-restarts'; the largest legal value is {train.steps - 1}"
        )


def _said(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()
