"""What others send samples through, from a producer's process to a consumer's: the same arrays, the same calls.

Each is called with (samples, samples of a call, calls under way) and gives the seconds of "put", until the last
call is answered, and of "get", in which the consumer takes the samples of a step at a time. Bare ZeroMQ keeps
nothing: its one figure is from the first sample sent to the last one held.
"""

import asyncio
import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zmq
from buffer_ours import STEP, trajectory
from buffer_turns import Cast, Turns, each

from async_rl.actor.wire import Codec
from async_rl.trajectory import Trajectory

System = Callable[[int, int, int], dict[str, float]]


@contextlib.contextmanager
def installed() -> Iterator[tuple[dict[str, System], list[str]]]:
    """The systems there are, and the names of the packages that are not installed."""
    systems: dict[str, System] = {"zeromq": push_pull}
    missing = [name for name in ("ray", "transfer_queue") if importlib.util.find_spec(name) is None]
    if "ray" in missing:
        yield systems, missing
        return
    import ray

    os.environ.update(RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0", TQ_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")
    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    ray.init(num_cpus=8, object_store_memory=600 * 2**20, **quiet)
    try:
        systems |= {"ray_queue": RayQueue(), "ray_queue_single": RayQueue(single=True), "ray_objects": RayObjects()}
        if "transfer_queue" not in missing:
            systems["transfer_queue"] = TransferQueue()
        yield systems, missing
    finally:
        ray.shutdown()


def arrays() -> dict[str, np.ndarray]:
    """Of one sample, shared with no other: an array that comes twice in one pickle travels once."""
    sample = trajectory()
    return {"tokens": sample.tokens, "action": sample.action, "logprobs": sample.logprobs}


# --- bare ZeroMQ -------------------------------------------------------------------------------------


def push_pull(samples: int, per_call: int, under_way: int) -> dict[str, float]:
    """PUSH to PULL over TCP with our encoding, as our services talk; what comes is decoded."""
    port = _free_port()
    calls = samples // per_call
    with Cast(producer=(_push, port, calls, per_call), consumer=(_pull, port, calls, per_call)) as cast:
        cast.turn("producer", "connect")
        cast.turn("consumer", "connect")
        cast.call("consumer", "get")
        cast.call("producer", "put")
        began, _ = cast.times("producer")
        _, ended = cast.times("consumer")
    return {"put": 0.0, "get": ended - began}


async def _push(turns: Turns, port: int, calls: int, per_call: int) -> None:
    codec, sample = Codec(list[Trajectory]), trajectory()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        async with turns.turn("connect"):
            socket.bind(f"tcp://127.0.0.1:{port}")
        async with turns.turn("put"):
            for _ in range(calls):
                socket.send_multipart(codec.encode([sample] * per_call), copy=False)


async def _pull(turns: Turns, port: int, calls: int, per_call: int) -> None:
    codec = Codec(list[Trajectory])
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        async with turns.turn("connect"):
            socket.connect(f"tcp://127.0.0.1:{port}")
            await asyncio.sleep(0.2)
        async with turns.turn("get"):
            held = []
            for _ in range(calls):
                held += codec.decode(socket.recv_multipart(copy=False))
                if len(held) > STEP:
                    del held[:STEP]


def _free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


# --- Ray ---------------------------------------------------------------------------------------------


def _actors(producer: type, consumer: type, *given: Any) -> tuple[Any, Any]:
    import ray

    return ray.remote(num_cpus=0)(producer).remote(*given), ray.remote(num_cpus=0)(consumer).remote(*given)


