"""The SGLang engine against a stand-in with the routes and field names of the real server."""

import asyncio
import base64
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.config.schema import Sampling
from async_rl.config.schema import SGLangEngine as Settings
from async_rl.errors import DeadlineExceeded, EngineDied, EngineFault, PublicationError, UserError
from async_rl.models.routers import Layout
from async_rl.services.rollout.engine import Draft
from async_rl.services.rollout.sglang_engine import SGLangEngine, routing_of
from tests.flow.sglang_stand_in import StandIn

END = 9


class Given:
    aliases = {}

    def __init__(self, version, tensors):
        self.version, self.path, self._tensors = version, "/dev/shm/slot", tensors

    def tensors(self):
        return iter(self._tensors.items())


def reader(version, **tensors):
    async def read(apply):
        await apply(Given(version, tensors or {"w": torch.ones(2, 3)}))
        return version

    return read


def with_engine(body, *, context=2000, request_s=20.0, layout=None, stored=(), **server):
    async def main():
        async with asyncio.timeout(30), StandIn(**server).serve() as stand_in:
            settings = Settings(urls=[stand_in.address], context=context, request_s=request_s)
            engine = SGLangEngine(stand_in.address, [END], settings, layout, stored)
            try:
                await engine.update(reader(0))
                return await body(engine, stand_in)
            finally:
                await engine.close()

    return asyncio.run(main())


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_and_log_probabilities_arrive(incremental):
    async def body(engine, server):
        made = await asyncio.gather(
            engine.generate([100], Sampling(max_new_tokens=3, temperature=0.7), seed=2**40 + 5),
            engine.generate([5], Sampling(max_new_tokens=30), greedy=True),
        )
        return made, [sent for path, sent in server.bodies if path == "/generate"]

    (cut, ended), sent = with_engine(body, incremental=incremental, end=END)
    assert (cut.tokens, cut.stop, cut.versions) == ([101, 102, 103], "length", [(0, 3)])
    assert cut.logprobs == pytest.approx([-10.1, -10.2, -10.3])
    assert (ended.tokens, ended.stop) == ([6, 7, 8, 9], "eos")
    warm, greedy = (one["sampling_params"] for one in sent)
    assert (warm["temperature"], warm["top_k"], warm["stop_token_ids"]) == (0.7, -1, [END])
    assert greedy["temperature"] == 0.0 and warm["sampling_seed"] == (2**40 + 5) % 2**31


def test_a_context_that_is_full():
    async def body(engine, server):
        with pytest.raises(EngineFault, match="no room"):
            await engine.generate([1] * 50, Sampling())
        return await engine.generate([1] * 45, Sampling(max_new_tokens=30))

    made = with_engine(body, context=50)
    assert (len(made.tokens), made.stop) == (5, "context")


@pytest.mark.parametrize("incremental", [False, True])
def test_an_update_in_flight_leaves_what_was_sampled_and_spans_of_versions(incremental):
    """Field reports 33, 34: a flush that is refused is tried again, and nothing is aborted."""

    async def body(engine, server):
        drafts = [Draft() for _ in range(16)]
        sampling = Sampling(max_new_tokens=60)
        tasks = [asyncio.create_task(engine.generate([100], sampling, draft=draft)) for draft in drafts]
        while min(len(draft.tokens) for draft in drafts) < 5:
            await asyncio.sleep(0.005)
        server.flushes_refused = 3
        await engine.update(reader(1))
        oldest = [draft.oldest_version for draft in drafts]
        return await asyncio.gather(*tasks), oldest, server

    done, oldest, server = with_engine(body, incremental=incremental)
    assert oldest == [0] * 16
    for made in done:
        assert made.tokens == [101 + k for k in range(60)]
        assert [version for version, _ in made.versions] == [0, 1]
    assert "/abort_request" not in server.calls
    assert [path for path in server.calls if path != "/generate"] == [
        *("/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"),
        *("/pause_generation", *["/flush_cache"] * 4, "/update_weights_from_disk", "/continue_generation"),
    ]
    assert server.loaded == [{"w": (2, 3)}] * 2
    assert not any(Path(sent["model_path"]).exists() for path, sent in server.bodies if "disk" in path)


def test_stacks_of_experts_arrive_as_the_matrices_that_the_model_is_stored_as():
    stored = [f"experts.{k}.{kind}_proj.weight" for k in (0, 1) for kind in ("gate", "up", "down")]

    async def body(engine, server):
        stacks = {"experts.gate_up_proj": torch.ones(2, 8, 3), "experts.down_proj": torch.ones(2, 3, 4)}
        await engine.update(reader(1, **stacks))
        return server.loaded[-1]

    assert with_engine(body, stored=stored) == {name: (3, 4) if "down" in name else (4, 3) for name in stored}


def test_a_kept_cache_keeps_the_oldest_version():
    async def body(engine, server):
        draft = Draft()
        task = asyncio.create_task(engine.generate([100], Sampling(max_new_tokens=40), draft=draft))
        while len(draft.tokens) < 5:
            await asyncio.sleep(0.005)
        await engine.update(reader(1), keep_cache=True)
        return await task, await engine.generate([5], Sampling(max_new_tokens=2)), server.bodies

    kept, fresh, bodies = with_engine(body)
    assert kept.versions == [(0, 40)] and fresh.versions == [(1, 2)]
    modes = [sent["mode"] for path, sent in bodies if path == "/pause_generation"]
    flushed = [sent["flush_cache"] for path, sent in bodies if path == "/update_weights_from_disk"]
    assert modes == ["retract", "in_place"] and flushed == [True, False]


