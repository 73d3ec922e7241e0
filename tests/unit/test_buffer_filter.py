"""Dynamic sampling: which scored groups are worth a place in a step."""

from typing import Any

import pytest

from async_rl.buffers.for_trainer import Waiting
from async_rl.buffers.machine import Machine
from async_rl.buffers.state import Batch
from async_rl.config.schema import Filter
from async_rl.errors import AsyncRLError
from async_rl.trajectory import Score
from tests.unit.buffer_material import generate, rollout, settings, train


def machine(*, filter: Filter, **changes: Any) -> Machine:
    return Machine(settings(groups=2, group_size=2, eta=1, filter=filter, **changes))


def scored(buffer: Machine, *rewards: tuple[float | None, ...], at: int = 0) -> list[int]:
    """New groups with these rewards; their ids."""
    leases = rollout(buffer, 2 * len(rewards), at=at)
    assert len(leases) == len(rewards)
    for lease in leases:
        generate(buffer, lease, at=at)
    for lease, group in zip(buffer.workers.acquire("r", "r", "score", 64, -1, 0.0), rewards, strict=True):
        for member, reward in zip(list(lease.open), group, strict=True):
            score = Score(reward, "graded" if reward is not None else "abstained")
            buffer.workers.finish_score("r", "r", lease.id, member, score, 0.0)
    return [lease.id.group for lease in leases]


@pytest.mark.parametrize(("wanted", "rewards", "reason"), [
    (Filter(equal=True), (1.0, 1.0), "equal"),
    (Filter(equal=True), (0.3, 0.1 + 0.2), "equal"),  # up to float noise
    (Filter(equal=True), (0.0, 0.0), "equal"),
    (Filter(equal=True), (1.0, 0.0), None),
    (Filter(equal=True), (1.0, None), "equal"),  # an abstaining member has no vote
    (Filter(min_mean=0.5), (0.0, 0.9), "hard"),
    (Filter(min_mean=0.5), (0.0, 1.0), None),
    (Filter(max_mean=0.5), (0.2, 0.9), "easy"),
    (Filter(), (1.0, 1.0), None),
])  # fmt: skip
def test_a_group_that_teaches_nothing_is_dropped_with_the_reason(
    wanted: Filter, rewards: tuple[float | None, ...], reason: str | None
) -> None:
    buffer = machine(filter=wanted)
    scored(buffer, rewards)
    assert buffer.state.dropped == ({} if reason is None else {reason: 1})
    assert buffer.state.training.count("ready") == (1 if reason is None else 0)


def test_a_component_of_the_score_is_judged_in_the_place_of_the_reward() -> None:
    """DAPO judges accuracy, whatever a penalty for length makes of the reward."""
    buffer = machine(filter=Filter(equal=True, component="accuracy"))
    leases = rollout(buffer, 4, at=0)
    for lease in leases:
        generate(buffer, lease, at=0)
    given = [[(1.0, {"accuracy": 1.0}), (0.4, {"accuracy": 1.0})], [(1.0, {"accuracy": 1.0}), (0.2, {})]]
    for lease, group in zip(buffer.workers.acquire("r", "r", "score", 64, -1, 0.0), given, strict=True):
        for member, (reward, components) in zip(list(lease.open), group, strict=True):
            buffer.workers.finish_score("r", "r", lease.id, member, Score(reward, components=components), 0.0)
    assert buffer.state.dropped == {"equal": 1}
    assert buffer.state.training.count("ready") == 1  # a member without the component is judged by its reward


def test_a_dropped_group_is_replaced_by_another_task_and_the_step_is_full() -> None:
    buffer = machine(filter=Filter(equal=True))
    first = scored(buffer, (1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 1.0))
    assert train(buffer, 0) == [first[1], first[3]]
    # Four places at eta 1: two were drawn, the two of the dropped groups are free again beside two new ones.
    second = scored(buffer, (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, 1.0), at=1)
    assert train(buffer, 1) == second[:2]
    assert buffer.state.dropped == {"equal": 4}
    assert not buffer.state.again  # other than a stale one, its task does not come back
    buffer.state.check()


def test_dropping_without_end_ends_the_run_with_the_counts() -> None:
    buffer = machine(filter=Filter(equal=True, max_mean=0.4, max_in_row=6))
    scored(buffer, (1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 0.0))
    assert buffer.state.broken is None
    scored(buffer, (1.0, 1.0), (1.0, 1.0))
    with pytest.raises(AsyncRLError, match=r"6 groups in a row .* \(equal 5, easy 1\).* \(filter\.max_in_row = 6\)"):
        buffer.trainer.draw(0, 0)


def test_a_ready_group_ends_the_row() -> None:
    buffer = machine(filter=Filter(equal=True, max_in_row=3))
    scored(buffer, (1.0, 1.0), (1.0, 1.0), (1.0, 0.0))
    scored(buffer, (1.0, 1.0), (1.0, 1.0))
    assert buffer.state.broken is None
    assert isinstance(buffer.trainer.draw(0, 0), Waiting)
    scored(buffer, (1.0, 0.0))
    assert isinstance(buffer.trainer.draw(0, 0), Batch)


def test_a_lease_that_is_handed_back_counts_as_no_attempt() -> None:
    buffer = machine(filter=Filter(), max_failures=2)
    for turn in range(5):
        (lease,) = rollout(buffer, 2, at=0, now=float(turn))
        call = (lease.worker, lease.incarnation, lease.id, None, "worker stops", float(turn))
        assert buffer.workers.fail(*call, fault=False).outcome == "accepted"
        assert buffer.workers.fail(*call, fault=False).outcome == "repeat"
        assert lease.id.group == 0
    assert buffer.state.failed == {}
    (lease,) = rollout(buffer, 2, at=0)
    generate(buffer, lease, at=0)
    buffer.state.check()


def test_work_that_never_gets_done_goes_to_another_worker_although_its_holder_lives() -> None:
    # Field report 7: one of 128 rollouts never returns.
    buffer = machine(filter=Filter(), lease_max_s=100.0)
    (stuck,) = rollout(buffer, 2, at=0)
    for second in range(1, 110, 10):
        buffer.workers.extend("rollout-0", "i", [(stuck.id, 0)], buffer.roster.workers["rollout-0"].stats, second)
        assert buffer.workers.lapse(float(second)) == ([stuck.id] if second > 100 else [])
    (again,) = rollout(buffer, 2, at=0, now=111.0, worker="rollout-1")
    assert again.id.group == stuck.id.group
    generate(buffer, again, at=0, now=112.0)
    revoked = buffer.workers.extend("rollout-0", "i", [(stuck.id, 0)], buffer.roster.workers["rollout-0"].stats, 113.0)
    assert [lease for lease, _ in revoked] == [stuck.id]