class RayQueue:
    """ray.util.queue.Queue: an actor between the two. single: put and got one a call, as `put` and `get` do it."""

    def __init__(self, *, single: bool = False) -> None:
        from ray.util.queue import Queue

        self._single = single
        self._sides = _actors(QueueSide, QueueSide, Queue())

    def __call__(self, samples: int, per_call: int, under_way: int) -> dict[str, float]:
        import ray

        producer, consumer = self._sides
        if self._single:
            put = ray.get(producer.put_single.remote(samples, under_way))
            return {"put": put, "get": ray.get(consumer.get_single.remote(samples, under_way))}
        put = ray.get(producer.put.remote(samples // per_call, per_call, under_way))
        return {"put": put, "get": ray.get(consumer.get.remote(samples))}


class QueueSide:
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, calls: int, per_call: int, under_way: int) -> float:
        batch, actor = [arrays() for _ in range(per_call)], self._queue.actor

        async def put(_: int) -> None:
            await actor.put_nowait_batch.remote(batch)

        return _timed(calls, under_way, put)

    def get(self, samples: int) -> float:
        async def get(_: int) -> None:
            if len(await self._queue.actor.get_nowait_batch.remote(STEP)) != STEP:
                raise AssertionError("a step is not whole")

        return _timed(samples // STEP, 1, get)

    def put_single(self, samples: int, under_way: int) -> float:
        one = arrays()
        return _timed(samples, under_way, lambda _: self._queue.put_async(one))

    def get_single(self, samples: int, under_way: int) -> float:
        return _timed(samples, under_way, lambda _: self._queue.get_async())


class RayObjects:
    """Ray's object store, one object a call; the references travel together, in one more message."""

    def __init__(self) -> None:
        self._sides = _actors(ObjectProducer, ObjectConsumer)

    def __call__(self, samples: int, per_call: int, under_way: int) -> dict[str, float]:
        import ray

        producer, consumer = self._sides
        put, references = ray.get(producer.put.remote(samples // per_call, per_call))
        return {"put": put, "get": ray.get(consumer.get.remote(references, per_call))}


class ObjectProducer:
    def put(self, calls: int, per_call: int) -> tuple[float, list[Any]]:
        import ray

        batch, began = [arrays() for _ in range(per_call)], time.perf_counter()
        references = [ray.put(batch) for _ in range(calls)]
        return time.perf_counter() - began, references


class ObjectConsumer:
    def get(self, references: list[Any], per_call: int) -> float:
        import ray

        began = time.perf_counter()
        for first in range(0, len(references), STEP // per_call):
            ray.get(references[first : first + STEP // per_call])
        return time.perf_counter() - began


# --- TransferQueue -----------------------------------------------------------------------------------


class TransferQueue:
    def __init__(self) -> None:
        import transfer_queue as tq
        from omegaconf import OmegaConf

        storage = {"num_data_storage_units": 1, "total_storage_size": 100_000}
        backend = {"storage_backend": "SimpleStorage", "SimpleStorage": storage}
        tq.init(OmegaConf.create({"backend": backend}, flags={"allow_objects": True}))
        self._sides, self._round = _actors(TransferQueueSide, TransferQueueSide), 0

    def __call__(self, samples: int, per_call: int, under_way: int) -> dict[str, float]:
        import ray

        self._round += 1
        producer, consumer = self._sides
        what = f"round-{self._round}", samples // per_call, per_call
        put = ray.get(producer.put.remote(*what, under_way))
        get = ray.get(consumer.get.remote(*what))
        ray.get(consumer.clear.remote(*what))
        return {"put": put, "get": get}


class TransferQueueSide:
    def __init__(self) -> None:
        import torch
        import transfer_queue as tq

        torch.set_num_threads(1)
        tq.init()
        self._tq, self._run = tq, tq.get_client()._run_coroutine

    def put(self, partition: str, calls: int, per_call: int, under_way: int) -> float:
        import torch
        from tensordict import TensorDict

        fields = {name: torch.from_numpy(np.stack([array] * per_call)) for name, array in arrays().items()}
        batch, one = TensorDict(fields, batch_size=per_call), {name: value[0] for name, value in fields.items()}

        async def put(call: int) -> None:
            keys = _keys(call, per_call)
            if per_call == 1:
                await self._tq.async_kv_put(key=keys[0], partition_id=partition, fields=one)
            else:
                await self._tq.async_kv_batch_put(keys=keys, partition_id=partition, fields=batch)

        return self._timed(calls, under_way, put)

    def get(self, partition: str, calls: int, per_call: int) -> float:
        keys = [key for call in range(calls) for key in _keys(call, per_call)]

        async def get(step: int) -> None:
            wanted = keys[step * STEP : (step + 1) * STEP]
            await self._tq.async_kv_batch_get(keys=wanted, partition_id=partition)

        return self._timed(len(keys) // STEP, 1, get)

    def clear(self, partition: str, calls: int, per_call: int) -> None:
        keys = [key for call in range(calls) for key in _keys(call, per_call)]
        self._run(self._tq.async_kv_clear(keys=keys, partition_id=partition))

    def _timed(self, calls: int, under_way: int, call: Callable[[int], Any]) -> float:
        began = time.perf_counter()
        self._run(each(list(range(calls)), under_way, call))
        return time.perf_counter() - began


def _keys(call: int, per_call: int) -> list[str]:
    return [f"{call}-{i}" for i in range(per_call)]


def _timed(calls: int, under_way: int, call: Callable[[int], Any]) -> float:
    async def run() -> float:
        began = time.perf_counter()
        await each(list(range(calls)), under_way, call)
        return time.perf_counter() - began

    return asyncio.run(run())
