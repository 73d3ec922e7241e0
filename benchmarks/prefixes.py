"""How much of what is read again is computed again: a group's prompt, and the earlier turns of an episode.

    python benchmarks/prefixes.py transformers          # here
    .venv-vllm/bin/python benchmarks/prefixes.py vllm   # in vLLM's environment

A small random model, 16 groups of 8 behind prompts of 400 tokens; then episodes of four turns of 100 tokens each. The
baseline is the naive count, every prompt computed whole. The last line printed is one JSON object.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.config.schema import Model, Sampling, TransformersEngine, VLLMEngine
from async_rl.services.rollout.engine import Engine

GROUPS, SIZE, PROMPT = 16, 8, 400
EPISODES, TURNS, TURN = 16, 4, 100
NEW = 8  # tokens sampled in each call
MOD = 250


def model() -> Any:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


class Counted:
    """An engine, and how many prompt tokens it has computed."""

    def __init__(self, engine: Engine, computed: Any) -> None:
        self.engine, self.computed = engine, computed


async def start(kind: str, folder: Path) -> Counted:
    if kind == "vllm":
        from async_rl.services.rollout.vllm_engine import VLLMEngine as Engine_

        model().save_pretrained(folder)
        vllm = await Engine_.start(Model(path=str(folder)), [1], VLLMEngine(max_requests=64))
        vllm.version = 0
        return Counted(vllm, lambda sampled: vllm.prefilled)
    from async_rl.services.rollout.transformers_engine import TransformersEngine as Engine__

    live, seen = model(), [0]

    def count(module: Any, given: Any) -> None:
        seen[0] += given[0].numel()

    live.get_input_embeddings().register_forward_pre_hook(count)
    engine = Engine__(live, [1], TransformersEngine(max_requests=64))
    engine.version = 0
    return Counted(engine, lambda sampled: seen[0] - sampled)  # each sampled token but the last is read once


def prompt(number: int, length: int) -> list[int]:
    return [2 + (number * 31 + k * (number + 3)) % MOD for k in range(length)]


async def groups(counted: Counted) -> tuple[int, int]:
    """(computed, naive) prompt tokens of all groups together."""
    calls = [counted.engine.generate(prompt(g, PROMPT), SAMPLING, seed=m) for g in range(GROUPS) for m in range(SIZE)]
    before = counted.computed(0)
    made = await asyncio.gather(*calls)
    return counted.computed(sum(len(one.tokens) - 1 for one in made)) - before, GROUPS * SIZE * PROMPT


async def episodes(counted: Counted) -> tuple[int, int]:
    """(computed, naive) of all turns."""
    naive = sampled = 0
    before = counted.computed(0)

    async def one(number: int) -> None:
        nonlocal naive, sampled
        tokens: list[int] = []
        for turn in range(TURNS):
            tokens = tokens + prompt(1000 + number * TURNS + turn, TURN)
            naive += len(tokens)
            made = await counted.engine.generate(tokens, SAMPLING, seed=number)
            sampled += len(made.tokens) - 1
            tokens = tokens + made.tokens

    await asyncio.gather(*(one(number) for number in range(EPISODES)))
    return counted.computed(sampled) - before, naive


SAMPLING = Sampling(max_new_tokens=NEW)


async def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("engine", choices=["transformers", "vllm"])
    kind = options.parse_args().engine
    with tempfile.TemporaryDirectory() as folder:
        counted = await start(kind, Path(folder))
        try:
            group, naive_group = await groups(counted)
            turns, naive_turns = await episodes(counted)
        finally:
            await counted.engine.close()
    result = {
        "benchmark": "prefixes",
        "engine": kind,
        "group_size": SIZE,
        "prefill_per_group": round(group / GROUPS, 1),
        "naive_per_group": naive_group / GROUPS,
        "share_of_naive": round(group / naive_group, 4),
        "one_over_group_size": 1 / SIZE,
        "turns_share_of_naive": round(turns / naive_turns, 4),
        "turns_new_tokens_alone": round(EPISODES * TURNS * TURN / naive_turns, 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
