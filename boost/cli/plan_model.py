"""What `--model` of `boost plan` names: a size, a preset, a TOML file, or the config.json of a Hugging Face folder."""

from pathlib import Path
from typing import Any

from boost.config import presets
from boost.config.load import read_source
from boost.errors import ConfigError

LONGEST = 8192
"""Tokens of a sequence that is planned for unless --seq says more, of a model whose context may be longer."""


def hugging_face_folder(model: str) -> Path | None:
    """The folder of a config.json; None for another kind of model."""
    try:
        path = Path(model)
        if path.name == "config.json" and path.is_file():
            return path.parent
        return path if (path / "config.json").is_file() else None
    except (OSError, ValueError):  # a name that is too long, or holds NUL
        return None


def source_of(model: str) -> str:
    """The preset, file or folder for '7b', 'cola-1b', 'my.toml', 'llama/config.json'. Raises ConfigError."""
    sizes = [name.removeprefix("boost-") for name in presets() if name.startswith("boost-")]
    if model.lower() in sizes:
        return f"boost-{model.lower()}"
    if model not in presets() and not Path(model).is_file() and hugging_face_folder(model) is None:
        ordered = sorted(sizes, key=lambda size: int(size.rstrip("b")))
        raise ConfigError(
            f"--model = '{model}' is not a size, preset, TOML file or Hugging Face folder; sizes: {', '.join(ordered)}; "
            "'boost config' lists the presets, llama3-8b among them"
        )
    return model


def tree_of_model(model: str) -> dict[str, Any]:
    """The document of what `--model` names, unchecked. Raises ConfigError, also for a config.json that our decoder does not
    implement, with the field."""
    folder = hugging_face_folder(model)
    if folder is None:
        return read_source(source_of(model))
    from boost.convert.formats import read_folder

    found = read_folder(folder)
    return {"model": found.model.model_dump(exclude_none=True), "train": {"seq_len": min(found.context, LONGEST)}}
