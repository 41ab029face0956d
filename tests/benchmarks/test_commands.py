"""`python -m benchmarks` reports invalid arguments before it starts any process."""

import pytest

from benchmarks.commands import main

BAD = [
    (["recompute", "--tp", "0"], ["--tp = 0", "smallest valid value: 1"]),
    (["recompute", "--rounds", "6"], ["--rounds = 6", "smallest valid value: 7"]),
    (["recompute", "--batches", "4", "-1"], ["--batches = -1", "smallest valid value: 1"]),
    (["recompute", "--tp", "3"], ["parallel.tp = 3", "nearest valid value"]),
    (["validation", "--measure"], ["--measure and --hardware FILE need each other", "boost plan calibrate"]),
    (["report", "--results", "/nowhere"], ["--results = '/nowhere'", "contains no results"]),
    (["steps", "--rounds", "6"], ["--rounds = 6", "smallest valid value: 7"]),
    (["steps", "--tp", "0"], ["--tp = 0", "smallest valid value: 1"]),
    (["steps", "--run.device", "cpu", "--hardware", "h100-80g"], ["--hardware = 'h100-80g'", "boost plan calibrate"]),
    (["steps", "--run.device", "cpu", "--tp", "3"], ["parallel.tp = 3", "nearest valid value"]),
    (["steps", "--train.step", "3"], ["train.step", "did you mean"]),
    (["single", "--rounds", "6"], ["--rounds = 6", "smallest valid value: 7"]),
    (["single", "--model.dim", "1000"], ["model.heads = 8", "nearest valid value: 10"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_a_mistake_is_one_line(words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert all(word in err for word in said), err
