"""What the paper reports, by chapter."""

from benchmarks.experiments import paper, sections


def test_sentences_are_of_chapters_and_hold_published_numbers() -> None:
    assert set(paper._SENTENCES) <= set(sections.CHAPTERS)
    assert all(paper.sentence(chapter) for chapter in paper._SENTENCES) and paper.sentence("Memory") == ""
    assert "1.81x to 2.28x" in paper.sentence("End to end") and "1.46x to 1.91x" in paper.sentence("End to end")
    assert "1328 MiB in 9.75 ms" in paper.sentence("Communication") and "72% and 75%" in paper.sentence("GEMMs")
    assert "1.16x at batch 1" in paper.sentence("Grouping") and "1.70x" in paper.sentence("Recomputation")


def test_every_difference_from_the_papers_code_says_what_is_here() -> None:
    assert all(all(row) for row in paper.CODE.rows) and len(paper.CODE.rows) >= 8
    assert not any(character.isdigit() for row in paper.CODE.rows for character in row[1]), "numbers of it are not ours"
