"""Whose turn it is: a table of moves, and a model of a whole run in which every order of events comes to its end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.services.rollout.turn import Turn


def turn(phase):
    made = Turn()
    made.phase = phase
    return made


@pytest.mark.parametrize(
    ("phase", "work", "move"),
    [
        ("asleep", False, None),
        ("asleep", True, "take"),
        ("waking", False, "wake"),
        ("waking", True, "wake"),
        ("awake", False, None),
        ("awake", True, None),
        ("falling", False, "sleep"),
        ("falling", True, "sleep"),
    ],
)
def test_moves(phase, work, move):
    assert turn(phase).move(work) == move


def test_only_who_is_told_nothing_without_work_falls_asleep():
    for phase in ("asleep", "waking", "awake", "falling"):
        for work in (False, True):
            made = turn(phase)
            made.told_nothing(work)
            assert made.phase == ("falling" if phase == "awake" and not work else phase)


class Worker:
    """A worker as the service drives its Turn. `held`: leases, each a version that it must have."""

    def __init__(self, ring):
        self.ring, self.turn, self.version, self.held, self.resting = ring, Turn(), -1, 0, False
        self.turn.phase, self.alive = "asleep", True

    @property
    def work(self):
        return self.held > 0 or self.ring.published > self.version

    def step(self):
        """One thing of those that it could do now; False where there is nothing."""
        ring, turn = self.ring, self.turn
        match turn.move(self.work):
            case "take":
                if ring.trainer_has_it:
                    return False
                turn.took()
            case "wake":
                turn.woke()
            case "sleep":
                turn.slept()
            case None if turn.phase == "awake" and self.held:
                self.held -= 1
                ring.done(self)
            case None if turn.phase == "awake" and ring.published > self.version:
                self.version = ring.published
            case None:
                if ring.grant(self):
                    self.held += 1
                elif turn.phase == "awake":
                    turn.told_nothing(self.work)
                else:
                    return False
        return True


class Ring:
    """Steps of `groups` groups; evaluations of each version; failures in `failing` are done again."""

    def __init__(self, workers, steps, groups, failing):
        self.published, self.version, self.steps, self.groups = 0, 0, steps, groups
        self.todo, self.evaluate, self.ready = groups, {0: 1}, 0
        self.trainer_has_it, self.failing = False, list(failing)
        self.workers = [Worker(self) for _ in range(workers)]

    def grant(self, worker):
        if self.evaluate.get(worker.version, 0) and worker.version == self.published:
            self.evaluate[worker.version] -= 1
            worker.kind = "evaluation"
            return True
        if worker.version == self.version and self.todo:
            self.todo -= 1
            worker.kind = "group"
            return True
        return False

    def done(self, worker):
        if self.failing and self.failing.pop():
            if worker.kind == "group":
                self.todo += 1
            else:
                self.evaluate[worker.version] += 1
        elif worker.kind == "group":
            self.ready += 1

    def train(self):
        if self.version == self.steps:
            return False
        if self.trainer_has_it:
            self.trainer_has_it = False
            self.version, self.ready, self.todo = self.version + 1, 0, self.groups
            self.published = self.version
            self.evaluate[self.version] = 1
            return True
        if self.ready == self.groups and all(w.turn.phase == "asleep" for w in self.workers):
            self.trainer_has_it = True
            return True
        return False


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.lists(st.booleans(), max_size=20), st.randoms())
def test_every_order_of_events_makes_all_steps_and_never_two_on_the_device(workers, steps, groups, failing, chance):
    ring = Ring(workers, steps, groups, failing)
    actors = [ring.train, *(worker.step for worker in ring.workers)]
    for _ in range(3000):
        chance.shuffle(actors)
        moved = [actor() for actor in actors]
        awake = any(worker.turn.phase != "asleep" for worker in ring.workers)
        assert not (ring.trainer_has_it and awake)
        if not any(moved):
            break
    assert ring.version == steps
    assert not any(moved)  # nobody is left awake
