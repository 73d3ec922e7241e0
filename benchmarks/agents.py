"""Agents whose tools take long now and then: what asynchronous training is worth.

    python benchmarks/agents.py [--steps 32] [--train-s 1.0]

Episodes of four tool calls, each log-normal (median 0.3 s, one in a hundred above 5 s); the model's time is off (the
fake engine), everything else is real: buffer, rollout, reward and weight-sync in processes of their own, tools that
sleep in asyncio. This process is the trainer, whose step takes `--train-s`. Every mode trains the same number of
groups, of the same tasks, with the same tool times, and is measured to the end of step `--steps`; the run goes on
behind it, so that nobody runs out of work before.

`ideal` is the tools' time of what was trained, spread evenly over the concurrency, or the trainer's own time where that
is more. The last line printed is one JSON object.
"""

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import uvloop

from async_rl.actor.remote import Remote
from async_rl.actor.service import run_id
from async_rl.agents.llm import LLM, Call
from async_rl.config.dump import to_toml
from async_rl.config.load import parse
from async_rl.config.schema import Config
from async_rl.protocol import buffer as messages
from async_rl.protocol import weight_sync
from async_rl.rundir import RunDir
from async_rl.trajectory import Task
from async_rl.weights.writer import Publisher

MEDIAN_S, SIGMA, CALLS = 0.3, 1.2, 4
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "one-step": {"mode": "one-step"},
    **{f"async eta {eta}": {"mode": "async", "staleness": {"max": eta}} for eta in (1, 2, 4, 8)},
}
SERVICES = ("buffer", "weight-sync", "rollout", "reward")
POLL_S = 2.0
AHEAD = 16  # steps that the run has beyond those that are measured
STARTED_S = 60.0


async def episode(task: Task, llm: LLM) -> float:
    """Four tool calls; how long each takes depends on the task and on what was sampled, so on nothing else."""

    async def look_up() -> str:
        await asyncio.sleep(seconds)
        return "x"

    tool, tokens = llm.tool(look_up), llm.encode(task.text)
    for _ in range(CALLS):
        reply = await llm.generate(tokens)
        chance = random.Random(f"{task.index} {reply.tokens}")
        seconds = MEDIAN_S * math.exp(SIGMA * chance.gauss(0.0, 1.0))
        (answer,) = await llm.run([Call("c00000000", "look_up", {}, "{}")], [tool])
        tokens = tokens + reply.tokens + llm.encode(answer["content"])
    return float(random.Random(f"{reply.tokens}").random() < 0.5)


def configure(folder: Path, name: str, steps: int, groups: int, size: int, mode: dict[str, Any]) -> Config:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"task {k}", "answer": "x"}) + "\n" for k in range(4096)))
    return parse(
        {
            "name": name.replace(" ", "-"),
            "runs": str(folder),
            "model": {"path": "none"},
            "data": {"format": "plain", "train": [{"kind": "jsonl", "path": str(data)}]},
            "max_steps": steps + AHEAD,
            "batch": {"groups": groups, "group_size": size},
            "sampling": {"max_new_tokens": 8},
            "rollout": {
                "max_in_flight": groups * size,
                "engine": {"kind": "fake", "tokens_per_s": 1e6, "median_tokens": 8, "accuracy": 0.0},
            },
            "environment": {"run": {"kind": "episode", "function": "benchmarks.agents:episode"}},
            "reward": {"grader": {"kind": "episode"}},
            "services": {"stop_s": 10.0},
        }
        | mode
    )


async def train(config: Config, steps: int, train_s: float) -> dict[str, Any]:
    """The trainer: draws, sleeps, publishes; wall-clock from the first version to the end of the last step."""
    model, tool_s, lags, wait_s, dropped = torch.nn.Linear(1, 1), 0.0, [0.0], 0.0, 0
    run = RunDir.of(config)
    for service in ("rollout-0", "reward-0"):
        async with asyncio.timeout(STARTED_S):
            while run.address(service) is None:
                await asyncio.sleep(0.05)
    async with (
        remote(config, "buffer", messages.BufferRequest, messages.BufferReply) as buffer,
        remote(config, "weight_sync", weight_sync.WeightSyncRequest, weight_sync.WeightSyncReply) as relay,
    ):
        await relay.ask(weight_sync.Fence(1))
        await buffer.ask(messages.Begin(1, 0))
        publisher = Publisher({"weight_sync": relay}, config.weight_sync, epoch=1)
        began = time.monotonic()
        await publisher.publish(0, model)
        for step in range(steps):
            asked = time.monotonic()
            drawn: Any = None
            while not isinstance(drawn, messages.Drawn):
                drawn = await buffer.ask(messages.Draw(step, 1, POLL_S), wait_s=POLL_S)
            wait_s += time.monotonic() - asked
            members = [member.trajectory for group in drawn.groups for member in group.members]
            tool_s += sum(tool.wall_s for member in members for tool in member.tools)
            lags += [step - version for member in members for version, _ in member.spans]
            dropped = drawn.dropped_stale
            await asyncio.sleep(train_s)
            await buffer.ask(messages.FinishStep(step, 1))
            await publisher.publish(step + 1, model)
        wall_s = time.monotonic() - began
        await buffer.ask(messages.Close("done"))
    ideal_s = max(tool_s / config.rollout.max_in_flight, train_s * steps)
    return {
        "wall_s": round(wall_s, 2),
        "tool_s": round(tool_s, 1),
        "ideal_s": round(ideal_s, 2),
        "of_ideal": round(ideal_s / wall_s, 3),
        "waited_s": round(wait_s, 2),
        "mean_lag": round(sum(lags) / len(lags), 2),
        "dropped_groups": dropped,
    }


def remote(config: Config, service: str, requests: Any, replies: Any) -> Remote:
    run, times = RunDir.of(config), config.services
    return Remote(
        service,
        lambda: run.address(service),
        requests,
        replies,
        sender="trainer",
        connect_s=times.connect_s,
        ask_s=times.ask_s,
        heartbeat_s=times.heartbeat_s,
        run=run_id(run),
    )


def measure(folder: Path, name: str, given: argparse.Namespace) -> dict[str, Any]:
    config = configure(folder, name, given.steps, given.groups, given.group_size, MODES[name])
    run = RunDir.of(config)
    run.create()
    toml = folder / f"{config.name}.toml"
    toml.write_text(to_toml(config))
    processes = []
    for service in SERVICES:
        command = [sys.executable, "-m", "async_rl.cli.main", "serve", service, str(toml)]
        with (run.logs / f"{service}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parent.parent))
    try:
        return uvloop.run(train(config, given.steps, given.train_s))
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=32)
    options.add_argument("--groups", type=int, default=8, help="of a step (B)")
    options.add_argument("--group-size", type=int, default=8)
    options.add_argument("--train-s", type=float, default=1.0)
    options.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    given = options.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="async-rl-agents-") as folder:
        for name in given.modes:
            results[name] = measure(Path(folder), name, given)
            base = results[given.modes[0]]["wall_s"]
            results[name]["speedup"] = round(base / results[name]["wall_s"], 2)
            print(f"{name:12} {results[name]}", flush=True)
    setting = {
        "groups": given.groups,
        "group_size": given.group_size,
        "concurrency": given.groups * given.group_size,
        "steps": given.steps,
        "train_s": given.train_s,
        "tool": {"median_s": MEDIAN_S, "sigma": SIGMA, "calls": CALLS},
    }
    print(json.dumps({"benchmark": "agents", "baseline": given.modes[0], "setting": setting, "modes": results}))


if __name__ == "__main__":
    main()
