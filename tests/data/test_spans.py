"""A loss mask in spans is the mask."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from boost.data.spans import Spans, boundaries_of


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.data())
def test_spans_are_the_mask(values: list[bool], data: st.DataObject) -> None:
    mask = np.array(values)
    spans = Spans(boundaries_of(mask))
    assert (np.diff(spans.boundaries) > 0).all()
    start = data.draw(st.integers(0, len(mask) - 1))
    length = data.draw(st.integers(0, len(mask) - start))
    np.testing.assert_array_equal(spans.counted(start, length), mask[start : start + length])
    if mask.any():
        positions = np.arange(len(mask) + 1)
        np.testing.assert_array_equal(spans.before(positions), [mask[:p].sum() for p in positions])
