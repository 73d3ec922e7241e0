"""The stream's proportions, exactly and by random access."""

from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data.mixture import Mixture

weights = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


@given(weights, st.integers(0, 10**9))
@settings(deadline=None)
def test_an_item_is_at_the_position_it_is_found_at(shares: list[float], position: int) -> None:
    mixture = Mixture(shares)
    source, k = mixture.item(position)
    assert mixture.position(source, k) == position


@given(weights)
@settings(deadline=None, max_examples=40)
def test_each_source_gives_its_items_in_order_and_none_twice(shares: list[float]) -> None:
    mixture = Mixture(shares)
    given_so_far = [0] * len(shares)
    for position in range(200):
        source, k = mixture.item(position)
        assert k == given_so_far[source]
        given_so_far[source] += 1


@given(weights, st.integers(1, 2000))
@settings(deadline=None, max_examples=100)
def test_proportions_hold_at_every_position(shares: list[float], length: int) -> None:
    mixture = Mixture(shares)
    for source, share in enumerate(shares):
        exact = length * share / sum(shares)
        reach = len(shares) + 1
        before = list(range(max(0, int(exact) - reach), int(exact) + reach + 1))
        count = before[0] + sum(mixture.position(source, k) < length for k in before)
        assert abs(count - exact) <= len(shares) / 2 + 1


def test_weights_three_to_one_alternate_smoothly() -> None:
    mixture = Mixture([3.0, 1.0])
    assert [mixture.item(i)[0] for i in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]


def test_prefix_is_the_shortest_that_covers_every_source() -> None:
    mixture = Mixture([1.0, 1.0])
    length = mixture.prefix([3, 5])
    seen = {mixture.item(i) for i in range(length)}
    wanted = {(0, k) for k in range(3)} | {(1, k) for k in range(5)}
    assert wanted <= seen
    assert not wanted <= {mixture.item(i) for i in range(length - 1)}


def test_a_source_that_is_used_up_leaves_its_turns_to_the_others() -> None:
    assert list(Mixture([1.0, 1.0]).once([1, 3])) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert list(Mixture([1.0, 1.0]).once([0, 2])) == [(1, 0), (1, 1)]
