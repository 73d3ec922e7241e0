"""The rollout service against a scripted buffer and a scripted relay, over real sockets."""

import asyncio

import pytest
import uvloop

from async_rl.actor.service import first_cause
from async_rl.errors import ConfigError, EngineDied, EngineFault
from async_rl.protocol.control import Stop
from async_rl.services.rollout.service import RolloutService
from async_rl.trajectory import token_versions
from tests.flow.rollout_material import ring, settings

FAST = {"kind": "fake", "tokens_per_s": 2000.0, "median_tokens": 20, "accuracy": 1.0}
SLOW = {"kind": "fake", "tokens_per_s": 20.0, "median_tokens": 40, "accuracy": 1.0}


def run(coroutine):
    async def limited():
        async with asyncio.timeout(60):
            return await coroutine

    return uvloop.run(limited())


def slow(runs, **tables):
    return settings(runs, rollout={"max_in_flight": 8, "engine": SLOW}, **tables)


def test_groups_are_leased_sampled_and_handed_in(tmp_path):
    async def main():
        async with ring(settings(tmp_path), tmp_path, published=3) as r:
            r.buffer.offer(5)
            await r.until(lambda: len(r.buffer.finished) == 10)
            trajectory = r.buffer.trajectory(4, 1)
            assert trajectory.text == "right"
            assert trajectory.stop == "eos"
            assert trajectory.versions == [(3, 20)]
            prompt = int((~trajectory.action).sum())
            assert len(trajectory.tokens) == prompt + 20 and trajectory.action[prompt:].all()
            assert set(r.buffer.started.values()) == {3}
            assert all(request.n >= 2 for request in r.buffer.acquired)  # a group at least
            assert max(request.n for request in r.buffer.acquired) == 8
            await r.until(lambda: r.buffer.stats and r.buffer.stats.finished == 10)
            assert r.buffer.stats.tokens == 200 and 0 < r.buffer.stats.busy_s < r.buffer.stats.up_s
            await r.end()

    run(main())


def test_nothing_is_leased_before_the_first_weights(tmp_path):
    async def main():
        async with ring(settings(tmp_path), tmp_path, published=None) as r:
            r.buffer.offer()
            await asyncio.sleep(0.3)
            assert not r.buffer.acquired
            r.relay.publish(7)
            await r.until(lambda: len(r.buffer.finished) == 2)
            assert r.buffer.acquired[0].version == 7

    run(main())


def test_new_weights_do_not_wait_for_work_that_was_asked_for_with_the_old_ones(tmp_path):
    async def scenario():
        async with ring(settings(tmp_path), tmp_path) as r:
            r.buffer.patient = True
            await r.until(lambda: r.buffer.acquired)  # without a withdrawal, this one is never answered
            r.relay.publish(1)
            await r.until(lambda: r.buffer.acquired[-1].version == 1)
            r.buffer.offer(1)
            await r.until(lambda: len(r.buffer.finished) == 2)
            assert r.buffer.granted == {0: 1} and r.buffer.versions(0) == [1]
            await r.end()

    run(scenario())


@pytest.mark.parametrize("mode", ["sync", "one-step"])
def test_without_in_flight_updates_a_worker_drains_before_it_updates(tmp_path, mode):
    """Field report 3, the rollout's part: no sample has two versions, none resumes on old weights."""

    async def main():
        async with ring(slow(tmp_path, mode=mode), tmp_path) as r:
            r.buffer.offer(2)
            await r.until(lambda: len(r.buffer.started) == 2)
            r.relay.publish(1)
            await r.until(lambda: r.service._newer and not r.service._granting.locked())
            r.buffer.offer(2)
            await r.until(lambda: len(r.buffer.finished) == 8)
            assert r.buffer.granted == {0: 0, 1: 0, 2: 1, 3: 1}
            for group, version in r.buffer.granted.items():
                for member in (0, 1):
                    assert set(token_versions(r.buffer.trajectory(group, member))) == {version}
            assert r.buffer.stats.updates >= 1

    run(main())


def test_in_flight_updates_go_under_running_requests(tmp_path):
    async def main():
        async with ring(slow(tmp_path, mode="async"), tmp_path) as r:
            r.buffer.offer(4)
            await r.until(lambda: len(r.buffer.started) == 4)
            await asyncio.sleep(0.3)
            r.relay.publish(1)
            await r.until(lambda: r.service.version == 1)
            assert not r.buffer.finished
            await r.until(lambda: len(r.buffer.finished) == 8)
            for group in range(4):
                assert r.buffer.versions(group) == [0, 1]
                assert set(r.buffer.progress[group]) == {0}
            assert not r.buffer.failed

    run(main())


def test_with_a_kept_cache_tokens_carry_the_oldest_version(tmp_path):
    async def main():
        config = slow(tmp_path, mode="async", staleness={"keep_cache": True})
        async with ring(config, tmp_path) as r:
            r.buffer.offer()
            await r.until(lambda: r.buffer.started)
            r.relay.publish(1)
            await r.until(lambda: r.service.version == 1)
            await r.until(lambda: len(r.buffer.finished) == 2)
            assert r.buffer.versions(0) == [0]

    run(main())


