"""An SGLang server over HTTP: token ids in; ids and log-probabilities out, streamed into the draft.

An update retracts the requests in flight (`/pause_generation` mode retract), flushes the cache, has the server read the
new weights from shared memory (`/update_weights_from_disk`), and goes on: what was sampled stays, and the cache is
computed again. With a kept cache it pauses in place. Log-probabilities are of log_softmax(z / T), which is SGLang's
default (SGLANG_RETURN_ORIGINAL_LOGPROB must not be set on the server). Which experts its routers chose it says where
the server was started with --enable-return-routed-experts.

Written against SGLang 0.5.23.
"""

import asyncio
import base64
import contextlib
import json
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from async_rl.config.schema import Sampling
from async_rl.config.schema import SGLangEngine as Settings
from async_rl.errors import DeadlineExceeded, EngineDied, EngineFault, PublicationError, UserError
from async_rl.models.routers import Layout
from async_rl.services.rollout.engine import Completion, Draft, ReadWeights, Weights, cut_by, room
from async_rl.services.rollout.experts import tensors_as_stored
from async_rl.trajectory import UNROUTED, StopReason, routing_dtype

LINE_BYTES = 2**26
BACKUP = ("enable_memory_saver", "enable_weights_cpu_backup")
FLUSH_S = (0.05, 1.0)  # first and longest wait between two tries
log = logging.getLogger(__name__)


