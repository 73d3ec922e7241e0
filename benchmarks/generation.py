"""Tokens a second of the rollout's engine against `model.generate` in batches of the same size.

    python benchmarks/generation.py [--rounds 2]

One thread, a Llama of about 3 million parameters, the same work for both, taken in turns. Useful tokens alone
count: what `generate` decodes for rows that have ended already is its loss. Mixed: 8 to 128 new tokens, every
doubling as likely as another, as lengths of answers are; uniform: 8 to 128, every length as likely as
another, which wastes less of a batch and so favours `generate`; equal: 32 each. The last line is one JSON
object. Goals, by CPU time: mixed above 2.5, equal above 0.6; uniform is shown beside them and has none.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.config.schema import Sampling, TransformersEngine
from async_rl.services.rollout import transformers_engine

BATCH = 128
PROMPT_TOKENS = 16
GOALS = {"mixed": 2.5, "equal": 0.6}


class Work(NamedTuple):
    prompts: list[list[int]]
    lengths: list[int]  # new tokens of each request


class Spent(NamedTuple):
    tokens: int
    cpu_s: float
    wall_s: float


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def work(kind: str, requests: int) -> Work:
    chance = random.Random(0)
    draw = {
        "mixed": lambda: round(8 * 16 ** chance.random()),
        "uniform": lambda: chance.randint(8, 128),
        "equal": lambda: 32,
    }[kind]
    lengths = [draw() for _ in range(requests)]
    return Work([[chance.randrange(3, 300) for _ in range(PROMPT_TOKENS)] for _ in lengths], lengths)


async def by_engine(engine: transformers_engine.TransformersEngine, todo: Work) -> int:
    """All requests at once; the engine decodes BATCH of them together and takes the next as one ends."""
    requests = zip(todo.prompts, todo.lengths, strict=True)
    done = await asyncio.gather(
        *(engine.generate(p, Sampling(max_new_tokens=n), seed=i) for i, (p, n) in enumerate(requests))
    )
    return sum(len(completion.tokens) for completion in done)


async def by_generate(plain: LlamaForCausalLM, todo: Work) -> int:
    """Batches of BATCH in order, each until its longest row is done."""
    for start in range(0, len(todo.lengths), BATCH):
        longest = max(todo.lengths[start : start + BATCH])
        prompts = torch.tensor(todo.prompts[start : start + BATCH])
        plain.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=longest,
            max_new_tokens=longest,
            do_sample=True,
            eos_token_id=None,
            pad_token_id=0,
        )
    return sum(todo.lengths)


async def timed(run: Callable[[], Awaitable[int]]) -> Spent:
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = await run()
    return Spent(tokens, time.process_time() - cpu, time.perf_counter() - wall)


def rates(runs: list[Spent]) -> dict[str, float]:
    tokens = sum(run.tokens for run in runs)
    return {
        "tokens_per_cpu_s": round(tokens / sum(run.cpu_s for run in runs), 1),
        "tokens_per_wall_s": round(tokens / sum(run.wall_s for run in runs), 1),
    }


async def compare(rounds: int) -> dict[str, object]:
    settings = TransformersEngine(max_batch_tokens=512, max_requests=BATCH)
    engine = transformers_engine.TransformersEngine(model(), [], settings)
    plain = model()
    report: dict[str, object] = {}
    try:
        for kind in ("mixed", "uniform", "equal"):
            todo = work(kind, 4 * BATCH)
            ours, theirs = [], []
            for _ in range(rounds):
                ours.append(await timed(lambda todo=todo: by_engine(engine, todo)))  # type: ignore[misc]
                theirs.append(await timed(lambda todo=todo: by_generate(plain, todo)))  # type: ignore[misc]
            engine_rates, generate_rates = rates(ours), rates(theirs)
            report[kind] = {
                "engine": engine_rates,
                "generate": generate_rates,
                "ratio_cpu": round(engine_rates["tokens_per_cpu_s"] / generate_rates["tokens_per_cpu_s"], 2),
                "ratio_wall": round(engine_rates["tokens_per_wall_s"] / generate_rates["tokens_per_wall_s"], 2),
                "goal": GOALS.get(kind),
            }
            print(f"{kind}: {report[kind]}", flush=True)
    finally:
        await engine.close()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = asyncio.run(compare(arguments.rounds))
    print(json.dumps({"batch": BATCH, **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
