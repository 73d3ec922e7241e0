"""What packing saves on a long-tail distribution of lengths, and what logits in parts save of memory.

    python benchmarks/packing.py

Throughput: one update of the policy over trajectories of log-normal lengths, a model of some million parameters, packed
as the trainer does it. The baselines make the same update over batches that are padded to their longest, with as many
places in each as a packed row has tokens: in the order of the draw, and (`sorted`) with like lengths together. `shared`
is groups of 8 behind one prompt, which a packed row holds once; `apart` gives every trajectory a prompt of its own. All
ways in turns, medians over the rounds.

Memory: the loss alone, of 4,096 tokens over a vocabulary of 150 k; the baseline is a log-softmax of all logits. Each in
a process of its own, the growth of its peak over what it had before.

The last line printed is one JSON object.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.config import parse
from async_rl.services.trainer.logits import logits_of
from async_rl.services.trainer.network import token_logprobs
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.samples import Sample

GROUPS, SIZE = 8, 8
PROMPT = 48
MEDIAN, SIGMA, LONGEST = 40, 1.0, 512  # of the completions, tokens
CAPACITY = 4096
ROUNDS = 5
VOCABULARY = 2048

LOSS_TOKENS, LOSS_VOCABULARY, LOSS_WIDTH = 4096, 150_000, 64
PART_BYTES = 256 * 2**20


def model(vocabulary: int = VOCABULARY, width: int = 256, layers: int = 4) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LOSS_TOKENS + 1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def samples(shared: bool) -> list[Sample]:
    random = np.random.default_rng(0)
    made = []
    for _ in range(GROUPS):
        prompt = random.integers(0, VOCABULARY, PROMPT)
        for _ in range(SIZE):
            if not shared:
                prompt = random.integers(0, VOCABULARY, PROMPT)
            length = int(min(MEDIAN * np.exp(SIGMA * random.standard_normal()) + 1, LONGEST))
            tokens = np.concatenate([prompt, random.integers(0, VOCABULARY, length)])
            made.append(
                Sample(
                    tokens=torch.from_numpy(tokens),
                    action=torch.arange(PROMPT, len(tokens)),
                    behaviour=torch.full((length,), -7.0),
                    finite=torch.ones(length, dtype=torch.bool),
                    loss=torch.ones(length, dtype=torch.bool),
                    lag=torch.zeros(length, dtype=torch.int64),
                    advantages=torch.full((length,), float(random.standard_normal())),
                )
            )
    return made


def padded_batches(given: Sequence[Sample]) -> Iterator[list[Sample]]:
    """In their order, each batch as long as it fits."""
    batch: list[Sample] = []
    for sample in given:
        longest = max(len(other.tokens) for other in [*batch, sample])
        if batch and longest * (len(batch) + 1) > CAPACITY:
            yield batch
            batch = []
        batch.append(sample)
    yield batch


def padded(policy: Any, given: Sequence[Sample]) -> None:
    """The gradient of one update as batches of padded rows make it; the loss is a policy gradient."""
    total = sum(len(sample.action) for sample in given)
    for batch in padded_batches(given):
        longest = max(len(sample.tokens) for sample in batch)
        ids = torch.stack([pad(sample.tokens, longest) for sample in batch])
        seen = torch.stack([pad(torch.ones_like(sample.tokens), longest) for sample in batch])
        mask = torch.stack([pad(mark(sample), longest) for sample in batch])[:, 1:]
        advantages = torch.tensor([float(sample.advantages[0]) for sample in batch])[:, None]
        logits = policy(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        (-(logprobs * advantages * mask).sum() / total).backward()


def mark(sample: Sample) -> Tensor:
    made = torch.zeros_like(sample.tokens)
    made[sample.action] = 1
    return made


def pad(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)))


def throughput(shared: bool) -> dict[str, float]:
    """Trained tokens a second of each way."""
    given = samples(shared)
    trained = sum(len(sample.action) for sample in given)
    config = parse(
        {
            "name": "packing",
            "model": {"path": "none"},
            "data": {"train": [{"kind": "jsonl", "path": "none"}]},
            "max_steps": 1000,
            "trainer": {"learning_rate": 1e-6, "micro_batch_tokens": CAPACITY},
        }
    )
    objective = Objective.of(config)
    ours = Policy(model(), config)
    theirs = model()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-6, fused=True)
    by_length = sorted(given, key=lambda sample: len(sample.tokens))

    def plain(batch: Sequence[Sample]) -> None:
        padded(theirs, batch)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    ways = {
        "packed": lambda: ours.update(given, objective),
        "padded": lambda: plain(given),
        "sorted": lambda: plain(by_length),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS + 1):
        for way, update in ways.items():
            began = time.perf_counter()
            update()
            times[way].append(time.perf_counter() - began)
    return {way: round(trained / statistics.median(found[1:]), 1) for way, found in times.items()}


def memory(way: str) -> int:
    """Bytes by which the peak of this process grows with the loss and its gradient."""
    net = model(LOSS_VOCABULARY, LOSS_WIDTH, 1)
    ids = torch.arange(LOSS_TOKENS + 1) % LOSS_VOCABULARY
    inputs = {"input_ids": ids[None, :-1], "use_cache": False}
    with torch.no_grad():
        net.model(**inputs)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = peak()
    if way == "parts":
        logits = logits_of(net, inputs, torch.arange(LOSS_TOKENS), PART_BYTES)
        logprobs = logits.read(lambda z, targets: token_logprobs(z, targets, None, 1.0), ids[1:])[0]
    else:
        logprobs, _ = token_logprobs(net(**inputs).logits[0], ids[1:], None, 1.0)
    (-logprobs.mean()).backward()
    return peak() - before


def peak() -> int:
    """Bytes resident at most, of this process (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    if len(sys.argv) > 1:
        print(memory(sys.argv[1]))
        return
    torch.set_num_threads(1)
    found = {"shared": throughput(True), "apart": throughput(False)}
    peaks = {
        way: int(subprocess.run([sys.executable, __file__, way], check=True, capture_output=True, text=True).stdout)
        for way in ("whole", "parts")
    }
    result = {
        "benchmark": "packing",
        "trained_tokens_per_s": found,
        "packed_over_padded": {kind: round(ways["packed"] / ways["padded"], 2) for kind, ways in found.items()},
        "packed_over_sorted": {kind: round(ways["packed"] / ways["sorted"], 2) for kind, ways in found.items()},
        "loss_peak_mib": {way: round(peak / 2**20) for way, peak in peaks.items()},
        "whole_logits_mib": round(LOSS_TOKENS * LOSS_VOCABULARY * 4 / 2**20),
        "peak_over_whole": round(peaks["parts"] / peaks["whole"], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
