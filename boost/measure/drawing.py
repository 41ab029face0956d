"""Pictures of experiments: one set-up of matplotlib, which is imported where something is drawn and not before."""

from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """matplotlib's, without a screen; the same bytes for the same numbers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "boost"
    from matplotlib import pyplot as found

    return found


def tidy(axis: Any) -> None:
    """A panel without a frame, on a faint grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.2)


def write(figure: Any, path: Path) -> None:
    """Into a file of any format that matplotlib knows by its suffix; closes the figure."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)
