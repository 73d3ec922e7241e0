"""ReMax: a member of each group that is sampled greedily, scored with the others, without a vote, never trained."""

from async_rl.buffers.group import Lease
from async_rl.buffers.machine import Machine
from async_rl.buffers.settings import Settings
from async_rl.buffers.store import drawn
from async_rl.config import parse
from async_rl.protocol.buffer import Drawn
from async_rl.trajectory import Score
from tests.unit.buffer_material import settings, trajectory

SIZE = 3


def machine(**changes: object) -> Machine:
    return Machine(settings(groups=1, group_size=SIZE, min_valid=2, eta=0, greedy=True, **changes))


def generated(buffer: Machine, n: int = 8) -> Lease:
    (lease,) = buffer.workers.acquire("rollout-0", "one", "generate", n, 0, 0.0)
    for member in list(lease.open):
        reply = buffer.workers.finish_generate("rollout-0", "one", lease.id, member, trajectory((0, 2)), 0.0)
        assert reply.outcome == "accepted"
    return lease


def scored(buffer: Machine, rewards: dict[int, float | None]) -> None:
    (lease,) = buffer.workers.acquire("reward-0", "one", "score", 8, -1, 0.0)
    for member in list(lease.open):
        reward = rewards[member]
        score = Score(reward, "abstained" if reward is None else "graded")
        assert buffer.workers.finish_score("reward-0", "one", lease.id, member, score, 0.0).outcome == "accepted"


def sent(buffer: Machine) -> Drawn:
    batch = buffer.trainer.draw(0, 0)
    return drawn(buffer.store.get_draw(batch.place), 0, buffer.store.get)  # type: ignore[union-attr]


def test_the_greedy_member_comes_with_the_group_and_apart_from_it() -> None:
    buffer = machine()
    assert buffer.workers.acquire("rollout-0", "one", "generate", SIZE, 0, 0.0) == []  # no room for all of it
    assert generated(buffer).id.group == 0
    scored(buffer, {0: 1.0, 1: 0.0, 2: 1.0, SIZE: 0.5})
    (group,) = sent(buffer).groups
    assert [member.member for member in group.members] == [0, 1, 2]
    assert group.greedy is not None and (group.greedy.member, group.greedy.score.reward) == (SIZE, 0.5)


def test_it_has_no_vote_neither_where_votes_are_counted_nor_where_they_are_compared() -> None:
    buffer = machine()
    generated(buffer)
    scored(buffer, {0: 1.0, 1: None, 2: None, SIZE: 1.0})  # one vote of two: others take the silent ones' place
    (lease,) = buffer.workers.acquire("rollout-0", "one", "generate", 8, 0, 0.0)
    assert lease.open == [SIZE + 1, SIZE + 2]
    equal = machine(filter=parse(_run(equal=True)).filter)
    generated(equal)
    scored(equal, {0: 1.0, 1: 1.0, 2: 1.0, SIZE: 0.0})
    assert equal.state.dropped == {"equal": 1}


def test_a_group_goes_on_without_its_score() -> None:
    buffer = machine()
    generated(buffer)
    scored(buffer, {0: 1.0, 1: 0.0, 2: 1.0, SIZE: None})
    (group,) = sent(buffer).groups
    assert group.greedy is not None and group.greedy.score.reward is None


def test_remax_asks_for_it_and_nothing_else_does() -> None:
    for advantage, expected in (("remax", True), ("grpo", False)):
        made = Settings.of(parse(_run() | {"algorithm": {"advantage": advantage}}), tasks=None, held_out=0)
        assert made.greedy == expected and len(made.members) == 8 + expected


def _run(**filters: object) -> dict[str, object]:
    return {
        "name": "run",
        "model": {"path": "none"},
        "data": {"train": [{"kind": "jsonl", "path": "none"}]},
        "max_steps": 4,
        "filter": filters,
    }
