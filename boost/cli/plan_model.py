"""Resolves `--model` of `boost plan`: a size, a preset, a TOML file, or the config.json of a Hugging Face folder."""

from pathlib import Path
from typing import Any

from boost.config import presets
from boost.config.load import read_source
from boost.errors import ConfigError

LONGEST = 8192
"""Maximum default of --seq, for Hugging Face models with a longer context."""


def hugging_face_folder(model: str) -> Path | None:
    """Returns the folder of a config.json; None if `model` is something else."""
    try:
        path = Path(model)
        if path.name == "config.json" and path.is_file():
            return path.parent
        return path if (path / "config.json").is_file() else None
    except (OSError, ValueError):  # the name is too long, or contains NUL
        return None


def source_of(model: str) -> str:
    """Returns the preset, file or folder for '7b', 'cola-1b', 'my.toml', 'llama/config.json'. Raises ConfigError."""
    sizes = [name.removeprefix("boost-") for name in presets() if name.startswith("boost-")]
    if model.lower() in sizes:
        return f"boost-{model.lower()}"
    if model not in presets() and not Path(model).is_file() and hugging_face_folder(model) is None:
        ordered = sorted(sizes, key=lambda size: int(size.rstrip("b")))
        raise ConfigError(
            f"--model = '{model}' is not a size, preset, TOML file or Hugging Face folder; sizes: {', '.join(ordered)}; "
            "'boost config' lists the presets, such as llama3-8b"
        )
    return model


def tree_of_model(model: str) -> dict[str, Any]:
    """Reads the document that `--model` names, without validating it. Raises ConfigError, including for a config.json with a
    field that our decoder does not implement."""
    folder = hugging_face_folder(model)
    if folder is None:
        return read_source(source_of(model))
    from boost.convert.formats import read_folder

    found = read_folder(folder)
    return {"model": found.model.model_dump(exclude_none=True), "train": {"seq_len": min(found.context, LONGEST)}}
