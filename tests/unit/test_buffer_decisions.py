"""Tables for the pure decisions: admission, the draw, a group's life, what may be taken, the settings."""

import pytest

from async_rl.buffers import admission, fitness, life
from async_rl.buffers.draw import Entry, Refused, choose
from async_rl.buffers.group import Group, Lease
from async_rl.buffers.settings import Settings
from async_rl.config.schema import Batch, Config, Data, JsonLines, Model, Rollout, Staleness
from async_rl.errors import ConfigError
from async_rl.protocol.buffer import LeaseId
from async_rl.trajectory import Score
from tests.unit.buffer_material import settings, trajectory


@pytest.mark.parametrize(
    ("m", "version", "groups", "reuse", "expected"),
    [
        (0, 0, 8, 1, 0),
        (7, 0, 8, 1, 0),
        (8, 0, 8, 1, 1),
        (80, 10, 8, 1, 10),
        (3, 5, 8, 1, 5),  # never due in the past
        (8, 0, 8, 2, 2),  # the second draw is for step 2
        (16, 1, 8, 2, 4),
    ],
)
def test_a_group_is_due_when_the_groups_before_it_are_used(
    m: int, version: int, groups: int, reuse: int, expected: int
) -> None:
    assert admission.due(m, version, groups=groups, reuse=reuse) == expected


@pytest.mark.parametrize(
    ("m", "version", "reuse", "eta_prime", "max_steps", "expected"),
    [
        (80, 10, 1, 2, 1000, 24),  # field report 1: recovered at version 10, nothing running: never 104
        (0, 0, 1, 0, 1000, 8),  # on-policy: one step's groups
        (8, 0, 1, 0, 1000, 0),
        (8, 1, 1, 0, 1000, 8),
        (0, 0, 1, 2, 1000, 24),
        (0, 0, 1, 4, 2, 16),  # nothing is admitted for steps that will not be made
        (80, 10, 1, 2, 10, 0),
        (0, 0, 2, 0, 1000, 8),
        (8, 1, 2, 1, 1000, 8),  # the draw of step 2 becomes due with version 1
        (8, 0, 2, 1, 1000, 0),
        (110, 10, 1, 2, 1000, 0),  # a lowered bound admits nothing, and takes nothing back
    ],
)
def test_capacity(m: int, version: int, reuse: int, eta_prime: int, max_steps: int, expected: int) -> None:
    """Equal to the rule itself: due <= v + eta' and due < max_steps, group after group."""
    given = {"groups": 8, "reuse": reuse}
    assert (
        admission.capacity(m, version, eta_prime=eta_prime, max_steps=max_steps, **given)
        == expected
        == sum(
            (due := admission.due(n, version, **given)) <= version + eta_prime and due < max_steps
            for n in range(m, m + 200)
        )
    )


@pytest.mark.parametrize(
    ("due", "version", "eta_prime", "expected"),
    [(0, 0, 2, 0), (3, 3, 0, 3), (5, 3, 2, 3), (1, 4, 2, 2), (12, 10, 2, 10)],
)
def test_no_sample_is_born_stale(due: int, version: int, eta_prime: int, expected: int) -> None:
    assert admission.min_version(due, version, eta_prime) == expected


def entries(*pairs: tuple[int, int]) -> list[Entry]:
    return [Entry(deadline, group) for deadline, group in pairs]


@pytest.mark.parametrize(
    ("ready", "others", "waits", "expected"),
    [
        ([(5, 1), (5, 0), (4, 7)], [], False, [7, 0]),  # deadline first, then admission
        ([(9, 3), (9, 2), (9, 1)], [], True, [1, 2]),  # never first finishers
        ([(5, 1)], [], True, Refused(None)),
        ([(5, 1), (5, 2)], [(3, 0)], True, Refused(0)),  # 0 can only be drawn now
        ([(5, 1), (5, 2)], [(3, 0)], False, [1, 2]),
        ([(5, 1), (5, 2)], [(4, 0)], True, [1, 2]),  # 0 can still be drawn at step 4
        ([(5, 1), (5, 2)], [(4, 0), (4, 3), (4, 4)], True, Refused(4)),  # step 4 takes two of the three
        ([(3, 1), (3, 2), (4, 5), (4, 6)], [(4, 0)], True, Refused(6)),
        ([(3, 1), (3, 2), (4, 5)], [(4, 0), (5, 8), (5, 9)], True, [1, 2]),
    ],
)
def test_a_step_takes_its_groups_by_deadline_and_leaves_a_feasible_rest(
    ready: list[tuple[int, int]], others: list[tuple[int, int]], waits: bool, expected: object
) -> None:
    chosen = choose(entries(*ready), entries(*others), size=2, step=3, groups=2, reuse=1, waits=waits)
    assert chosen == expected


@pytest.mark.parametrize(("deadline", "allowed"), [(3, False), (4, False), (5, True)])
def test_the_rest_is_feasible_only_by_the_draws_that_reuse_leaves(deadline: int, allowed: bool) -> None:
    """Drawn at step 3 and trained twice, the next draw is for step 5."""
    chosen = choose(entries((9, 1)), entries((deadline, 2)), size=1, step=3, groups=1, reuse=2, waits=True)
    assert chosen == ([1] if allowed else Refused(2))


