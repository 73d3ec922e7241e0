"""vLLM's AsyncLLM in this process, its workers in others; the same code on a CPU and on GPUs.

Token ids in; ids and log-probabilities out, streamed into the draft. An update freezes the requests in flight
(`pause_generation(mode="keep")`), has the workers read the new weights from shared memory, and goes on. The caches are
dropped at the pause and computed again, or kept (`staleness.keep_cache`). Prefixes are salted by version, so that no
request ever reads a prefix of older weights.

With `model.lora` the base stays as it is, and an update puts a new adapter in the place of the old one, under the same
name: requests in flight go on under the new one, and none can be without.

Versions are vLLM's own spans, exact to the token, except with a kept cache: there a request keeps the version that it
began with.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config.schema import Model, Sampling
from async_rl.config.schema import VLLMEngine as Settings
from async_rl.errors import EngineDied, EngineFault, PublicationError, UserError
from async_rl.models.folder import stored_shapes
from async_rl.models.lora import is_adapter
from async_rl.protocol.weight_sync import TensorEntry
from async_rl.services.rollout.adapters import layers, write
from async_rl.services.rollout.engine import Completion, Draft, ReadWeights, Weights, cut_by, room
from async_rl.services.rollout.experts import entries_as_stored
from async_rl.trajectory import StopReason

EXTENSION = "async_rl.services.rollout.vllm_worker.SlotReader"
CPU_CACHE_BYTES = 2**30
CPU_BLOCK = 32  # tokens that are cached together; of vLLM's 128 there, a short prompt of a group fills none
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
STALL_S = 300.0  # no forward pass, and no reading of the weights, takes so long
STARTUP = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads are OMP_NUM_THREADS, wherever they run
    "KMP_BLOCKTIME": "1",  # idle threads leave the core to the other services
}

log = logging.getLogger(__name__)


class VLLMEngine:
    """An Engine. `end_tokens` end a completion."""

    returns_survivors = False
    returns_routing = False

    @classmethod
    async def start(
        cls, model: Model, end_tokens: list[int], settings: Settings, number: int = 0, *, sleeps: bool = False
    ) -> "VLLMEngine":
        """Number `number` of a worker's engines; `sleeps`: it shares its device. In a thread: it takes ten seconds and
        more, and the service answers meanwhile."""
        if model.path.endswith(".gguf"):
            raise UserError(f"model.path = '{model.path}': vllm takes a folder, as model.from_package makes one")
        if is_adapter(Path(model.path)):
            raise UserError(f"model.path = '{model.path}' is an adapter; `async-rl export` makes a model for vllm")
        with _gpus_of(number, settings.tensor_parallel):
            return await asyncio.to_thread(cls, model, end_tokens, settings, sleeps)

    def __init__(self, model: Model, end_tokens: list[int], settings: Settings, sleeps: bool = False) -> None:
        for name, value in STARTUP.items():
            os.environ.setdefault(name, value)
        _preload_openmp()
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise UserError(
                f"rollout.engine.kind = 'vllm': {error}; set rollout.python to the interpreter of an environment that "
                "has vllm and async-rl"
            ) from None
        self.version = -1
        self._expected = stored_shapes(Path(model.path))
        self._ends = end_tokens
        self._adapter = None if model.lora is None else adapter_request("unread")
        arguments = AsyncEngineArgs(
            model=model.path,
            dtype=model.dtype,
            max_model_len=settings.context,
            max_num_seqs=settings.max_requests,
            max_num_batched_tokens=settings.max_batch_tokens,
            # A prompt in parts draws random numbers for nothing and gives them back, which a CPU's generator cannot.
            enable_chunked_prefill=False if on_cpu() else None,
            block_size=CPU_BLOCK if on_cpu() else None,
            tensor_parallel_size=settings.tensor_parallel,
            enforce_eager=not settings.compile,
            enable_sleep_mode=sleeps and not on_cpu(),  # refused there, where sleep does nothing
            kv_cache_memory_bytes=settings.kv_cache_bytes or (CPU_CACHE_BYTES if on_cpu() else None),
            gpu_memory_utilization=settings.gpu_memory,
            logprobs_mode="processed_logprobs",  # of log_softmax(z / T), as sampled
            generation_config="vllm",  # nothing but what a request says
            skip_tokenizer_init=True,
            worker_extension_cls=EXTENSION,
            disable_log_stats=True,
            enable_lora=model.lora is not None,
            max_lora_rank=lora_rank(model.lora.rank if model.lora is not None else 1),
        )
        if on_cpu():
            check_head_size(arguments.create_model_config().get_head_size())
        self._engine: Any = AsyncLLM.from_engine_args(arguments)
        self.context: int = self._engine.model_config.max_model_len
        self._ids = itertools.count()
        self._drafts: set[Draft] = set()
        self.prefilled = 0  # prompt tokens that were computed, not found in the cache
        self._keep_cache = False
        self._heard = 0.0  # when the last token came
        self._updated = False  # before, vLLM has a label of its own for the version
        self._turn = asyncio.Lock()  # updates, one at a time

    async def generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        greedy: bool = False,
        seed: int = 0,
        draft: Draft | None = None,
    ) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        draft = draft or Draft()
        limit = room(prompt, sampling, self.context)
        parameters = SamplingParams(
            temperature=0.0 if greedy else sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            max_tokens=limit,
            seed=seed % 2**63,
            stop_token_ids=self._ends,
            ignore_eos=True,  # the ends are those above, for every engine the same
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        draft.mark(self.version)
        self._drafts.add(draft)
        self._heard = time.monotonic()
        consuming = asyncio.ensure_future(self._consume(prompt, parameters, draft))
        try:
            while not (await asyncio.wait({consuming}, timeout=STALL_S / 10))[0]:
                if time.monotonic() - self._heard > STALL_S and not self._turn.locked():
                    raise EngineDied(f"vllm: no token in {STALL_S:g} s with {len(self._drafts)} requests in flight")
            reason = consuming.result()
        except (EngineDied, asyncio.CancelledError):
            raise
        except EngineDeadError as error:
            raise EngineDied(f"vllm: {error}") from None
        except Exception as error:
            raise EngineFault(f"vllm: {type(error).__name__}: {error}") from None
        finally:
            consuming.cancel()
            self._drafts.discard(draft)
        return draft.completion(self._stop_reason(reason, len(draft.tokens), sampling))

    async def _consume(self, prompt: list[int], parameters: Any, draft: Draft) -> str:
        """Into `draft`, what is sampled; why it ended. Cancelled, the request is aborted."""
        inputs = {"prompt_token_ids": prompt, "cache_salt": str(self.version)}
        reason = ""
        id_ = str(next(self._ids))
        async for output in self._engine.generate(inputs, parameters, id_, lora_request=self._adapter):
            self._heard = time.monotonic()
            made = output.outputs[0]
            if not draft.tokens:
                self.prefilled += len(prompt) - (output.num_cached_tokens or 0)
            draft.logprobs.extend(
                table[token].logprob for token, table in zip(made.token_ids, made.logprobs or (), strict=True)
            )
            draft.tokens.extend(made.token_ids)
            if made.finish_reason is not None:
                reason = made.finish_reason
                self._settle(draft, made.weight_versions)
        return reason

    async def update(self, read: ReadWeights, *, keep_cache: bool = False) -> None:
        async with self._turn:
            self._keep_cache = keep_cache
            await self._alive(self._engine.pause_generation(mode="keep", clear_cache=not keep_cache))
            try:
                version = await read(self._apply)
                await self._alive(self._engine.update_weight_version(str(version)))
                self.version, self._updated = version, True
                if not keep_cache:
                    for draft in self._drafts:
                        draft.mark(version)
            finally:
                await self._alive(self._engine.resume_generation())

    async def sleep(self) -> None:
        """Level 1, which keeps the weights in the host's memory: an evaluation or a member that failed may still need
        this version, and the relay may have the next one alone."""
        async with self._turn:
            await self._alive(self._engine.sleep(level=1))

    async def wake(self) -> None:
        async with self._turn:
            await self._alive(self._engine.wake_up())

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    @property
    def unfinished(self) -> int:
        """Requests that vLLM holds."""
        return int(self._engine.get_num_unfinished_requests())

    async def _apply(self, weights: Weights) -> None:
        if self._adapter is not None:
            await self._apply_adapter(weights)
            return
        entries = entries_as_stored(weights.manifest.tensors, self._expected)
        misfit = unfit(entries, self._expected)
        if misfit is not None:
            raise PublicationError(f"version {weights.version} of the weights: {misfit}")
        tensors = msgspec.to_builtins(entries)
        await self._alive(self._engine.collective_rpc("load_slot", args=(weights.path, tensors)))

    async def _apply_adapter(self, weights: Weights) -> None:
        """By a folder beside the slot, gone when the workers have read it."""
        layers(weights.manifest, self._expected)
        folder = Path(tempfile.mkdtemp(prefix="async-rl-vllm-", dir=Path(weights.path).parent))
        try:
            await asyncio.to_thread(write, weights, folder)
            await self._alive(self._engine.add_lora(adapter_request(str(folder), load_inplace=True)))
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)

    async def _alive(self, call: Any) -> None:
        """A call that only a dead engine fails: what it left half done cannot be mended."""
        try:
            async with asyncio.timeout(STALL_S):
                await call
        except TimeoutError:
            raise EngineDied(f"vllm: no answer within {STALL_S:g} s") from None
        except Exception as error:
            raise EngineDied(f"vllm: {type(error).__name__}: {error}") from None

    def _settle(self, draft: Draft, spans: Any) -> None:
        """The versions of a finished draft, as vLLM has counted them."""
        if self._keep_cache or not spans or not self._updated:
            return
        draft.marks[:] = [(int(span.version), span.start) for span in spans]

    def _stop_reason(self, reason: str, tokens: int, sampling: Sampling) -> StopReason:
        if reason == "stop":
            return "eos"
        if reason != "length":
            raise EngineFault(f"vllm ended the request: {reason or 'without a reason'}")
        return cut_by(tokens, sampling)


def adapter_request(path: str, *, load_inplace: bool = False) -> Any:
    """The policy's adapter: one for all versions, so that none is ever unloaded that a request in flight names."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, path, load_inplace=load_inplace)


