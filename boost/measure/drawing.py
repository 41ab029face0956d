"""Common matplotlib setup for figures of experiments, imported lazily."""

import importlib.util
from pathlib import Path
from typing import Any

from boost.errors import ConfigError


def pyplot() -> Any:
    """Returns matplotlib's pyplot, set up without a display and with deterministic output."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "boost"
    from matplotlib import pyplot as found

    return found


def needs_matplotlib() -> None:
    """Raises ConfigError if matplotlib is missing, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the plot needs matplotlib, which is not installed: pip install matplotlib")


def tidy(axis: Any) -> None:
    """Removes the frame of an axes and adds a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.2)


def write(figure: Any, path: Path) -> None:
    """Writes a figure to a file, in the format of its suffix, and closes it."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)
