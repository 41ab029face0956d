"""Figures of experiments: common matplotlib setup, imported lazily."""

import importlib.util
from pathlib import Path
from typing import Any

from boost.errors import ConfigError


def pyplot() -> Any:
    """A matplotlib figure without a display; the same numbers give the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "boost"
    from matplotlib import pyplot as found

    return found


def needs_matplotlib() -> None:
    """Raises ConfigError if matplotlib is missing, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the plot needs matplotlib, which is not installed: pip install 'boost-llm[plots]'")


def tidy(axis: Any) -> None:
    """Removes the frame of a panel and adds a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.2)


def write(figure: Any, path: Path) -> None:
    """Writes a file in the matplotlib format of its suffix; closes the figure."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)
