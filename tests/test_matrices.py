"""`pairwise` keeps every legal pair and adds none."""

import itertools

from tests.matrices import Row, pairwise


def test_every_legal_pair_is_there_in_legal_rows() -> None:
    options = {"layout": ("a", "b", "c", "d"), "family": (1, 2, 3), "tp": (2, 4), "grouping": (True, False)}

    def legal(row: Row) -> bool:
        return not (row["layout"] == "a" and row["family"] == 1) and not (row["tp"] == 4 and row["family"] == 2)

    everything = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    rows = pairwise(options, legal)
    assert all(legal(row) for row in rows)
    assert len(rows) < len(everything) / 3
    for one, other in itertools.combinations(options, 2):
        wanted = {(row[one], row[other]) for row in everything if legal(row)}
        assert {(row[one], row[other]) for row in rows} == wanted
    assert rows == pairwise(options, legal)
