"""The rollout service with a real model: weights over real sockets, text by its tokenizer."""

import asyncio

import pytest
import torch
import uvloop

from async_rl.config.schema import Warmup
from async_rl.models.tiny import build_model, build_tokenizer
from async_rl.services.rollout.live_weights import checksum
from async_rl.trajectory import token_versions
from tests.flow.rollout_material import ring, settings

torch.set_num_threads(1)
SHAPE = Warmup(characters="abcdefghijklmnopqrstuvwxyz :", hidden_size=32, layers=2, heads=2, context=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(SHAPE)
    build_model(SHAPE, tokenizer, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def trained(seed):
    return build_model(SHAPE, build_tokenizer(SHAPE), seed=seed).eval()


def logprobs_under(model, trajectory):
    """[T] log-probability of each token under `model`, 0 for the first."""
    ids = torch.tensor(trajectory.tokens, dtype=torch.long)
    with torch.no_grad():
        table = model(ids[None]).logits[0].log_softmax(-1)
    return torch.cat([torch.zeros(1), table[:-1].gather(1, ids[1:, None])[:, 0]])


def test_trajectories_of_a_real_model_over_an_update_in_flight(tmp_path, folder):
    config = settings(
        tmp_path,
        model={"path": str(folder)},
        sampling={"max_new_tokens": 100, "temperature": 1.0},
        rollout={"max_in_flight": 16, "engine": {"kind": "transformers"}},
        batch={"groups": 2, "group_size": 4},
        mode="async",
    )
    policies = {3: trained(3), 4: trained(4)}

    async def main():
        async with asyncio.timeout(100), ring(config, tmp_path, published=3, model=policies[3]) as r:
            r.buffer.offer(4, members=4, prompt="spell cat: ", answer="tac")
            await r.until(lambda: r.service._ledger.in_flight == 16, 60)

            def longest():
                held = r.service._ledger.held.values()
                return max((len(d.tokens) for h in held for drafts in h.drafts.values() for d in drafts), default=0)

            await r.until(lambda: longest() > 3)
            r.relay.publish(4, policies[4])
            await r.until(lambda: len(r.buffer.finished) == 16, 60)
            live = r.service._engine.checksums()
            await r.end()
            return r.buffer, live

    buffer, live = uvloop.run(main())
    assert live == {name: checksum(p) for name, p in policies[4].named_parameters()}
    tokenizer = build_tokenizer(SHAPE)
    seen = set()
    for finish in buffer.finished.values():
        made = finish.trajectory
        prompt, sampled = made.tokens[~made.action], made.tokens[made.action]
        assert tokenizer.decode(prompt) == "spell cat: "
        assert made.text == tokenizer.decode(sampled, skip_special_tokens=True)
        assert (made.stop == "eos") == (sampled[-1] == tokenizer.eos_token_id)
        versions = torch.from_numpy(token_versions(made))
        measured = torch.from_numpy(made.logprobs.copy())[torch.from_numpy(made.action.copy())]
        for version, policy in policies.items():
            expected = logprobs_under(policy, made)[torch.from_numpy(made.action.copy())]
            at = versions == version
            torch.testing.assert_close(measured[at], expected[at], atol=1e-4, rtol=0)
            seen |= {version} if at.any() else set()
    assert seen == {3, 4}
    assert not buffer.failed
