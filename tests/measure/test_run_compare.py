import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from boost.measure.run_compare import Curve, averaged, config_difference, curves, text_plot
from boost.measure.run_record import read_run
from tests.measure.made_runs import make_run


def test_only_keys_that_differ_are_a_difference(tmp_path: Path) -> None:
    flags = [["--model.family", "svd"], ["--model.family", "dense", "--optim.lr", "0.5"], ["--model.family", "svd"]]
    runs = [read_run(make_run(tmp_path / str(number), *words)) for number, words in enumerate(flags)]
    assert config_difference([runs[0], runs[2]]) == {}
    found = config_difference(runs)
    assert found["model.family"] == ["svd", "dense", "svd"] and found["optim.lr"][1] == 0.5
    rank = runs[0].config["model.rank"]
    assert found["model.rank"] == [rank, None, rank], "dense has none"
    assert "run.dir" not in found and "train.steps" not in found


def test_curves_by_steps_and_by_tokens(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / "a")), read_run(make_run(tmp_path / "b", steps=3))]
    steps, tokens = curves(runs, "heldout_loss", "step"), curves(runs, "heldout_loss", "tokens")
    assert [x for x, _ in steps[0].points] == [5, 10, 15, 20] and [x for x, _ in tokens[0].points] == [
        320,
        640,
        960,
        1280,
    ]
    assert [curve.letter for curve in steps] == ["A"], "the other has no evaluation"
    assert [curve.letter for curve in curves(runs, "loss", "step")] == ["A", "B"]


def test_a_plot_is_high_where_the_curve_is(tmp_path: Path) -> None:
    falling = Curve("A", "a", [(float(x), 10.0 - x) for x in range(1, 10)])
    level = Curve("B", "b", [(1.0, 9.0), (9.0, 9.0)])
    lines = text_plot([falling, level], 40, 9)
    assert lines[0].startswith("         9 |") and "B" in lines[0] and "*" in lines[0], "both start at 9"
    assert lines[8].rstrip().endswith("A") and lines[8].startswith("         1 |")
    columns = [line.index("A") for line in lines[1:9]]
    assert columns == sorted(columns)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(-1e6, 1e6).map(lambda y: round(y, 3))), min_size=1, max_size=50
    ).map(sorted),
    st.integers(20, 120),
    st.integers(2, 20),
)
def test_any_curve_fits_in_its_plot(points: list[tuple[float, float]], width: int, height: int) -> None:
    lines = text_plot([Curve("A", "a", points)], width, height)
    assert len(lines) == height + 2 and max(map(len, lines)) <= max(width, 22) and "A" in "".join(lines[:height])
    means = averaged(points, 7, max(x for x, _ in points))
    assert len(means) <= 7 and all(math.isfinite(y) for _, y in means)
    assert min(y for _, y in points) - 1e-3 <= means[0][1] <= max(y for _, y in points) + 1e-3


def test_a_mean_is_over_equal_parts() -> None:
    assert averaged([(1, 1.0), (2, 3.0), (9, 5.0), (10, 7.0)], 2, 10) == [(1.5, 2.0), (9.5, 6.0)]
    assert averaged([(0, 2.0)], 5, 0) == [(0, 2.0)]
