"""The engine that `rollout.engine` names; heavy packages are imported by the branch that needs them."""

import asyncio
from pathlib import Path

from async_rl.config.schema import Config, FakeEngine, TransformersEngine, VLLMEngine
from async_rl.errors import ConfigError
from async_rl.models.text import ChatText, TokenizerText
from async_rl.services.rollout.engine import Engine


async def build(config: Config) -> tuple[Engine, ChatText]:
    """An engine of weights yet to come (version -1) and the text codec of its model."""
    engine: Engine
    text: ChatText
    match config.rollout.engine:
        case FakeEngine() as settings:
            from async_rl.services.rollout import fake_engine

            engine, text = fake_engine.FakeEngine(settings), fake_engine.FakeText(settings.vocabulary)
        case TransformersEngine() as settings:
            engine, text = await _transformers(config, settings)
        case VLLMEngine() as settings:
            engine, text = await _vllm(config, settings)
    sampling = config.sampling
    if (sampling.top_p < 1.0 or sampling.top_k) and not engine.returns_survivors:
        await engine.close()
        raise ConfigError(
            f"sampling.top_p = {sampling.top_p}, sampling.top_k = {sampling.top_k}: this engine cannot tell "
            "which tokens they kept, and the trainer needs them"
        )
    return engine, text


async def _transformers(config: Config, settings: TransformersEngine) -> tuple[Engine, ChatText]:
    import torch

    from async_rl.models.load import end_tokens, load_policy, load_tokenizer
    from async_rl.services.rollout import transformers_engine

    torch.set_num_threads(config.rollout.threads)
    tokenizer = load_tokenizer(config.model)
    model = await asyncio.to_thread(load_policy, config.model, device=settings.device)
    ends = end_tokens(Path(config.model.path), tokenizer)
    return transformers_engine.TransformersEngine(model, ends, settings), TokenizerText(tokenizer, ends)


async def _vllm(config: Config, settings: VLLMEngine) -> tuple[Engine, ChatText]:
    from async_rl.models.load import end_tokens, load_tokenizer
    from async_rl.services.rollout.vllm_engine import VLLMEngine as Engine_

    path = Path(config.model.path)
    if path.suffix == ".gguf":
        raise ConfigError(f"model.path = '{path}': vllm takes a folder; `async-rl` makes one of model.from_package")
    tokenizer = load_tokenizer(config.model)
    ends = end_tokens(path, tokenizer)
    return await Engine_.start(config.model, ends, settings), TokenizerText(tokenizer, ends)
