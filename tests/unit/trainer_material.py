"""Small models, trajectories and draws for the trainer's tests."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from async_rl.config import parse
from async_rl.protocol.buffer import Drawn, DrawnGroup, DrawnMember
from async_rl.services.trainer.samples import Sample
from async_rl.trajectory import Score, Task, Trajectory

VOCABULARY = 13


def tiny_llama(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config).to(dtype).eval()


def tiny_qwen3(seed=0):
    """With norms of queries and keys, and biases nowhere."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).to(torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def configuration(**tables):
    """A run's configuration; tables given replace or extend the defaults of the tests."""
    tree = {
        "name": "test",
        "model": {"path": "none"},
        "data": {"train": [{"kind": "jsonl", "path": "none"}]},
        "max_steps": 4,
        "trainer": {"learning_rate": 0.01},
    }
    return parse(tree | tables)


def trajectory(prompt, completion, *, logprobs=None, versions=None, stop="eos", survivors=None):
    """`prompt` and `completion` are lists of ids."""
    sampled = len(completion)
    return Trajectory(
        tokens=np.array(prompt + completion, dtype=np.int32),
        action=np.array([False] * len(prompt) + [True] * sampled),
        logprobs=np.array([0.0] * len(prompt) + list(logprobs or [-1.0] * sampled), dtype=np.float32),
        versions=versions or [(0, sampled)],
        stop=stop,
        text="",
        survivors=survivors,
    )


def drawn(groups, *, step=0, bound=0, sequence=0):
    """`groups`: lists of (trajectory, reward); a reward of None has no vote."""
    return Drawn(
        step=step,
        groups=[
            DrawnGroup(
                group=number,
                attempt=0,
                task=Task(index=number, source="even" if number % 2 == 0 else "odd", prompt="p"),
                bound=bound,
                members=[
                    DrawnMember(m, t, Score(reward, "abstained" if reward is None else "graded"))
                    for m, (t, reward) in enumerate(members)
                ],
            )
            for number, members in enumerate(groups)
        ],
        dropped_stale=0,
        failed=0,
        sequence=sequence,
    )


def random_trajectory(generator, *, longest=8, versions=None, stop="eos"):
    prompt = generator.integers(0, VOCABULARY, generator.integers(1, longest)).tolist()
    completion = generator.integers(0, VOCABULARY, generator.integers(1, longest)).tolist()
    logprobs = (-3 * generator.random(len(completion))).tolist()
    spans = [(versions, len(completion))] if versions is not None else None
    return trajectory(prompt, completion, logprobs=logprobs, versions=spans, stop=stop)


def random_samples(count, seed=0, *, silent=()):
    """`silent`: positions whose advantage is 0."""
    generator = np.random.default_rng(seed)
    return [
        sample(random_trajectory(generator), advantage=0.0 if k in silent else float(generator.normal()))
        for k in range(count)
    ]


def sample(t, *, advantage=1.0, loss=None):
    positions = torch.tensor(np.flatnonzero(t.action))
    count = len(positions)
    return Sample(
        tokens=torch.tensor(t.tokens, dtype=torch.int64),
        action=positions,
        behaviour=torch.tensor(t.logprobs[t.action]),
        finite=torch.ones(count, dtype=torch.bool),
        loss=torch.ones(count, dtype=torch.bool) if loss is None else torch.tensor(loss),
        lag=torch.zeros(count, dtype=torch.int64),
        advantages=torch.full((count,), advantage),
        survivors=None if t.survivors is None else torch.tensor(t.survivors, dtype=torch.int64),
    )


def plain_logprobs(model, t, temperature=1.0):
    """Log-probabilities of the action tokens of one trajectory, by an unpadded forward pass."""
    ids = torch.tensor(t.tokens, dtype=torch.int64)[None]
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids).logits[0].double() / temperature, dim=-1)
    positions = np.flatnonzero(t.action)
    return table[positions - 1, ids[0, positions]]