def lora_rank(rank: int) -> int:
    """What vLLM sets aside for adapters of `rank`; UserError where it takes none so wide."""
    for size in LORA_RANKS:
        if rank <= size:
            return size
    raise UserError(f"model.lora.rank = {rank}: vllm takes {LORA_RANKS[-1]} at most")


def unfit(tensors: Iterable[TensorEntry], expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why these weights are not those of the model whose stored tensors are `expected`; None where they are.

    vLLM loads what it is given and keeps the rest, so what is missing must be found before.
    """
    seen: set[str] = set()
    for entry in tensors:
        names = {entry.name, *entry.aliases} & expected.keys()
        if not names:
            return f"the model has no {entry.name}"
        for name in names:
            if expected[name] != tuple(entry.shape):
                return f"{name} is {entry.shape}, the model's {list(expected[name])}"
        seen |= names
    missing = sorted(expected.keys() - seen)
    return f"{missing[0]} is not among them ({len(missing)} names missing)" if missing else None


def check_head_size(size: int) -> None:
    """vLLM finds out at the first request, and dies of it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise UserError(
            f"model: its attention heads are {size} wide; vllm on a CPU takes {', '.join(map(str, sizes))}; "
            "for a model of `async-rl warmup`, that is warmup.hidden_size / warmup.heads"
        )


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@contextlib.contextmanager
def _gpus_of(number: int, count: int) -> Iterator[None]:
    """Processes started meanwhile see `count` GPUs of their own: of those that CUDA_VISIBLE_DEVICES names, or of all.
    The first engine leaves it as it is."""
    key = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(key)
    if number:
        visible = before.split(",") if before else [str(k) for k in range((number + 1) * count)]
        os.environ[key] = ",".join(visible[number * count : (number + 1) * count])
    try:
        yield
    finally:
        if number:
            os.environ.pop(key)
            if before is not None:
                os.environ[key] = before


def _preload_openmp() -> None:
    """The workers of vLLM's CPU build are two to ten times slower without Intel's OpenMP, which comes with it."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    loaded = os.environ.get("LD_PRELOAD", "")
    if library.exists() and str(library) not in loaded:
        os.environ["LD_PRELOAD"] = f"{library}:{loaded}".rstrip(":")
