"""Continuous batching by Hugging Face transformers: requests join and leave at every decoding step.

    event loop                          generation thread (transformers' manager)
    generate -> submit ---------------> schedule, forward pass
       |                                  _choose: one token a row, appended to its draft
       +<---- future <- _Router <-------- request finished
    update -> pause ------------------> stands still between two steps
       read -> weights in place
       cancel, submit prompt + draft    (the cache is computed again; not with keep_cache)
    _watch: a thread that died or hangs fails every request

A cancelled request may still be in the next batch or two: tokens of unknown requests are thrown away, so a
draft is cut exactly at the count it had at the pause.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from async_rl.config.schema import Sampling
from async_rl.config.schema import TransformersEngine as Settings
from async_rl.errors import EngineDied, EngineFault
from async_rl.models.attention import NAME as PACKED
from async_rl.models.attention import use_packed_attention
from async_rl.models.moving import give_back, move, tensors_of
from async_rl.services.rollout import paged_cache
from async_rl.services.rollout.engine import Completion, Draft, ReadWeights, Weights, cut_by, room
from async_rl.services.rollout.live_adapters import LiveAdapters
from async_rl.services.rollout.live_weights import LiveWeights
from async_rl.services.rollout.prefixes import Prefills, forget, share_only
from async_rl.services.rollout.routing import Routing
from async_rl.services.rollout.sampler import Row, sample, truncates
from async_rl.trajectory import StopReason

WATCH_S = 0.25
STALL_S = 300.0  # no forward pass takes so long
STOP_S = 5.0
ABANDONED = Row(Sampling(), False, 0.0)  # of a cancelled request that is still in this batch

log = logging.getLogger(__name__)


class _Request:
    def __init__(
        self, prompt: list[int], sampling: Sampling, greedy: bool, limit: int, seed: int, draft: Draft
    ) -> None:
        self.id = ""  # a new one with each submission
        self.prompt, self.sampling, self.greedy, self.limit = prompt, sampling, greedy, limit
        self.uniform = random.Random(seed).random
        self.draft = draft
        self.truncates = truncates(sampling) and not greedy
        self.key = tuple(prompt)
        self.leads = False  # others wait until its prompt is computed
        self.fresh = True  # nothing in its cache is of older weights
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class TransformersEngine:
    """An Engine. `model`: a transformers causal language model; `end_tokens` end a completion. adapters: the weights
    to come are adapters for `model`, which is their base. routing: whether to say which experts its routers chose."""

    returns_survivors = True

    def __init__(
        self, model: Any, end_tokens: list[int], settings: Settings, *, adapters: bool = False, routing: bool = False
    ) -> None:
        self.version = -1
        self._ends = frozenset(end_tokens)
        self._model, self._device = model, model.device
        self._live = (LiveAdapters if adapters else LiveWeights)(model.eval().requires_grad_(False))
        attention = use_packed_attention(model)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        blocks = settings.num_blocks or paged_cache.default_blocks(model, settings, positions)
        self.context = min(positions, blocks * settings.page_size)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(eos_token_id=sorted(end_tokens) or -1, pad_token_id=0),  # type: ignore[no-untyped-call]
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=blocks,
                page_size=settings.page_size,
                max_batch_tokens=settings.max_batch_tokens,
                max_requests_per_batch=min(settings.max_requests, settings.max_batch_tokens),
                allow_block_sharing=True,
                use_async_batching=False,  # rows are sampled on the host, one step after another
                use_cuda_graph=False,
            ),
        )
        self._manager.output_router = _Router(self)
        self._manager.warmup()  # makes the batch processor, which has the two seams below
        processor = self._manager.batch_processor
        processor.model_runner._sample = self._choose
        if attention == PACKED:
            processor.cache.update = partial(paged_cache.leave_in_pages, processor.cache)
        self._cache = processor.cache
        self._cache_bytes = self._cache.cache_tensor.untyped_storage().nbytes()
        share_only(self._cache, self._shares)
        self.returns_routing = routing
        self._routing = Routing(model, self._cache) if routing else None
        self._page_size = settings.page_size
        self._inputs = processor.inputs_and_outputs
        self._requests: dict[str, _Request] = {}  # with the manager, by id
        self._prefills: Prefills[_Request] = Prefills()
        self._ids = map(str, itertools.count())
        self._failure: EngineDied | None = None
        self._standing = False
        self._pauser = ThreadPoolExecutor(1, "pause")  # a pause belongs to the thread that asked for it
        self._turn = asyncio.Lock()  # updates, one at a time
        self._open = asyncio.Event()  # no update is under way
        self._open.set()
        self._loop = asyncio.get_running_loop()
        self._died: asyncio.Future[None] = self._loop.create_future()
        self._manager.start()
        self._watching = self._loop.create_task(self._watch(), name="engine watch")

    async def generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        greedy: bool = False,
        seed: int = 0,
        draft: Draft | None = None,
    ) -> Completion:
        draft = draft or Draft()
        limit = room(prompt, sampling, self.context)
        request = _Request(prompt, sampling, greedy, limit, seed, draft)
        await self._open.wait()
        self._submit(request)
        try:
            await request.done
        finally:
            if request.id in self._requests and (not request.done.done() or request.done.cancelled()):
                self._manager.cancel_request(request.id)
            self._requests.pop(request.id, None)
            self._release(request)
        return draft.completion(self._stop_reason(request))

    async def update(self, read: ReadWeights, *, keep_cache: bool = False) -> None:
        written = False

        async def apply(weights: Weights) -> None:
            nonlocal written
            await self._alive(self._loop.run_in_executor(self._pauser, self._live.load, weights))
            written = True

        async with self._turn:
            self._open.clear()
            try:
                async with self._paused():
                    try:
                        self.version = await read(apply)
                    except BaseException as error:
                        if written:
                            self._die(f"weights were given up while they were read: {error!r}")
                        raise
                    forget(self._cache)
                    if keep_cache:
                        for request in self._requests.values():
                            request.fresh = False
                    else:
                        self._resubmit()
            finally:
                self._open.set()

    async def sleep(self) -> None:
        """The generation thread goes on without work and touches neither weights nor cache."""
        async with self._turn:
            self._open.clear()
            async with self._paused():
                await self._alive(self._loop.run_in_executor(self._pauser, self._put_away))

    async def wake(self) -> None:
        async with self._turn:
            async with self._paused():
                await self._alive(self._loop.run_in_executor(self._pauser, self._bring_back))
            self._open.set()

    async def close(self) -> None:
        self._watching.cancel()
        if self._manager.is_running():
            # Not in the pauser: it may still wait for a generation thread that makes no step.
            stop = partial(self._manager.stop, hard_stop=True, timeout=STOP_S)
            stopper = threading.Thread(target=stop, name="engine stop", daemon=True)
            stopper.start()
            until = self._loop.time() + 2 * STOP_S
            while stopper.is_alive() and self._loop.time() < until:
                await asyncio.sleep(0.02)
        self._pauser.shutdown(wait=False)

    def checksums(self) -> dict[str, int]:
        """xxh3_64 of each live parameter's bytes."""
        return self._live.checksums()

    # --- requests ------------------------------------------------------------------------------------

    def _submit(self, request: _Request) -> None:
        """Hand the prompt and what is drafted so far to the manager, under a new id; or wait for who computes
        that prompt already."""
        if self._failure is not None:
            raise self._failure
        if len(request.prompt) > self._page_size:  # else no page of it is ever shared
            request.leads = self._prefills.enter(request.key, request)
            if not request.leads:
                return
        self._hand_over(request)

    def _hand_over(self, request: _Request) -> None:
        request.id = next(self._ids)
        request.draft.mark(self.version)
        request.draft.routing.clear()  # of a cache that is gone
        self._requests[request.id] = request
        accepted = self._manager.add_request(
            request.prompt + request.draft.tokens,
            request_id=request.id,
            max_new_tokens=request.limit - len(request.draft.tokens),
        )
        if accepted is None:
            self._die("the generation thread takes no more requests")
            raise self._failure or EngineDied("no more requests")

    def _release(self, request: _Request) -> None:
        """`request` has its prompt computed, or is gone: who waited for that goes on."""
        for follower in self._prefills.leave(request.key, request):
            if request.draft.tokens:
                self._hand_over(follower)
            else:
                self._submit(follower)  # nothing was computed: the first of them does it now

    def _shares(self, id_: str) -> bool:
        """Whether the pages of a request may serve others; asked in the generation thread."""
        request = self._requests.get(id_)
        return request is not None and request.fresh

    def _resubmit(self) -> None:
        waiting = self._prefills.clear()
        for request in list(self._requests.values()):
            if not self._complete(request):  # else its end is on the way to the event loop
                self._manager.cancel_request(request.id)
                del self._requests[request.id]
                request.fresh = True
                self._submit(request)
        for request in waiting:
            self._submit(request)

    def _complete(self, request: _Request) -> bool:
        tokens = request.draft.tokens
        return len(tokens) >= request.limit or (bool(tokens) and tokens[-1] in self._ends)

    def _stop_reason(self, request: _Request) -> StopReason:
        tokens = request.draft.tokens
        if tokens[-1] in self._ends:
            return "eos"
        return cut_by(len(tokens), request.sampling)

    def settle(self, outputs: list[Any]) -> None:
        """What the manager says of requests that ended; on the event loop."""
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None or request.done.done():
                continue
            if output.error is None:
                request.done.set_result(None)
            elif self._manager.background_thread_status.can_accept_new_requests() is None:
                request.done.set_exception(EngineFault(output.error))
            else:
                self._die(output.error)

    # --- in the generation thread --------------------------------------------------------------------

    def _choose(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Sample a token for each request in the batch that is past its prompt; transformers' own step.

        scores [1, rows, V] float32, rows of such requests first; tokens go to output_ids [.., rows].
        """
        if self._routing is not None:
            self._routing.take(self._inputs.requests_in_batch, self._requests)
        states = [entry.state for entry in self._inputs.requests_in_batch if entry.has_new_token]
        if not states:
            return
        requests = [self._requests.get(state.request_id) for state in states]
        rows = [ABANDONED if r is None else Row(r.sampling, r.greedy, r.uniform()) for r in requests]
        tokens, logprobs, survivors = sample(scores[0, : len(rows)], rows)
        output_ids[0, : len(tokens)] = torch.tensor(tokens, dtype=output_ids.dtype)
        for request, token, logprob, kept in zip(requests, tokens, logprobs, survivors, strict=True):
            if request is not None:
                request.draft.logprobs.append(logprob)
                if kept is not None:
                    request.draft.survivors.append(kept)
                request.draft.tokens.append(token)  # last: what looks at the draft counts tokens
                if request.leads:
                    request.leads = False
                    self._loop.call_soon_threadsafe(self._release, request)

    # --- asleep --------------------------------------------------------------------------------------

    def _put_away(self) -> None:
        forget(self._cache)
        move(tensors_of(self._model), "cpu")
        self._cache.cache_tensor.untyped_storage().resize_(0)  # its many views stay what they are
        give_back(self._device)

    def _bring_back(self) -> None:
        move(tensors_of(self._model), self._device)
        with torch.inference_mode():
            self._cache.cache_tensor.untyped_storage().resize_(self._cache_bytes)
            self._cache.cache_tensor.zero_()  # what is masked is multiplied by zero, and must be a number

    # --- pause and death -----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        stack = contextlib.ExitStack()
        entering = self._loop.run_in_executor(self._pauser, lambda: stack.enter_context(self._manager.pause()))
        try:
            await self._alive(asyncio.shield(entering))
            self._standing = True
            yield
        finally:
            self._standing = False
            # Behind `entering` in the same thread: a pause that is entered late is left all the same.
            self._pauser.submit(stack.close)

    async def _alive(self, awaited: "asyncio.Future[Any]") -> None:
        """Wait for `awaited`, or for the engine's death."""
        await asyncio.wait({awaited, self._died}, return_when=asyncio.FIRST_COMPLETED)
        if self._failure is not None:
            raise self._failure
        await awaited

    async def _watch(self) -> None:
        """Nothing waits for a thread that is dead, or that makes no step."""
        step, since = -1, self._loop.time()
        while self._failure is None:
            await asyncio.sleep(WATCH_S)
            status = self._manager.background_thread_status
            if status.fatal_error is not None or not self._manager.is_running():
                self._die(f"the generation thread ended: {status.fatal_error!r}")
            now, at = self._loop.time(), getattr(self._manager, "current_batch", -1)
            if at != step or not self._requests or self._standing:
                step, since = at, now
            elif now - since > STALL_S:
                self._die(f"no step in {STALL_S:g} s with {len(self._requests)} requests in flight")

    def _die(self, reason: str) -> None:
        if self._failure is None:
            self._failure = EngineDied(f"transformers engine: {reason}")
            log.error("%s", self._failure)
            self._died.set_result(None)
        for request in [*self._requests.values(), *self._prefills.waiting]:
            if not request.done.done():
                request.done.set_exception(self._failure)


class _Router(OutputRouter):
    """Carries the manager's results to the event loop; nothing is queued for requests that are gone."""

    def __init__(self, engine: TransformersEngine) -> None:
        super().__init__()
        self._settle = engine.settle
        self._loop = asyncio.get_running_loop()

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        self._loop.call_soon_threadsafe(self._settle, outputs)
