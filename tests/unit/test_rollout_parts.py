"""The parts of the rollout around its engine: drafts, the ledger, counts, prompts, the fake engine."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.schema import FakeEngine as Settings
from async_rl.config.schema import Sampling, Warmup
from async_rl.errors import EngineDied
from async_rl.models.text import TokenizerText
from async_rl.models.tiny import build_tokenizer
from async_rl.protocol.buffer import GenerateLease, LeaseId
from async_rl.services.rollout.engine import Completion, Draft
from async_rl.services.rollout.fake_engine import FakeEngine, FakeText
from async_rl.services.rollout.held import Held, Ledger, seed_of, trajectory
from async_rl.services.rollout.meter import Meter
from async_rl.trajectory import Message, Task


def lease(group=0, *, members=2, exact=None, attempt=0, index=0):
    task = Task(index=index, source="s", prompt="q", answer="yes")
    id_ = LeaseId(group, attempt, "generate")
    return GenerateLease(id_, task, list(range(members)), Sampling(), [], 0, exact)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=8))
def test_a_draft_counts_every_token_once(steps):
    draft, version, expected = Draft(), 0, []
    for newer, tokens in steps:
        version += newer
        draft.mark(version)
        draft.tokens += [0] * tokens
        expected += [version] * tokens
    spans = draft.versions()
    assert [v for v, count in spans for _ in range(count)] == expected
    assert all(count > 0 for _, count in spans)
    assert draft.oldest_version == (expected[0] if expected else version)


def test_the_oldest_version_of_a_lease_is_over_its_members():
    held = Held(lease(members=3), version=4)
    assert held.oldest_version == 4
    for member, versions in enumerate([(5,), (4, 6), (6,)]):
        for version in versions:  # of member 1, two calls of an episode
            draft = Draft()
            draft.mark(version)
            draft.tokens.append(0)
            held.drafts[member].append(draft)
    assert held.oldest_version == 4
    del held.drafts[1][0]
    assert held.oldest_version == 5


@pytest.mark.parametrize(
    ("leases", "in_flight", "may"),
    [
        ([], True, True),
        ([], False, True),
        ([lease()], True, True),
        ([lease()], False, False),
        ([lease(), lease(1, exact=3)], True, False),
        ([lease(exact=3)], False, False),
    ],
)
def test_when_weights_may_change(leases, in_flight, may):
    ledger = Ledger()
    for one in leases:
        ledger.held[one.id] = Held(one, 3)
    assert ledger.may_update(in_flight) is may
    assert ledger.in_flight == 2 * len(leases)


def test_seeds_differ_between_members_and_are_those_of_another_run():
    """Field report 3, the rollout's part: what a seeded run samples depends on task and member alone."""
    seeds = {
        seed_of(1, lease(group, members=4, attempt=attempt, index=index, exact=exact), member)
        for group in (0,)
        for attempt in (0, 1)
        for index in range(10)
        for exact in (None, 0)
        for member in range(4)
    }
    assert len(seeds) == 2 * 10 * 2 * 4
    assert seed_of(1, lease(group=3, index=2), 1) == seed_of(1, lease(group=9, index=2), 1)
    assert seed_of(2, lease(), 1) != seed_of(1, lease(), 1)


def test_a_trajectory_holds_the_ids_as_they_were_sampled():
    """Field report 37, single turn: ids are never decoded and encoded again."""
    done = Completion([7, 8, 2], [-0.5, -0.25, -1.0], [(3, 1), (4, 2)], "eos", [[7], [8, 9, 1], [2, 5]])
    made = trajectory([5, 6], done, "text")
    assert made.problems() is None
    assert made.tokens.tolist() == [5, 6, 7, 8, 2] and made.tokens.dtype == np.int32
    assert made.action.tolist() == [False, False, True, True, True]
    assert made.logprobs.tolist() == [0.0, 0.0, -0.5, -0.25, -1.0]
    assert made.survivors.tolist() == [[7, -1, -1], [8, 9, 1], [2, 5, -1]]
    assert made.oldest_version == 3