def group(votes: int, silent: int, **changes: object) -> Group:
    made = Group(3, 0, 1, list(range(votes + silent)), phase="scored")
    for member in made.wanted:
        made.trajectories[member] = trajectory((0, 1))
        made.scores[member] = Score(1.0) if member < votes else Score(None, "abstained", detail="no idea")
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def names(happened: list[object]) -> list[str]:
    return [type(event).__name__ for event in happened]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (group(4, 0), "Readied"),
        (group(2, 2), "Readied"),
        (group(1, 3), "Refilled"),
        (group(1, 3, refilled=True), "Failed"),
        (group(4, 0, failures=99), "Readied"),  # it is whole: past failures do not matter
        (group(4, 0, phase="waiting", failures=4), "Failed"),
        (group(4, 0, phase="generated", failures=4), "Failed"),
        (group(0, 2, exact_version=1), "Evaluated"),  # a held-out sample may abstain
        (group(1, 0, exact_version=1, phase="waiting", failures=4), "Evaluated"),
    ],
)
def test_what_a_groups_last_result_makes_of_it(made: Group, expected: str) -> None:
    assert names(list(life.next_events(made, settings(min_valid=2), "boom"))) == [expected]


def test_new_members_take_fresh_numbers_and_leave_the_voters() -> None:
    (event,) = life.next_events(group(1, 3), settings(min_valid=2), "")
    assert event.out == [1, 2, 3] and event.fresh == [4, 5, 6]  # type: ignore[union-attr]


def test_a_group_that_fails_says_why() -> None:
    (event,) = life.next_events(group(1, 3, refilled=True), settings(min_valid=2), "")
    assert "1 of 4 members vote" in event.detail  # type: ignore[union-attr]
    assert "batch.min_valid = 2" in event.detail and "no idea" in event.detail  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spans", "in_flight", "reason"),
    [
        ([(3, 4)], False, None),
        ([(3, 2), (4, 2)], True, None),
        ([(2, 1), (4, 2), (6, 1)], False, "granted for 3"),  # field report 10, old tokens first
        ([(4, 2), (6, 1)], False, "mixes the versions [4, 6]"),  # field report 10: one sample, one version
        ([(2, 4)], True, "granted for 3"),
        ([(4, 4), (2, 1)], True, "granted for 3"),
        ([(7, 4)], True, "the newest is 6"),
        ([(3, 2), (7, 2)], True, "the newest is 6"),
    ],
)
def test_a_trajectory_is_taken_only_with_versions_it_may_have(
    spans: list[tuple[int, int]], in_flight: bool, reason: str | None
) -> None:
    lease = Lease(LeaseId(0, 0, "generate"), "rollout-0", "i", [0], 3)
    wrong = fitness.unfit_trajectory(group(1, 0), lease, trajectory(*spans), newest=6, in_flight=in_flight)
    assert wrong is None if reason is None else reason in str(wrong)


@pytest.mark.parametrize(
    ("score", "fit"),
    [
        (Score(0.5), True),
        (Score(0.0, "unparsed"), True),
        (Score(0.0, "timeout"), True),
        (Score(None, "abstained"), True),
        (Score(None, "failed"), True),
        (Score(float("nan")), False),
        (Score(float("inf")), False),
        (Score(None, "graded"), False),
        (Score(0.0, "failed"), False),  # an infrastructure fault is no reward of 0
    ],
)
def test_a_score_is_a_number_or_says_why_it_is_none(score: Score, fit: bool) -> None:
    assert (fitness.unfit_score(score) is None) == fit


def config(**tables: object) -> Config:
    data = Data(train=[JsonLines(path="none.jsonl")])
    return Config(name="x", model=Model(path="none"), data=data, max_steps=3, **tables)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "min_valid"), [(1, 1), (2, 2), (3, 2), (5, 3), (8, 4)])
def test_half_of_a_group_must_vote_and_two_at_least(size: int, min_valid: int) -> None:
    rules = Settings.of(config(batch=Batch(group_size=size)), tasks=None, held_out=0)
    assert rules.min_valid == min_valid


def test_settings_that_can_never_be_served_name_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"rollout.max_in_flight = 4.*batch.group_size = 8"):
        Settings.of(config(rollout=Rollout(max_in_flight=4)), tasks=None, held_out=0)
    with pytest.raises(ConfigError, match=r"batch.min_valid = 9 exceeds batch.group_size = 8"):
        Settings.of(config(batch=Batch(min_valid=9)), tasks=None, held_out=0)


def test_under_correct_the_hard_bound_governs_the_draw_and_eta_the_admission() -> None:
    staleness = Staleness(max=3, on_exceed="correct", hard_max=6, reuse=2)
    rules = Settings.of(config(mode="off-policy", staleness=staleness), tasks=None, held_out=0)
    assert rules.eta_prime(rules.eta) == 2 and rules.reach(rules.eta) == 5 and rules.waits
