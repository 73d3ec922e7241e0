"""Every preset on the quickstart task, and what staleness does to the ways of correcting it.

    python benchmarks/algorithms.py [--sections presets,lags] [--seeds 3] [--jobs 2] [key=value ...]

The ring in lock-step, in one process: the rollout's engine, the grader and the trainer's step are those of a run,
but the draw of step s is sampled with the weights of version max(s - lag, 0), so that every token has exactly that
lag. What is compared is held-out accuracy after the last step, sampled at temperature 1, means over the seeds.

presets   each file of recipes/algorithms/ at lag 0
lags      naive PPO, decoupled, truncated importance sampling and M2PO at a lag of 0, 2 and 8

The last line printed is one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

RECIPE = "recipes/quickstart.toml"
PRESETS = Path("recipes/algorithms")
CORRECTIONS = ("naive", "decoupled", "tis", "m2po")
LAGS = (0, 2, 8)


class Job(NamedTuple):
    preset: str
    lag: int
    seed: int
    overrides: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="presets,lags")
    parser.add_argument("--only", default="", help="presets, by name")
    parser.add_argument("--lags", default=",".join(map(str, LAGS)))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="key=value, for all")
    given = parser.parse_args()
    only, lags = [name for name in given.only.split(",") if name], [int(lag) for lag in given.lags.split(",")]
    names = only or sorted(path.stem for path in PRESETS.glob("*.toml"))
    jobs = {
        "presets": [(name, 0) for name in names if only or name not in CORRECTIONS],
        "lags": [(name, lag) for name in (only or CORRECTIONS) for lag in lags],
    }
    found: dict[str, Any] = {}
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=8) as pool:
        for section in given.sections.split(","):
            todo = [
                Job(name, lag, seed, tuple(given.overrides))
                for name, lag in jobs[section]
                for seed in range(given.seeds)
            ]
            results: dict[tuple[str, int], list[dict[str, Any]]] = {}
            for job, result in pool.imap_unordered(played, todo):
                results.setdefault((job.preset, job.lag), []).append(result)
                print(f"{section}: {job.preset}, lag {job.lag}, seed {job.seed}: {shown(result)}", flush=True)
            found[section] = [{"preset": name, "lag": lag, **summed(results[name, lag])} for name, lag in jobs[section]]
            for line in found[section]:
                print(line, flush=True)
    print(json.dumps({"benchmark": "algorithms", "recipe": RECIPE, "seeds": given.seeds, **found}))


def played(job: Job) -> tuple[Job, dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    return job, asyncio.run(play(job))


def shown(result: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.3f}" for key, value in result.items() if isinstance(value, float))


def summed(results: list[dict[str, Any]]) -> dict[str, Any]:
    after = [result["after"] for result in results]
    return {
        "before": round(statistics.mean(result["before"] for result in results), 3),
        "after": round(statistics.mean(after), 3),
        "worst": round(min(after), 3),
        "best": round(max(after), 3),
        "ess": round(statistics.mean(result["ess"] for result in results), 3),
        "mismatch_kl": round(statistics.mean(result["mismatch_kl"] for result in results), 5),
        "step_s": round(statistics.mean(result["step_s"] for result in results), 3),
    }


# --- one run -----------------------------------------------------------------------------------------


async def play(job: Job) -> dict[str, Any]:
    from async_rl.config import load
    from async_rl.data import TaskStream, held_out_tasks
    from async_rl.services.reward.graders import build as build_grader
    from async_rl.services.rollout.backends import build
    from async_rl.services.trainer.metrics import step_record
    from async_rl.services.trainer.roles import Roles
    from async_rl.services.trainer.step import train_step

    lag = [f"staleness.max={job.lag}", "staleness.on_exceed=mask", "mode=async", f"seed={job.seed}"]
    config = load(RECIPE, [str(PRESETS / f"{job.preset}.toml"), *lag, *job.overrides])
    roles = Roles.load(config, config.model)
    engine, text = await build(config)
    table = Table(config, engine, text, build_grader(config.reward.grader))
    tasks, held_out = TaskStream(config.data, config.seed), held_out_tasks(config.data)
    try:
        kept = deque([Weights.of(roles.policy.model, 0)], maxlen=job.lag + 1)
        await table.show(kept[0])
        before = await table.score(held_out)
        records, spent = [], 0.0
        for step in range(config.max_steps):
            await table.show(kept[0])
            first = step * config.batch.groups
            drawn = await table.draw(step, [tasks.task(first + k) for k in range(config.batch.groups)], bound=job.lag)
            began = time.perf_counter()
            result = train_step(drawn, roles, config)
            spent += time.perf_counter() - began
            records.append(
                step_record(drawn, result, on_exceed="mask", wall_s=0.0, draw_wait_s=0.0, train_s=0.0, held_out=None)
            )
            kept.append(Weights.of(roles.policy.model, step + 1))
        await table.show(kept[-1])
        after = await table.score(held_out)
    finally:
        await engine.close()
    ess = [r.effective_sample_size for r in records if r.effective_sample_size is not None]
    kls = [r.mismatch_kl_k3 for r in records if r.mismatch_kl_k3 is not None]
    return {
        "before": before,
        "after": after,
        "ess": statistics.mean(ess),
        "mismatch_kl": statistics.mean(kls),
        "step_s": spent / config.max_steps,
    }


class Weights(NamedTuple):
    """A copy, as the relay would give it out."""

    version: int
    named: dict[str, Any]
    aliases: dict[str, str]

    @classmethod
    def of(cls, model: Any, version: int) -> "Weights":
        owner = {p.data_ptr(): name for name, p in model.named_parameters()}
        everything = model.named_parameters(remove_duplicate=False)
        named = {name: p.detach().clone() for name, p in model.named_parameters()}
        return cls(version, named, {name: owner[p.data_ptr()] for name, p in everything if name not in named})

    def tensors(self) -> Any:
        return iter(self.named.items())


class Table:
    """The engine and the grader of a run, asked directly."""

    def __init__(self, config: Any, engine: Any, text: Any, grader: Any) -> None:
        self._config, self._engine, self._text, self._grader = config, engine, text, grader

    async def show(self, weights: Weights) -> None:
        if weights.version == self._engine.version:
            return

        async def read(apply: Any) -> int:
            await apply(weights)
            return weights.version

        await self._engine.update(read)

    async def draw(self, step: int, tasks: list[Any], bound: int) -> Any:
        from async_rl.config.algorithms import ReMax
        from async_rl.protocol.buffer import Drawn, DrawnGroup, DrawnMember

        size = self._config.batch.group_size
        greedy = isinstance(self._config.algorithm.advantage, ReMax)
        asked = [(k, m) for k in range(len(tasks)) for m in range(size + greedy)]
        made = await asyncio.gather(*[self._sample(tasks[k], step, m, greedy=m == size) for k, m in asked])
        members: list[list[Any]] = [[] for _ in tasks]
        for (k, m), trajectory in zip(asked, made, strict=True):
            members[k].append(DrawnMember(m, trajectory, self._grader.grade(tasks[k], trajectory)))
        groups = [
            DrawnGroup(
                group=step * len(tasks) + k,
                attempt=0,
                task=task,
                bound=bound,
                members=members[k][:size],
                greedy=members[k][size] if greedy else None,
            )
            for k, task in enumerate(tasks)
        ]
        return Drawn(step=step, groups=groups, dropped_stale=0, failed=0)

    async def score(self, tasks: list[Any]) -> float:
        made = await asyncio.gather(*[self._sample(task, -1, 0, greedy=False) for task in tasks])
        rewards = [self._grader.grade(task, trajectory).reward for task, trajectory in zip(tasks, made, strict=True)]
        return statistics.mean(reward for reward in rewards if reward is not None)

    async def _sample(self, task: Any, step: int, member: int, *, greedy: bool) -> Any:
        from async_rl.services.rollout.held import trajectory

        prompt = self._text.encode(task)
        seed = hash((self._config.seed, step, task.index, member)) & (2**63 - 1)
        completion = await self._engine.generate(prompt, self._config.sampling, greedy=greedy, seed=seed)
        return trajectory(prompt, completion, self._text.decode(completion.tokens))


if __name__ == "__main__":
    main()