def test_an_evaluation_defers_updates_until_it_is_done(tmp_path):
    async def main():
        async with ring(slow(tmp_path, mode="async"), tmp_path) as r:
            r.buffer.offer(2, members=1, exact=0, greedy=True)
            r.buffer.offer(1)
            await r.until(lambda: len(r.buffer.started) == 3)
            r.relay.publish(1)
            r.relay.publish(2)
            await r.until(lambda: r.service.version == 2)
            assert (0, 0) in r.buffer.finished and (1, 0) in r.buffer.finished
            assert r.buffer.versions(0) == r.buffer.versions(1) == [0]

    run(main())


def test_weights_taken_back_while_read_are_fetched_again(tmp_path):
    async def main():
        async with ring(settings(tmp_path), tmp_path) as r:
            r.buffer.offer()
            await r.until(lambda: len(r.buffer.finished) == 2)
            r.relay.take_back = 2
            r.relay.publish(1)
            await r.until(lambda: r.service.version == 1)
            assert r.relay.fetched.count(1) >= 3

    run(main())


def test_a_revoked_lease_is_dropped_and_frees_its_room(tmp_path):
    async def main():
        async with ring(slow(tmp_path, mode="async"), tmp_path) as r:
            r.buffer.offer(4)
            await r.until(lambda: len(r.buffer.started) == 4)
            for held in list(r.service._ledger.held):
                r.buffer.revoke[held] = "stale"
            await r.until(lambda: not r.service._ledger.held)
            r.buffer.offer(1)
            await r.until(lambda: len(r.buffer.started) == 5)
            assert not r.buffer.finished and not r.buffer.failed

    run(main())


def test_a_lease_refused_at_its_start_is_not_sampled(tmp_path):
    async def main():
        async with ring(settings(tmp_path), tmp_path) as r:
            r.buffer.refuse_start = {0}
            r.buffer.offer(2)
            await r.until(lambda: len(r.buffer.finished) == 2)
            assert {group for group, _ in r.buffer.finished} == {1}

    run(main())


def test_a_stop_hands_back_what_is_not_done(tmp_path):
    async def main():
        async with ring(slow(tmp_path), tmp_path) as r:
            r.buffer.offer(3)
            await r.until(lambda: len(r.buffer.started) == 3)
            await r.service._answer(Stop("test"))
            async with asyncio.timeout(10):
                await r.task
            assert {fail.lease.group for fail in r.buffer.failed} == {0, 1, 2}
            assert {(fail.member, fail.reason) for fail in r.buffer.failed} == {(None, "worker stops")}

    run(main())


def test_the_end_of_the_run_ends_the_service_without_failures(tmp_path):
    async def main():
        async with ring(slow(tmp_path), tmp_path) as r:
            r.buffer.offer(3)
            await r.until(lambda: len(r.buffer.started) == 3)
            await r.end()
            assert not r.buffer.failed

    run(main())


def test_a_fault_of_one_member_fails_that_member_alone(tmp_path, monkeypatch):
    """Field report 47, the rollout's part: one trajectory's exception aborts nothing else."""
    from async_rl.services.rollout.fake_engine import FakeEngine

    generate = FakeEngine.generate
    calls = []

    async def sometimes(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise EngineFault("a broken request")
        return await generate(self, *args, **kwargs)

    monkeypatch.setattr(FakeEngine, "generate", sometimes)

    async def main():
        async with ring(settings(tmp_path), tmp_path) as r:
            r.buffer.offer(2)
            await r.until(lambda: len(r.buffer.finished) == 3 and r.buffer.failed)
            assert [(f.lease.group, f.member) for f in r.buffer.failed] == [(0, 1)]
            assert "a broken request" in r.buffer.failed[0].reason

    run(main())


def test_a_dead_engine_ends_the_service_with_its_error(tmp_path, monkeypatch):
    """Field report 8, the rollout's part: a fatal error is not swallowed."""
    from async_rl.services.rollout.fake_engine import FakeEngine

    async def dead(self, *args, **kwargs):
        raise EngineDied("out of memory")

    monkeypatch.setattr(FakeEngine, "generate", dead)

    async def main():
        async with ring(settings(tmp_path), tmp_path) as r:
            r.buffer.offer()
            with pytest.raises(BaseExceptionGroup) as caught:
                async with asyncio.timeout(20):
                    await r.task
            assert isinstance(first_cause(caught.value), EngineDied)

    run(main())


def test_a_prompt_without_room_for_an_answer_fails_with_the_reason(tmp_path, monkeypatch):
    from async_rl.services.rollout.fake_engine import FakeEngine

    monkeypatch.setattr(FakeEngine, "context", 5)

    async def main():
        async with ring(settings(tmp_path), tmp_path) as r:
            r.buffer.offer(answer="right")
            await r.until(lambda: r.buffer.failed)
            assert r.buffer.failed[0].member is None
            assert r.buffer.failed[0].reason == "a prompt of 5 tokens leaves no room in a context of 5"

    run(main())


def test_settings_that_cannot_work_are_refused(tmp_path):
    room = settings(tmp_path, rollout={"max_in_flight": 1, "engine": FAST})
    with pytest.raises(ConfigError, match=r"rollout.max_in_flight = 1 is below the 2 trajectories of a group"):
        RolloutService(room, "rollout-0")

    async def main():
        config = settings(tmp_path, sampling={"top_p": 0.9, "max_new_tokens": 10})
        async with ring(config, tmp_path) as r:
            with pytest.raises(BaseExceptionGroup) as caught:
                await r.task
            assert "sampling.top_p = 0.9" in str(first_cause(caught.value))

    run(main())