def test_weights_that_are_refused_leave_the_old_ones():
    """Field report 35."""

    async def body(engine, server):
        server.refuse_weights = "shape mismatch"
        with pytest.raises(PublicationError, match="shape mismatch"):
            await engine.update(reader(1))
        return engine.version, await engine.generate([5], Sampling(max_new_tokens=2))

    version, made = with_engine(body)
    assert version == 0 and made.versions == [(0, 2)]


def test_what_is_cancelled_is_aborted_on_the_server():
    async def body(engine, server):
        draft = Draft()
        task = asyncio.create_task(engine.generate([100], Sampling(max_new_tokens=1500), draft=draft))
        while not draft.tokens:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return server.calls, len(draft.tokens) == len(draft.logprobs)

    calls, whole = with_engine(body)
    assert calls[-1] == "/abort_request" and whole


def test_an_abort_that_is_not_ours_is_a_fault_of_this_request():
    async def body(engine, server):
        draft = Draft()
        task = asyncio.create_task(engine.generate([100], Sampling(max_new_tokens=1500), draft=draft))
        while not draft.tokens:
            await asyncio.sleep(0.005)
        next(iter(server.running.values())).aborted = True
        with pytest.raises(EngineFault, match="ended the request"):
            await task

    with_engine(body)


def test_a_server_that_is_gone_and_a_flush_that_is_never_granted():
    async def gone():
        engine = SGLangEngine("http://127.0.0.1:9", [END], Settings(urls=["http://127.0.0.1:9"]))
        try:
            with pytest.raises(EngineDied, match="127"):
                await engine.generate([5], Sampling())
        finally:
            await engine.close()

    asyncio.run(gone())

    async def body(engine, server):
        server.flushes_refused = 10**6
        with pytest.raises(DeadlineExceeded, match=r"rollout\.engine\.request_s"):
            await engine.update(reader(1))
        return server.paused

    assert with_engine(body, request_s=0.3) == ""


def test_it_sleeps_once_nothing_runs_and_wakes():
    async def body(engine, server):
        server.flushes_refused = 2
        await engine.sleep()
        assert server.released
        await engine.wake()
        assert not server.released
        return (await engine.generate([100], Sampling(max_new_tokens=2))).tokens, server.calls

    tokens, calls = with_engine(body)
    assert tokens == [101, 102]
    assert calls[-5:] == [*["/flush_cache"] * 2, "/release_memory_occupation", "/resume_memory_occupation", "/generate"]


def test_a_server_that_would_lose_its_weights_asleep_is_refused():
    async def body(engine, server):
        server.arguments["enable_weights_cpu_backup"] = False
        with pytest.raises(UserError, match=r"start the SGLang server at .* with --enable-weights-cpu-backup$"):
            await engine.sleep()
        assert not server.released

    with_engine(body)


@pytest.mark.parametrize("incremental", [False, True])
def test_the_experts_of_every_token_but_the_last_arrive(incremental):
    """SGLang has a row for every layer; of the middle one here, which has no experts, none is kept."""

    async def body(engine, _server):
        assert engine.returns_routing
        return await engine.generate([3, 100], Sampling(max_new_tokens=3))

    done = with_engine(body, incremental=incremental, layers=3, layout=Layout(3, [0, 2], 16, 2))
    assert done.tokens == [101, 102, 103] and done.routing.dtype == np.int8
    expected = [[[t % 8 + layer, t % 8 + layer + 1] for layer in (0, 2)] for t in (3, 100, 101, 102)]
    assert done.routing.tolist() == expected


def test_nobody_is_asked_for_experts_without_router_replay():
    async def body(engine, server):
        done = await engine.generate([3], Sampling(max_new_tokens=2))
        return done.routing, [sent for path, sent in server.bodies if path == "/generate"]

    routing, (sent,) = with_engine(body, layers=3)
    assert routing is None and "return_routed_experts" not in sent


def test_a_server_that_was_not_started_to_tell_experts_is_told_how():
    async def body(engine, _server):
        with pytest.raises(EngineDied, match="start the server with --enable-return-routed-experts"):
            await engine.generate([3], Sampling(max_new_tokens=2))

    with_engine(body, layout=Layout(3, [0, 2], 16, 2))


def test_experts_that_are_none_are_not_known_and_a_wrong_count_is_a_fault():
    ids = np.array([[[0, 1], [9, 9], [15, 2]], [[0, 16], [9, 9], [255, 3]]], dtype="<i4")
    layout = Layout(3, [0, 2], 16, 2)
    encoded = base64.b64encode(ids.tobytes()).decode()
    assert routing_of(encoded, 2, layout).tolist() == [[[0, 1], [15, 2]], [[-1, -1], [-1, -1]]]
    with pytest.raises(EngineFault, match="12 routed experts of 3 tokens in 3 layers, 2 each"):
        routing_of(encoded, 3, layout)
