"""Which node is slower than its fleet: properties."""

from __future__ import annotations

import random
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.preflight.catalogue import Measure, Quantity
from keepstep.core.preflight.outliers import outliers, speeds, value_of

SPEED = Quantity("speed", Measure.BYTES_PER_S, 1, 0.6)
TIME = Quantity("time", Measure.NS, 1 << 60, 0.6)

fleets = st.dictionaries(
    st.integers(0, 50), st.lists(st.integers(1000, 10**12), min_size=1, max_size=7), max_size=8
)


def found(fleet: dict[int, list[int]], quantity: Quantity = SPEED) -> list[int]:
    return [outlier.node for outlier in outliers(fleet, quantity)]


@given(fleets, st.integers(2, 1000))
def test_the_unit_changes_nothing(fleet: dict[int, list[int]], factor: int) -> None:
    scaled = {node: [value * factor for value in values] for node, values in fleet.items()}
    before, after = outliers(fleet, SPEED), outliers(scaled, SPEED)
    # a lag that is just what passes may fall to either side of it
    clear = {o.node for o in before if abs(o.ratio / o.least_ratio - 1) > 1e-9}
    assert clear <= {o.node for o in after}


@given(fleets)
def test_a_time_is_the_inverse_of_a_speed(fleet: dict[int, list[int]]) -> None:
    huge = 10**24
    times = {node: [huge // value for value in values] for node, values in fleet.items()}
    clear = {o.node for o in outliers(fleet, SPEED) if o.ratio / o.least_ratio < 1 - 1e-9}
    assert clear <= set(found(times, TIME))


@given(fleets, st.randoms(use_true_random=False))
def test_the_order_changes_nothing(fleet: dict[int, list[int]], shuffler: random.Random) -> None:
    nodes = list(fleet)
    shuffler.shuffle(nodes)
    mixed = {node: shuffler.sample(fleet[node], len(fleet[node])) for node in nodes}
    assert found(mixed) == found(fleet)


@given(fleets)
def test_the_fastest_is_never_one_and_fewer_than_three_have_none(
    fleet: dict[int, list[int]],
) -> None:
    accused = found(fleet)
    if len([values for values in fleet.values() if values]) < 3:
        assert not accused
    else:
        assert 2 * len(accused) <= len(fleet)
        fastest = max(fleet, key=lambda node: median(speeds(fleet[node], SPEED)))
        assert fastest not in accused


@given(st.integers(3, 12), st.floats(0.05, 0.5), st.integers(0, 10**6))
def test_one_slow_node_among_alike_is_the_one(nodes: int, factor: float, seed: int) -> None:
    source = random.Random(seed)
    slow = source.randrange(nodes)
    fleet = {
        node: [round(10**9 * 2 ** source.gauss(0, 0.02) * (factor if node == slow else 1))] * 3
        for node in range(nodes)
    }
    (outlier,) = outliers(fleet, SPEED)
    assert outlier.node == slow and 0.8 * factor < outlier.ratio < 1.25 * factor


def test_noise_of_the_fleet_widens_what_passes() -> None:
    wide = {0: [100], 1: [160], 2: [250], 3: [400], 4: [50]}
    assert found(wide) == []
    narrow = {0: [200], 1: [205], 2: [195], 3: [200], 4: [50]}
    assert found(narrow) == [4]
    restless = {node: [40, 100, 250] for node in range(4)} | {4: [20, 50, 125]}
    assert found(restless) == []


def test_what_harms_nobody_is_no_outlier() -> None:
    quantity = Quantity("trip", Measure.NS, 1 << 60, 0.5, harmless=1000)
    assert found({0: [10], 1: [10], 2: [10], 3: [900]}, quantity) == []
    assert found({0: [10], 1: [10], 2: [10], 3: [1100]}, quantity) == [3]


@given(st.integers(1, 10**15))
def test_values_come_back(value: int) -> None:
    for quantity in (SPEED, TIME):
        assert abs(value_of(speeds([value], quantity)[0], quantity) - value) <= value * 1e-9
