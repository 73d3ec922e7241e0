"""The engine that `rollout.engine` names; heavy packages are imported by the branch that needs them."""

import asyncio
import contextlib
from pathlib import Path

from async_rl.config.schema import Config, FakeEngine, SGLangEngine, TransformersEngine, VLLMEngine
from async_rl.errors import ConfigError
from async_rl.models.lora import engine_problem
from async_rl.models.text import ChatText, TokenizerText
from async_rl.services.rollout.engine import Engine
from async_rl.services.rollout.router import Engines


async def build(config: Config) -> tuple[Engine, ChatText]:
    """An engine of weights yet to come (version -1), one or several as one, and the text codec of its model."""
    settings = config.rollout.engine
    count = len(settings.urls) if isinstance(settings, SGLangEngine) else config.rollout.engines
    text = _text(config)
    async with contextlib.AsyncExitStack() as started:
        engines = []
        for number in range(count):
            engine = await _engine(config, number, text)
            started.push_async_callback(engine.close)
            engines.append(engine)
        sampling = config.sampling
        if (sampling.top_p < 1.0 or sampling.top_k) and not engines[0].returns_survivors:
            raise ConfigError(
                f"sampling.top_p = {sampling.top_p}, sampling.top_k = {sampling.top_k}: this engine cannot tell "
                "which tokens they kept, and the trainer needs them"
            )
        if config.trainer.router_replay and not engines[0].returns_routing:
            raise ConfigError(
                f"trainer.router_replay = true: engine '{settings.kind}' does not say which experts its routers chose"
            )
        started.pop_all()
    return engines[0] if count == 1 else Engines(engines), text


def _text(config: Config) -> ChatText:
    if isinstance(config.rollout.engine, FakeEngine):
        from async_rl.services.rollout.fake_engine import FakeText

        return FakeText(config.rollout.engine.vocabulary)
    from async_rl.models.load import end_tokens, load_tokenizer

    tokenizer = load_tokenizer(config.model)
    return TokenizerText(tokenizer, end_tokens(Path(config.model.path), tokenizer))


async def _engine(config: Config, number: int, text: ChatText) -> Engine:
    """Number `number` of the worker's engines."""
    ends = sorted(text.ends)
    match config.rollout.engine:
        case FakeEngine() as settings:
            from async_rl.services.rollout import fake_engine

            return fake_engine.FakeEngine(settings)
        case TransformersEngine() as settings:
            import torch

            from async_rl.models.load import load_policy
            from async_rl.services.rollout import transformers_engine

            torch.set_num_threads(config.rollout.threads)
            model = await asyncio.to_thread(load_policy, config.model, device=settings.device)
            return transformers_engine.TransformersEngine(
                model,
                ends,
                settings,
                adapters=config.model.lora is not None,
                routing=config.trainer.router_replay,
            )
        case VLLMEngine() as settings:
            from async_rl.services.rollout import vllm_engine

            sleeps = config.placement == "shared"
            return await vllm_engine.VLLMEngine.start(config.model, ends, settings, number, sleeps=sleeps)
        case SGLangEngine() as settings:
            from async_rl.models.folder import stored_shapes
            from async_rl.models.routers import layout
            from async_rl.services.rollout import sglang_engine

            problem = engine_problem(config)
            if problem is not None:
                raise ConfigError(problem)
            folder = Path(config.model.path)
            experts = layout(folder) if config.trainer.router_replay else None
            return sglang_engine.SGLangEngine(settings.urls[number], ends, settings, experts, stored_shapes(folder))