class SGLangEngine:
    """An Engine. `url`: of a server that serves the policy's model; `end_tokens` end a completion. layout: of its
    experts, where it is to say which ones its routers chose. stored: the names of the tensors in the model's files."""

    returns_survivors = False

    def __init__(
        self,
        url: str,
        end_tokens: list[int],
        settings: Settings,
        layout: Layout | None = None,
        stored: Collection[str] = (),
    ) -> None:
        self.version, self._url = -1, url
        self._stored = stored
        self.returns_routing, self._layout = layout is not None, layout
        self.context = settings.context
        self._ends, self._wait_s = end_tokens, settings.request_s
        self._drafts: set[Draft] = set()
        self._keep_cache = False
        self._turn = asyncio.Lock()  # updates, one at a time
        self._session = aiohttp.ClientSession(
            url.rstrip("/"),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=LINE_BYTES,
            timeout=aiohttp.ClientTimeout(sock_read=self._wait_s, sock_connect=self._wait_s),
        )

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
        rid = secrets.token_hex(16)
        body = {
            "rid": rid,
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0.0 if greedy else sampling.temperature,
                "top_p": 1.0 if greedy else sampling.top_p,
                "top_k": -1 if greedy or not sampling.top_k else sampling.top_k,
                "max_new_tokens": limit,
                "stop_token_ids": self._ends,
                "ignore_eos": True,  # the ends are those above, for every engine the same
                "sampling_seed": seed % 2**31,  # heeded by --enable-deterministic-inference
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
        }
        if self._layout is not None:
            body["return_routed_experts"] = True
        draft.mark(self.version)
        self._drafts.add(draft)
        finish: dict[str, Any] | None = None
        try:
            async for meta in self._stream(body):
                fresh = meta["output_token_logprobs"]
                if len(fresh) == meta["completion_tokens"]:  # the whole so far; else only what is new
                    fresh = fresh[len(draft.tokens) :]
                draft.logprobs.extend(entry[0] for entry in fresh)
                draft.tokens.extend(entry[1] for entry in fresh)
                finish = meta["finish_reason"]
                if finish is not None:
                    self._settle(draft, meta.get("weight_versions"))
                    if self._layout is not None and finish["type"] in ("stop", "length"):
                        tokens = len(prompt) + len(draft.tokens) - 1
                        draft.routing[:] = routing_of(meta.get("routed_experts"), tokens, self._layout)
        except asyncio.CancelledError:
            await asyncio.shield(self._abort(rid))
            raise
        finally:
            self._drafts.discard(draft)
        return draft.completion(self._stop_reason(finish, len(draft.tokens), sampling))

    async def update(self, read: ReadWeights, *, keep_cache: bool = False) -> None:
        async with self._turn:
            self._keep_cache = keep_cache
            await self._post("/pause_generation", {"mode": "in_place" if keep_cache else "retract"})
            try:
                if not keep_cache:
                    await self._flush()
                self.version = await read(self._apply)
                if not keep_cache:
                    for draft in self._drafts:
                        draft.mark(self.version)
            finally:
                await self._post("/continue_generation", {})

    async def sleep(self) -> None:
        async with self._turn:
            await self._require_backup()
            await self._flush()  # waits for what was aborted; the server does not survive a release while it runs
            await self._post("/release_memory_occupation", {})

    async def wake(self) -> None:
        async with self._turn:
            await self._post("/resume_memory_occupation", {})

    async def close(self) -> None:
        await self._session.close()

    async def _require_backup(self) -> None:
        """UserError where the server would wake up with weights that are lost."""
        async with self._request("/server_info", None, "GET") as answer:
            info = await answer.json()
        missing = [flag for flag in BACKUP if not info.get(flag)]
        if missing:
            flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in missing)
            raise UserError(f"placement = 'shared': start the SGLang server at {self._url} with {flags}")

    async def _apply(self, weights: Weights) -> None:
        """By a folder beside the slot, in shared memory, gone when the server has read it."""
        from safetensors.torch import save_file

        named = dict(tensors_as_stored(weights.tensors(), self._stored))
        folder = Path(tempfile.mkdtemp(prefix="async-rl-sglang-", dir=Path(weights.path).parent))
        try:
            await asyncio.to_thread(save_file, named, folder / "model.safetensors", {"format": "pt"})
            body = {
                "model_path": str(folder),
                "flush_cache": not self._keep_cache,
                "weight_version": str(weights.version),
            }
            reply = await self._post("/update_weights_from_disk", body, refusals=True)
            if not reply.get("success"):
                raise PublicationError(f"version {weights.version} of the weights: {reply.get('message') or reply}")
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)

    async def _flush(self) -> None:
        """Refused while a request still runs: tried again, at growing intervals."""
        end, wait_s = time.monotonic() + self._wait_s, FLUSH_S[0]
        while True:
            async with self._request("/flush_cache", None) as answer:
                if answer.status == 200:
                    return
                why = (await answer.text()).strip()
            if time.monotonic() > end:
                raise DeadlineExceeded(f"sglang's flush of the cache ({why})", self._wait_s, "rollout.engine.request_s")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, FLUSH_S[1])

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The meta_info of each event."""
        async with self._request("/generate", body) as answer:
            if answer.status != 200:
                raise EngineFault(f"sglang: /generate: status {answer.status}: {(await answer.text())[:500]}")
            async for line in answer.content:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise EngineFault(f"sglang: {event['error']}")
                yield event["meta_info"]

    async def _post(self, path: str, body: dict[str, Any], *, refusals: bool = False) -> dict[str, Any]:
        """The answer, which without `refusals` is one of status 200."""
        async with self._request(path, body) as answer:
            text = await answer.text()
            if answer.status != 200 and not refusals:
                raise EngineDied(f"sglang: {path}: status {answer.status}: {text[:500]}")
        try:
            reply = json.loads(text)
        except ValueError:
            reply = {"message": text[:500]}
        return reply if isinstance(reply, dict) else {"message": text[:500]}

    @contextlib.asynccontextmanager
    async def _request(
        self, path: str, body: dict[str, Any] | None, method: str = "POST"
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.request(method, path, json=body) as answer:
                yield answer
        except TimeoutError:
            raise EngineDied(
                f"sglang: {path}: no answer within {self._wait_s:g} s (rollout.engine.request_s = {self._wait_s:g})"
            ) from None
        except aiohttp.ClientConnectorError as error:
            raise EngineDied(f"sglang: {error}") from None
        except aiohttp.ClientError as error:
            raise EngineFault(f"sglang: {path}: {error or type(error).__name__}") from None

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(EngineDied):
            await self._post("/abort_request", {"rid": rid}, refusals=True)

    def _settle(self, draft: Draft, spans: list[dict[str, Any]] | None) -> None:
        """The versions of a finished draft, as SGLang has counted them."""
        if spans and not self._keep_cache:
            draft.marks[:] = [(int(span["version"]), span["start"]) for span in spans]

    def _stop_reason(self, finish: dict[str, Any] | None, tokens: int, sampling: Sampling) -> StopReason:
        kind = finish["type"] if finish is not None else "the stream ended"
        if kind == "stop" and tokens:
            return "eos"
        if kind != "length":
            raise EngineFault(f"sglang ended the request: {(finish or {}).get('message') or kind}")
        return cut_by(tokens, sampling)


def routing_of(encoded: str | None, tokens: int, layout: Layout) -> np.ndarray:
    """[tokens, layers with experts, k] from SGLang's [tokens, layers, k] int32 in base64. What is no expert's id is not
    known."""
    if encoded is None:
        raise EngineDied(
            "sglang: its answer has no routed_experts; start the server with --enable-return-routed-experts"
        )
    flat = np.frombuffer(base64.b64decode(encoded), dtype="<i4")
    if flat.size != tokens * layout.layers * layout.per_token:
        raise EngineFault(
            f"sglang: {flat.size} routed experts of {tokens} tokens in {layout.layers} layers, {layout.per_token} each"
        )
    rows = flat.reshape(tokens, layout.layers, layout.per_token)[:, layout.routed]
    known = ((rows >= 0) & (rows < layout.experts)).all(axis=-1, keepdims=True)
    return np.where(known, rows, UNROUTED).astype(routing_dtype(layout.experts))
