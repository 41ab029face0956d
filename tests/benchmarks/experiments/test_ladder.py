"""The ladder: its order, and what each step changes."""

from benchmarks.experiments.ladder import LADDER
from benchmarks.experiments.steps import BTP, PUBLISHED, VANILLA
from benchmarks.experiments.wire_plan import BTP_SYNC, BTP_UNGROUPED, FORMS, MAIN
from boost.config.schema import ParallelConfig


def test_every_step_is_in_the_main_set_and_changes_what_it_says() -> None:
    assert [step.name for step in LADDER][:5] == [PUBLISHED, VANILLA, BTP_UNGROUPED, BTP_SYNC, BTP]
    assert {step.name for step in LADDER} <= {each.name for each in MAIN.groups[0].contenders}
    contenders = {each.name: each for each in MAIN.groups[0].contenders}
    changes = {}
    for step in LADDER[1:]:
        before, now = (contenders[name] for name in (step.before, step.name))
        options = [{**ParallelConfig.absent, "grouping": True, **FORMS[each.form]} for each in (before, now)]
        changed = {key for key in options[0] | options[1] if options[0].get(key) != options[1].get(key)}
        changed |= {key for key in ("overlap", "compile") if getattr(before, key) != getattr(now, key)}
        changes[step.name] = changed
    assert list(changes.values()) == [
        {"vanilla"}, {"layout", "norm", "grouping"}, {"grouping"}, {"norm"}, {"overlap"}, {"layout"}, {"overlap"}, {"layout"},
        {"overlap"}, {"compile"},
    ]  # fmt: skip
