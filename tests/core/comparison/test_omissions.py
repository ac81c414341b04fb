"""Omissions: what a restore lost, what followed from it, and what is only a record."""

from __future__ import annotations

from keepstep.core.comparison.omissions import Audit, TwoLooks, audit
from keepstep.model.fingerprint import SeenValue

Values = dict[str, object]


def seen(values: Values) -> dict[str, SeenValue]:
    """A list is a container; each entry has a path of its own, too."""
    found: dict[str, SeenValue] = {}
    for path, value in values.items():
        if isinstance(value, list):
            entries = tuple(map(str, value))
            found[path] = SeenValue("list", str(value), entries)
            found |= {f"{path}[{i}]": SeenValue("value", e) for i, e in enumerate(entries)}
        else:
            found[path] = SeenValue("value", str(value))
    return found


def judged(
    undisturbed: tuple[Values, Values],
    restored: tuple[Values, Values],
    again: tuple[Values, Values] | None = None,
) -> Audit:
    runs = (undisturbed, again or undisturbed, restored)
    return audit(*(TwoLooks(*map(seen, run)) for run in runs))


def names(audited: Audit) -> tuple[list[str], list[str], list[str], list[str]]:
    return (
        [each.name for each in audited.omissions],
        [each.name for each in audited.consequences],
        [each.name for each in audited.undetermined],
        list(audited.records),
    )


def test_what_is_restored_is_complete() -> None:
    found = judged(({"m: a": 3}, {"m: a": 5}), ({"m: a": 3}, {"m: a": 5}))
    assert names(found) == ([], [], [], []) and found.is_complete
    assert found.compared == 1


def test_what_began_anew_is_missing_and_what_follows_is_not() -> None:
    found = judged(
        ({"m: count": 3, "m: w": 30}, {"m: count": 5, "m: w": 50}),
        ({"m: count": 0, "m: w": 30}, {"m: count": 2, "m: w": 47}),
    )
    assert names(found) == (["m: count"], ["m: w"], [], [])


def test_what_is_as_it_was_some_steps_later_was_only_not_yet_assigned() -> None:
    found = judged(
        ({"f(): batch": 3, "m: x.cache": 1}, {"f(): batch": 5, "m: x.cache": 1}),
        ({"m: x.y": 0}, {"f(): batch": 5, "m: x.cache": 1}),
    )
    assert found.is_complete


def test_a_variable_that_was_not_yet_assigned_is_a_consequence() -> None:
    found = judged(
        ({"f(): loss": 3, "m: x.y": 1}, {"f(): loss": 5, "m: x.y": 1}),
        ({"m: x.y": 1}, {"f(): loss": 4, "m: x.y": 1}),
    )
    assert names(found) == ([], ["f(): loss"], [], [])
    assert not found.is_complete, "something that nothing shows"


def test_an_attribute_that_was_not_yet_assigned_is_missing() -> None:
    found = judged(
        ({"m: x.seen": 3, "m: x.y": 1}, {"m: x.seen": 5, "m: x.y": 1}),
        ({"m: x.y": 1}, {"m: x.seen": 2, "m: x.y": 1}),
    )
    assert found.omissions[0].paths == ("m: x.seen",)


def test_what_two_undisturbed_runs_do_not_have_in_common_is_not_judged() -> None:
    found = judged(
        ({"m: clock": 3}, {"m: clock": 5}),
        ({"m: clock": 7}, {"m: clock": 9}),
        ({"m: clock": 4}, {"m: clock": 6}),
    )
    assert names(found) == ([], [], ["m: clock"], [])


def test_a_record_lacks_entries_and_grows_as_before() -> None:
    before, later = [1, 2], [1, 2, 3, 4]
    record = judged(({"m: log": before}, {"m: log": later}), ({"m: log": []}, {"m: log": [3, 4]}))
    assert names(record) == ([], [], [], ["m: log"]) and record.is_complete
    for rest_before, rest in (
        ([], [3]),  # grew less
        ([0, 0], [0, 0, 3, 4]),  # nothing is lacking
    ):
        found = judged(
            ({"m: log": before}, {"m: log": later}), ({"m: log": rest_before}, {"m: log": rest})
        )
        assert names(found)[0] == ["m: log"], rest


def test_of_a_container_the_entries_are_told() -> None:
    found = judged(
        ({"m: a": [1, 2], "m: ab": [1]}, {"m: a": [1, 3], "m: ab": [1]}),
        ({"m: a": [1, 0], "m: ab": [1]}, {"m: a": [1, 1], "m: ab": [1]}),
    )
    assert [each.paths for each in found.omissions] == [("m: a[1]",)]
