"""Problems distributed to processes: each has one owner, load is balanced, and padding is small."""

from hypothesis import given
from hypothesis import strategies as st

from boost.config.factors import FactorShape, deal, deal_grams

PROBLEMS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=20)


@given(PROBLEMS, st.integers(1, 9))
def test_every_problem_has_one_owner_and_room_for_its_solution(problems: list[tuple[int, int]], processes: int) -> None:
    costs, sizes = zip(*problems, strict=True)
    dealt = deal(costs, sizes, processes)
    assert sorted(number for process in range(processes) for number in dealt.on(process)) == list(range(len(problems)))
    taken = [element for start, size in zip(dealt.starts, sizes, strict=True) for element in range(start, start + size)]
    assert len(taken) == len(set(taken)) == sum(sizes) and max(taken) < dealt.elements
    if dealt.kind == "all-gather":
        assert dealt.elements == processes * dealt.part <= 2 * sum(sizes)
        assert all(start // dealt.part == owner for start, owner in zip(dealt.starts, dealt.owners, strict=True))
    else:
        assert dealt.elements == dealt.part == sum(sizes)


@given(PROBLEMS, st.integers(1, 9))
def test_the_busiest_process_has_at_most_one_problem_more_than_its_share(
    problems: list[tuple[int, int]], processes: int
) -> None:
    costs, sizes = zip(*problems, strict=True)
    dealt = deal(costs, sizes, processes)
    busiest = max(sum(costs[number] for number in dealt.on(process)) for process in range(processes))
    assert busiest <= sum(costs) / processes + max(costs)


def test_equal_problems_go_round_in_turn() -> None:
    dealt = deal([7] * 5, [3] * 5, 2)
    assert (dealt.owners, dealt.starts, dealt.part) == ((0, 1, 0, 1, 0), (0, 9, 3, 12, 6), 9)


def test_an_expensive_problem_is_not_beside_others() -> None:
    """Dealt round-robin, the first process would have 8 + 1 of 11."""
    assert deal([8, 1, 1, 1], [1] * 4, 2).owners == (0, 1, 1, 1)
    shapes = [FactorShape(64, rank, None) for rank in (4, 12, 4, 4)]
    assert deal_grams(shapes, 2).owners == (1, 0, 1, 1)


def test_few_problems_for_many_processes_are_summed() -> None:
    """Otherwise, three quarters of the all-gather would be padding."""
    assert deal([1, 1], [10, 10], 8).kind == "all-reduce"
    assert deal([1, 1], [10, 10], 4).kind == "all-gather"
