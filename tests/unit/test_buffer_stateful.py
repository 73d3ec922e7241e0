"""Any commands of workers and trainer, in any order, keep what the buffer promises."""

from typing import Any

from hypothesis import HealthCheck
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from async_rl.buffers.for_trainer import Ended, Waiting
from async_rl.buffers.group import PHASES, Lease
from async_rl.buffers.machine import Machine
from async_rl.buffers.state import Batch, new_state
from async_rl.config.schema import Filter
from async_rl.errors import AsyncRLError
from async_rl.protocol.buffer import LeaseId, WorkerStats
from async_rl.trajectory import Score, extend_spans
from tests.unit.buffer_material import Rotting, plain, settings, trajectory, versions

NAMES = ("rollout-0", "rollout-1", "rollout-2")


class Hand:
    """What a rollout worker believes to hold: versions of each lease's tokens, and the members it owes."""

    def __init__(self, lease: Lease, version: int, incarnation: int) -> None:
        self.id, self.incarnation = lease.id, incarnation
        self.owes = list(lease.open)
        self.spans = [(version, 1)]

    @property
    def oldest(self) -> int:
        return min(version for version, _ in self.spans)


class Buffer(RuleBasedStateMachine):
    @initialize(
        on_exceed=st.sampled_from(["wait", "drop", "mask", "correct"]),
        eta=st.integers(0, 3),
        reuse=st.integers(1, 2),
        groups=st.integers(1, 3),
        size=st.integers(1, 3),
        tasks=st.sampled_from([None, None, 7]),
        at_end=st.sampled_from(["smaller_step", "drop"]),
        slack=st.integers(0, 2),
        equal=st.booleans(),
        greedy=st.booleans(),
    )
    def begin(
        self,
        on_exceed: str,
        eta: int,
        reuse: int,
        groups: int,
        size: int,
        tasks: Any,
        at_end: str,
        slack: int,
        equal: bool,
        greedy: bool,
    ) -> None:
        eta += reuse - 1
        self.rules = settings(
            on_exceed=on_exceed,
            eta=eta,
            reuse=reuse,
            groups=groups,
            group_size=size,
            min_valid=max(1, size - 1),
            hard_max=eta + slack if on_exceed == "correct" else None,
            tasks=tasks,
            at_end=at_end,
            max_failures=6,
            max_steps=8,
            lease_s=10.0,
            held_out=2,
            samples=1,
            greedy=greedy,
            filter=Filter(equal=equal, max_in_row=40),
        )
        self.store = Rotting()
        self.machine = Machine(self.rules, store=self.store)
        self.epoch, self.checkpoint = 1, 0
        self.now = 0.0
        self.log: list[Any] = []
        self.versions = dict.fromkeys(NAMES, 0)
        self.incarnations = dict.fromkeys(NAMES, 0)
        self.hands: dict[str, list[Hand]] = {name: [] for name in NAMES}
        self.late: list[tuple[str, Hand]] = []  # of incarnations that died
        self.grading: list[Lease] = []
        self.drawn: list[int] = []
        self.ended = False

    # --- rollout workers

    @rule(name=st.sampled_from(NAMES), n=st.integers(1, 8))
    def acquire(self, name: str, n: int) -> None:
        version, incarnation = self.versions[name], self.incarnations[name]
        leases = self.machine.workers.acquire(name, str(incarnation), "generate", n, version, self.now)
        assert sum(len(lease.open) for lease in leases) <= n
        training = [lease.id.group for lease in leases if lease.id.group >= 0]
        assert training == sorted(training)
        for lease in leases:
            group = self.machine.state.find(lease.id.group)
            assert group is not None and lease.min_version <= version
            assert group.exact_version in (None, version)
            if group.exact_version is None:
                eta_prime = self.rules.eta_prime(group.eta)
                assert version >= max(0, self.machine.state.version - eta_prime), "born stale"
            self.hands[name].append(Hand(lease, version, incarnation))

    @rule(name=st.sampled_from(NAMES), jump=st.integers(1, 4))
    def new_weights(self, name: str, jump: int) -> None:
        self.versions[name] = min(self.machine.state.version, self.versions[name] + jump)
        for hand in self.hands[name]:
            extend_spans(hand.spans, self.versions[name], 1)

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        for hand in self.hands[name]:
            reply = self.machine.workers.started(name, str(hand.incarnation), hand.id, hand.oldest, self.now)
            assert reply.outcome in ("accepted", "revoked")

    @rule(name=st.sampled_from(NAMES), count=st.integers(0, 3))
    def extend(self, name: str, count: int) -> None:
        """Extends all but the last `count` of its leases; those may lapse."""
        hands = self.hands[name][: max(0, len(self.hands[name]) - count)]
        revoked = self.machine.workers.extend(
            name,
            str(self.incarnations[name]),
            [(hand.id, hand.oldest) for hand in hands],
            WorkerStats(),
            self.now,
        )
        gone = {lease for lease, _ in revoked}
        assert all(lease not in self.machine.state.leases or self._holder(lease) != name for lease in gone)
        self.hands[name] = [hand for hand in self.hands[name] if hand.id not in gone]

    @rule(name=st.sampled_from(NAMES), which=st.integers(0, 20), again=st.booleans())
    def finish(self, name: str, which: int, again: bool) -> None:
        owing = [hand for hand in self.hands[name] if hand.owes]
        if not owing:
            return
        hand = owing[which % len(owing)]
        member = hand.owes.pop(0)
        first = self._finish(name, hand, member)
        if again:
            repeat = self._finish(name, hand, member)
            assert repeat == ("repeat" if first == "accepted" else "revoked")

    def _finish(self, name: str, hand: Hand, member: int) -> str:
        return self.machine.workers.finish_generate(
            name, str(hand.incarnation), hand.id, member, trajectory(*hand.spans), self.now
        ).outcome

    @rule(name=st.sampled_from(NAMES))
    def finish_all(self, name: str) -> None:
        for hand in self.hands[name]:
            while hand.owes:
                self._finish(name, hand, hand.owes.pop(0))

    @rule(name=st.sampled_from(NAMES), whole=st.booleans())
    def fail(self, name: str, whole: bool) -> None:
        if not self.hands[name] or not self.hands[name][0].owes:
            return
        hand = self.hands[name][0]
        member = None if whole else hand.owes.pop(0)
        if whole:
            self.hands[name].remove(hand)
        self.machine.workers.fail(name, str(hand.incarnation), hand.id, member, "scripted", self.now)

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        self.late.extend((name, hand) for hand in self.hands[name])
        self.hands[name] = []
        self.incarnations[name] += 1
        self.versions[name] = self.machine.state.version

    @precondition(lambda self: self.late)
    @rule()
    def come_back_late(self) -> None:
        """A dead incarnation finishes once its successor has work: it is told, and ignored."""
        name, hand = self.late.pop()
        self.machine.workers.acquire(name, str(self.incarnations[name]), "score", 1, self.versions[name], self.now)
        self.grading = [lease for lease in self.machine.state.leases.values() if lease.id.stage == "score"]
        before = self.machine.state.admitted, len(self.machine.state.leases)
        for member in hand.owes:
            assert self._finish(name, hand, member) == "revoked"
        assert before == (self.machine.state.admitted, len(self.machine.state.leases))

    @rule(seconds=st.floats(0.5, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.machine.workers.lapse(self.now)

    # --- reward workers

    @rule(n=st.integers(1, 6))
    def acquire_scores(self, n: int) -> None:
        self.grading += self.machine.workers.acquire("reward-0", "r", "score", n, -1, self.now)

    @rule(verdict=st.sampled_from(["graded", "graded", "wrong", "wrong", "abstained", "failed", "nan", "fault"]))
    def grade(self, verdict: str) -> None:
        owing = [lease for lease in self.grading if lease.open]
        if not owing:
            return
        lease, member = owing[0], owing[0].open[0]
        call = (lease.worker, lease.incarnation, lease.id, member)
        if verdict == "fault":
            self.machine.workers.fail(*call, "scripted", self.now)
        else:
            reward = {"graded": 1.0, "wrong": 0.0, "nan": float("nan")}.get(verdict)
            status: Any = "graded" if verdict in ("wrong", "nan") else verdict
            self.machine.workers.finish_score(*call, Score(reward, status), self.now)
        self.grading = [lease for lease in self.grading if lease.id in self.machine.state.leases]

    @rule()
    def grade_all(self) -> None:
        self.acquire_scores(64)
        for lease in self.grading:
            for member in list(lease.open):
                call = (lease.worker, lease.incarnation, lease.id, member)
                self.machine.workers.finish_score(*call, Score(1.0), self.now)
        self.grading = []

    # --- trainer

    @rule()
    def train(self) -> None:
        self.draw()
        if self.machine.state.batch is not None:
            self.finish_step()

    @rule(busy=st.sets(st.sampled_from(NAMES)), fresh=st.booleans())
    def a_good_turn(self, busy: set[str], fresh: bool) -> None:
        """Else hardly any sequence gets past the first step."""
        for name in sorted(busy):
            if fresh:
                self.new_weights(name, 9)
            self.acquire(name, 8)
            self.start(name)
            self.finish_all(name)
        self.grade_all()
        self.train()

    @rule()
    def draw(self) -> None:
        step = self.machine.state.version
        had = self.machine.state.batch
        try:
            drawn = self.machine.trainer.draw(step, self.epoch)
        except AsyncRLError:
            assert self.machine.state.broken is not None
            return
        match drawn:
            case Ended():
                self.ended = True
            case Waiting():
                assert self.machine.state.batch is None
            case Batch():
                assert had is None or drawn is had
                assert self.machine.trainer.draw(step, self.epoch) is drawn
                self._check(drawn, step, fresh=had is None)

    def _check(self, batch: Batch, step: int, *, fresh: bool) -> None:
        if fresh:
            numbers = [group.id for group in batch.groups]
            assert not set(numbers) & set(self.drawn), "a group in two draws"
            self.drawn += numbers
            order = [(self.machine.state.deadline(group), group.id) for group in batch.groups]
            assert order == sorted(order), "not in deadline and admission order"
        for group in batch.groups:
            assert len(group.voters) >= self.rules.min_valid
            lags = [step - v for m in group.voters for v, _ in versions(self.machine, group, m)]
            bound = group.eta if self.rules.hard_max is None else self.rules.hard_max
            if self.rules.on_exceed == "mask":
                assert min(lags) <= bound, "a group with no token inside the bound"
            else:
                assert max(lags) <= bound, "a token over the bound"

    @precondition(lambda self: self.machine.state.batch is not None)
    @rule()
    def finish_step(self) -> None:
        step = self.machine.state.version
        assert self.machine.trainer.finish_step(step, self.epoch) == step + 1
        assert self.machine.trainer.finish_step(step, self.epoch) == step + 1

    @rule(eta=st.integers(0, 4))
    def change_eta(self, eta: int) -> None:
        if self.rules.hard_max is None:
            self.machine.trainer.change_eta(eta + self.rules.reuse - 1)

    @rule()
    def evaluate(self) -> None:
        if self.machine.state.closed is None:
            self.machine.trainer.evaluate(self.machine.state.version)

    @rule()
    def checkpoints(self) -> None:
        self.checkpoint = self.machine.state.version
        self.machine.trainer.checkpointed(self.checkpoint, self.epoch)

    @rule()
    def trainer_dies(self) -> None:
        """The next one begins at the last checkpoint and makes the steps since then with the same draws."""
        self.epoch += 1
        version = self.machine.trainer.begin(self.epoch, self.checkpoint)
        assert version == self.machine.state.version
        for step in range(self.checkpoint, version):
            draw = self.machine.trainer.made(step, self.epoch)
            assert draw is self.store.draws[draw.step] and draw.step <= step < draw.step + self.rules.reuse
        assert self.machine.trainer.made(version, self.epoch) is None
        for call in (self.machine.trainer.draw, self.machine.trainer.made, self.machine.trainer.finish_step):
            try:
                call(version, self.epoch - 1)
            except AsyncRLError as error:
                assert "epoch" in str(error)
            else:
                raise AssertionError("an older trainer was served")

    @rule(which=st.integers(0, 20), found=st.booleans())
    def a_trajectory_rots(self, which: int, found: bool) -> None:
        """In the journal; found at the next use of it, or when the buffer is started anew."""
        groups = [g for g in self.machine.state.training.groups.values() if g.phase != "drawn" and g.trajectories]
        if not groups:
            return
        group = groups[which % len(groups)]
        self.store.rot(group.trajectories[min(group.trajectories)].place)
        if found:
            self.machine.go_on(self.rules, complete=False)
            self.grading = [lease for lease in self.grading if lease.id in self.machine.state.leases]

    # --- what holds at any moment

    @invariant()
    def conserved(self) -> None:
        state = self.machine.state
        state.check()
        for pool in (state.training, state.held_out):
            phases = {number: phase for phase in PHASES for number in pool.phases[phase]}
            assert phases == {number: group.phase for number, group in pool.groups.items()}
        assert set(state.leases) == {
            group.lease.id
            for pool in (state.training, state.held_out)
            for group in pool.groups.values()
            if group.lease is not None
        }
        limit = self.rules.eta_prime(max(state.eta, *[g.eta for g in state.training.groups.values()], 0))
        assert state.m <= ((state.version + limit) // self.rules.reuse + 1) * self.rules.groups

    @invariant()
    def never_stuck(self) -> None:
        assert "can never be drawn" not in (self.machine.state.broken or "")

    def teardown(self) -> None:
        """The run can still be ended by fair workers, and its events give its state again."""
        if not hasattr(self, "machine"):
            return
        state = self.machine.state
        if state.broken is None:
            self._play_fair()
        self.machine.close("the end")
        state.check()
        assert state.held == 0
        redone = new_state(self.rules)
        for event in self.machine.take():
            redone.apply(event)
        assert plain(redone) == plain(state)

    def _play_fair(self) -> None:
        """One worker with the newest weights, one grader, one trainer: the run must come to its end."""
        state = self.machine.state
        self.now += 1000.0
        for _ in range(400):
            if isinstance(self._turn(), Ended) or state.broken is not None:
                break
        else:
            raise AssertionError(f"no end: {plain(state)}")
        assert "can never be drawn" not in (state.broken or "")
        if state.broken is None and self.rules.tasks is None:
            assert state.version == self.rules.max_steps

    def _turn(self) -> Any:
        state = self.machine.state
        self.now += 1.0
        self.machine.workers.lapse(self.now)
        for lease in self.machine.workers.acquire("fair", "f", "generate", 64, state.version, self.now):
            for member in list(lease.open):
                done = trajectory((state.version, 1))
                self.machine.workers.finish_generate("fair", "f", lease.id, member, done, self.now)
        for lease in self.machine.workers.acquire("grader", "g", "score", 64, -1, self.now):
            for member in list(lease.open):
                self.machine.workers.finish_score("grader", "g", lease.id, member, Score(1.0), self.now)
        if state.broken is not None:
            return None
        had = state.batch
        drawn = self.machine.trainer.draw(state.version, self.epoch)
        if isinstance(drawn, Batch):
            self._check(drawn, state.version, fresh=had is None)
            self.machine.trainer.finish_step(state.version, self.epoch)
        return drawn

    def _holder(self, lease: LeaseId) -> str:
        return self.machine.state.leases[lease].worker


Buffer.TestCase.settings = profile(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestBuffer = Buffer.TestCase