def test_busy_time_is_time_with_something_in_flight():
    meter = Meter(0.0)
    meter.begin(1.0)
    meter.begin(2.0)
    meter.end(3.0)
    assert meter.stats(4.0).busy_s == 3.0
    meter.end(5.0)
    meter.begin(8.0)
    meter.finished(12)
    meter.updated(0.5)
    stats = meter.stats(10.0)
    assert (stats.up_s, stats.busy_s, stats.tokens, stats.finished) == (10.0, 6.0, 12, 1)
    assert (stats.updates, stats.paused_s, meter.in_flight) == (1, 0.5, 1)


def test_prompts_go_through_the_chat_template_or_as_they_are():
    tokenizer = build_tokenizer(Warmup(characters="abcdefghijklmnopqrstuvwxyz :\n"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    text = TokenizerText(tokenizer, [tokenizer.eos_token_id])
    plain = text.encode(Task(index=0, source="s", prompt="spell cat: "))
    assert tokenizer.decode(plain) == "spell cat: "
    chat = text.encode(Task(index=0, source="s", messages=[Message("user", "spell cat")]))
    assert tokenizer.decode(chat) == "user: spell cat\nassistant: "
    assert text.decode([*tokenizer("tac").input_ids, tokenizer.eos_token_id]) == "tac"


class Nothing:
    """Weights that a fake engine does not look at."""

    def __init__(self, version):
        self.version, self.aliases = version, {}

    def tensors(self):
        return iter(())


def version(number):
    async def read(apply):
        await apply(Nothing(number))
        return number

    return read


def fake(body, **changes):
    async def main():
        engine = FakeEngine(Settings(**{"tokens_per_s": 200.0, "median_tokens": 30, "accuracy": 1.0} | changes))
        await engine.update(version(0))
        async with asyncio.timeout(20):
            return await body(engine)

    return asyncio.run(main())


def test_the_fake_engine_answers_with_the_tasks_answer_or_not():
    text = FakeText(Settings().vocabulary)
    prompt = text.encode(lease().task)

    async def body(engine):
        many = [engine.generate(prompt, Sampling(max_new_tokens=100), seed=i) for i in range(40)]
        return await asyncio.gather(*many)

    answers = [text.decode(done.tokens) for done in fake(body, accuracy=0.5, tokens_per_s=5000.0)]
    assert set(answers) == {"yes", "?"} and 8 <= answers.count("yes") <= 32


def test_the_fake_engine_records_versions_over_an_update():
    draft = Draft()

    async def body(engine):
        task = asyncio.create_task(engine.generate([70], Sampling(max_new_tokens=100), draft=draft))
        await asyncio.sleep(0.06)
        await engine.update(version(2))
        assert draft.oldest_version == 0
        return await task

    done = fake(body)
    assert [v for v, _ in done.versions] == [0, 2] and sum(n for _, n in done.versions) == 30
    assert len(done.logprobs) == 30 and done.stop == "eos"


def test_the_fake_engine_keeps_the_oldest_version_with_its_cache():
    async def body(engine):
        task = asyncio.create_task(engine.generate([70], Sampling(max_new_tokens=100)))
        await asyncio.sleep(0.05)
        await engine.update(version(2), keep_cache=True)
        return await task

    assert fake(body).versions == [(0, 30)]


def test_the_fake_engine_stops_at_the_length_and_dies_when_closed():
    async def body(engine):
        done = await engine.generate([70], Sampling(max_new_tokens=5))
        assert done.stop == "length" and len(done.tokens) == 5
        task = asyncio.create_task(engine.generate([70], Sampling(max_new_tokens=100)))
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(EngineDied):
            await task

    fake(body)


def test_the_service_and_the_fake_engine_import_no_torch():
    """Field report 52, the rollout's part: backends load in the branch that chose them."""
    code = (
        "import sys, async_rl.services.rollout.service, async_rl.services.rollout.fake_engine;"
        "bad = {'torch', 'transformers'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
