"""What `check` asks of the engine: its environment, its devices, what it cannot do."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from async_rl.config.schema import Config, FakeEngine, TransformersEngine, VLLMEngine
from async_rl.models.folder import expert_problem

PROBE_S = 60.0
NEEDED = {"vllm": ["async_rl", "vllm", "xxhash"], "sglang": ["async_rl", "aiohttp"]}
PROBE = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"


def engine_problems(config: Config) -> Iterator[str]:
    """One line each."""
    yield from _sampling(config)
    yield from _routing(config)
    yield from _interpreter(config)
    engine = config.rollout.engine
    devices = {"trainer.device": config.trainer.device}
    if isinstance(engine, TransformersEngine):
        devices["rollout.engine.device"] = engine.device
    for key, device in devices.items():
        if device != "cpu":
            import torch

            try:
                torch.empty(0, device=device)
            except (RuntimeError, AssertionError) as error:
                yield f"{key} = '{device}': {str(error).splitlines()[0]}"


def _sampling(config: Config) -> Iterator[str]:
    sampling, engine = config.sampling, config.rollout.engine
    if (sampling.top_p < 1 or sampling.top_k) and not isinstance(engine, TransformersEngine):
        yield (
            f"sampling.top_p = {sampling.top_p:g}, top_k = {sampling.top_k}: engine '{engine.kind}' cannot tell which "
            "ids survive truncation, so the trainer could not renormalise; use top_p = 1 and top_k = 0"
        )


def _routing(config: Config) -> Iterator[str]:
    engine = config.rollout.engine
    if not config.trainer.router_replay:
        return
    if isinstance(engine, FakeEngine | VLLMEngine):
        yield (
            f"trainer.router_replay = true: engine '{engine.kind}' does not say which experts its routers chose; "
            "'transformers' and 'sglang' do"
        )
    if config.warmup is not None and config.warmup.architecture == "llama":
        yield "trainer.router_replay = true: a model of warmup.architecture = 'llama' has no experts; 'qwen3_moe' has"
    elif config.warmup is None and (problem := expert_problem(Path(config.model.path))):
        yield f"trainer.router_replay = true: {problem}"


def _interpreter(config: Config) -> Iterator[str]:
    """Whether the environment that the workers run in has what they need; nothing heavy is imported there."""
    engine, asked = config.rollout.engine, config.rollout.python
    python = asked or sys.executable
    if asked and shutil.which(asked) is None:
        yield f"rollout.python = '{asked}': no such interpreter"
        return
    needed = NEEDED.get(engine.kind, ["async_rl"])
    if isinstance(engine, FakeEngine | TransformersEngine) and not asked:
        return
    try:
        probe = subprocess.run(
            [python, "-c", PROBE, *needed], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"rollout.python = '{python}': {error}"
        return
    missing = probe.stdout.split()
    if probe.returncode:
        yield f"rollout.python = '{python}': {(probe.stderr.strip().splitlines() or ['it does not start'])[-1]}"
    elif missing:
        where = f"rollout.python = '{asked}'" if asked else "rollout.python is empty, and this environment"
        yield f"{where} has no {', '.join(missing)}, which engine '{engine.kind}' needs"
