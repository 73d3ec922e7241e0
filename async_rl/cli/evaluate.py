"""`async-rl eval RUN.toml`: scores a checkpoint on the run's held-out data, by the run's own engine and grader."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from async_rl.config import Config, load
from async_rl.config.schema import Rollout, Sampling, SGLangEngine, VLLMEngine
from async_rl.data import check as check_data
from async_rl.data import held_out_tasks
from async_rl.errors import UserError
from async_rl.evaluation import pass_at_k
from async_rl.models.load import check_path
from async_rl.trajectory import Score, Task

RIGHT = 1.0 - 1e-6  # a reward from which on a sample counts as right for pass@k


def evaluate(
    path: str, overrides: Sequence[str], *, checkpoint: str | None, samples: int, temperature: float | None
) -> int:
    """Print a table: per source the mean reward, and the unbiased pass@k for k up to `samples`."""
    config = load(path, overrides)
    if samples < 1:
        raise UserError(f"--samples {samples}: at least 1")
    if temperature is not None and temperature < 0:
        raise UserError(f"--temperature {temperature:g}: 0 is greedy, more is random")
    if temperature == 0 and samples > 1:
        raise UserError(f"--samples {samples} of --temperature 0 are all the same")
    if not config.data.held_out:
        raise UserError("eval needs data.held_out")
    if checkpoint is not None:
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=checkpoint))
    check_path(config.model)
    check_data(config.data)
    if temperature is None:
        temperature = 0.0 if samples == 1 else config.sampling.temperature
    tasks = held_out_tasks(config.data)
    scores = asyncio.run(score(config, tasks, samples, temperature))
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    Console().print(table(tasks, scores, f"{config.model.path}: {len(tasks)} tasks x {samples}, {kind}"))
    return 0


async def score(config: Config, tasks: list[Task], samples: int, temperature: float) -> list[list[Score]]:
    """`samples` scores of each task, all generated together by one engine."""
    from async_rl.services.reward.pool import GraderPool
    from async_rl.services.rollout import environments
    from async_rl.services.rollout.backends import build
    from async_rl.services.rollout.member import Sampler

    greedy = temperature == 0
    sampling: Sampling = msgspec.structs.replace(config.sampling, temperature=temperature or 1.0)
    if isinstance(config.rollout.engine, VLLMEngine | SGLangEngine):  # another environment's, or another's weights
        config = msgspec.structs.replace(config, rollout=Rollout())
    engine, text = await build(config)
    engine.version = 0
    room = asyncio.Semaphore(config.rollout.max_in_flight)

    async def one(pool: GraderPool, task: Task, number: int) -> Score:
        def seed(call: int) -> int:
            return config.seed + number + call * samples

        async with room:
            made = await sampler.sample(task, sampling, greedy=greedy, seed=seed, drafts=[])
        return await pool.grade(task, made)

    try:
        async with GraderPool(config.reward) as pool, contextlib.AsyncExitStack() as resources:
            sampler = Sampler(engine, text, await environments.build(config, text, engine.context, resources))
            flat = await asyncio.gather(*(one(pool, task, k) for task in tasks for k in range(samples)))
    finally:
        await engine.close()
    return [flat[i : i + samples] for i in range(0, len(flat), samples)]


def table(tasks: list[Task], scores: list[list[Score]], title: str) -> Table:
    """One row a source, and one for all."""
    by_source: dict[str, list[list[Score]]] = defaultdict(list)
    for task, graded in zip(tasks, scores, strict=True):
        by_source[task.source].append(graded)
    if len(by_source) > 1:
        by_source["all"] = scores
    samples = len(scores[0])
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= samples]
    sheet = Table("source", "tasks", "reward", *(f"pass@{k}" for k in ks), "no vote", title=title, title_justify="left")
    for source, groups in by_source.items():
        voting = [[s.reward for s in group if s.reward is not None] for group in groups]
        rewards = [reward for group in voting for reward in group]
        mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "unknown"
        passes = [_mean_pass([group for group in voting if len(group) >= k], k) for k in ks]
        sheet.add_row(source, str(len(groups)), mean, *passes, str(len(groups) * samples - len(rewards)))
    return sheet


def _mean_pass(groups: list[list[float]], k: int) -> str:
    if not groups:
        return "unknown"
    chances = [pass_at_k(len(group), sum(reward >= RIGHT for reward in group), k) for group in groups]
    return f"{sum(chances) / len(chances):.3f}"
