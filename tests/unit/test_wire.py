"""The wire format: what goes in comes out, arrays without a copy, and no bytes whatever do harm."""

import tracemalloc

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from async_rl.actor import wire
from async_rl.errors import WireError
from async_rl.protocol.base import Message
from async_rl.protocol.buffer import BufferReply, BufferRequest, Draw, FinishGenerate, LeaseId, Sampled
from async_rl.trajectory import Trajectory


class Carry(Message, frozen=True):
    arrays: list[np.ndarray]


class Count(Message, frozen=True):
    n: int


CODEC = wire.Codec(Carry | Count)


def carried(*arrays):
    return CODEC.decode(CODEC.encode(Carry(list(arrays)))).arrays


def trajectory(n):
    return Trajectory(
        tokens=np.arange(n, dtype=np.int32),
        action=np.ones(n, dtype=bool),
        logprobs=np.linspace(-1, 0, n, dtype=np.float32),
        versions=[(0, n)],
        stop="eos",
        text="x",
    )


@given(
    st.sampled_from(sorted(wire.DTYPES)),
    st.lists(st.integers(0, 9), max_size=4),
    st.integers(1, 600),
)
def test_an_array_of_any_dtype_and_shape_comes_back_equal(dtype, shape, repeats):
    array = (np.arange(int(np.prod(shape))) % 2).reshape(shape).astype(dtype)
    array = np.concatenate([array] * repeats) if array.ndim else array
    (back,) = carried(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


def test_a_scalar_array_keeps_its_empty_shape():
    (back,) = carried(np.array(3.5, dtype=np.float32))
    assert back.shape == ()
    assert back == np.float32(3.5)


@pytest.mark.parametrize("n", [3, 5000])
def test_byte_order_and_strides_of_the_sender_do_not_matter(n):
    foreign = np.arange(n, dtype=">i4")
    strided = np.arange(4 * n, dtype=np.float64).reshape(2, 2 * n)[:, ::2]
    back, columns = carried(foreign, strided)
    assert np.array_equal(back, np.arange(n))
    assert np.array_equal(columns, strided)


def test_nan_and_infinities_survive():
    (back,) = carried(np.array([np.nan, -np.inf, -2.0], dtype=np.float32))
    assert np.array_equal(back, np.array([np.nan, -np.inf, -2.0], dtype=np.float32), equal_nan=True)


def test_large_arrays_are_neither_copied_when_sent_nor_when_received():
    # field report 57: tensors packed into one blob are copied again on both sides
    array = np.arange(200_000, dtype=np.float32)
    frames = CODEC.encode(Carry([array]))
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), array)

    received = [zmq.Frame(bytes(frame)) for frame in frames]
    (back,) = CODEC.decode(received).arrays
    assert np.shares_memory(back, np.frombuffer(received[1].buffer, np.uint8))
    assert not back.flags.writeable


def test_neither_side_takes_memory_in_proportion_to_what_it_carries():
    # field report 57: 100 MB through encode and decode
    array = np.zeros(25_000_000, dtype=np.float32)
    tracemalloc.start()
    try:
        (back,) = CODEC.decode(CODEC.encode(Carry([array]))).arrays
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert back.nbytes == 100_000_000
    assert peak < 100_000


def test_small_arrays_lie_in_the_body_and_are_read_only_too():
    frames = CODEC.encode(Carry([np.arange(4)]))
    (back,) = CODEC.decode(frames).arrays
    assert len(frames) == 1
    assert not back.flags.writeable


def test_an_unaligned_frame_is_aligned_when_it_arrives():
    array = np.arange(wire.INLINE_BYTES, dtype=np.float64)
    body, raw = CODEC.encode(Carry([array]))
    (back,) = CODEC.decode([body, memoryview(b"x" + bytes(raw))[1:]]).arrays
    assert back.flags.aligned
    assert not back.flags.writeable
    assert np.array_equal(back, array)


def test_a_trajectory_goes_through_the_buffers_union():
    codec = wire.Codec(BufferRequest)
    message = FinishGenerate("rollout-0", "i", [Sampled(LeaseId(1, 0, "generate"), 2, trajectory(3000))])
    back = codec.decode(codec.encode(message))
    (after,), (before,) = back.results, message.results
    assert after.lease == before.lease
    assert np.array_equal(after.trajectory.tokens, before.trajectory.tokens)
    assert np.array_equal(after.trajectory.action, before.trajectory.action)


def test_objects_are_no_arrays():
    with pytest.raises(TypeError, match="object"):
        CODEC.encode(Carry([np.array([object()])]))
    with pytest.raises(TypeError, match="wire format"):
        CODEC.encode(Carry([object()]))


def body_with(value):
    return msgspec.msgpack.encode({"type": "Carry", "arrays": [value]})


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "no body"),
        ([b""], "truncated"),
        ([b"\xc1"], "malformed"),
        ([msgspec.msgpack.encode({"type": "Carri"})], "Carri"),
        ([msgspec.msgpack.encode({"type": "Count", "n": 1, "m": 2})], "m"),
        ([msgspec.msgpack.encode({"type": "Count", "n": 1}), b"\0" * 8], "1 arrays, 0 named"),
        ([body_with(["float32", [2], 0])], r"\[dtype, shape, frame\]"),
        ([body_with(["float32", [2], 0]), b"\0" * 12], "reshape"),
        ([body_with(["float32", [3], 0]), b"\0" * 11], "size"),
        ([body_with(["object", [1], b"\0" * 8])], r"\[dtype, shape, frame\]"),
        ([body_with(["float32", [-1], b"\0" * 8])], "shape"),
        ([body_with(["float32", [2**62, 2**62], b"\0" * 8])], "shape"),
        ([body_with(["float32", [0] * 99, b""])], "malformed"),
        ([b"\x91" * 100_000], "malformed"),
    ],
)
def test_what_is_no_message_is_one_clear_line(frames, said):
    with pytest.raises(WireError, match=said) as caught:
        CODEC.decode(frames)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_envelope(data):
    try:
        envelope = wire.decode_envelope(data)
    except WireError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(envelope, wire.Envelope)


@given(st.lists(st.binary(max_size=100), max_size=4))
def test_random_frames_decode_to_a_message_or_to_a_wire_error(frames):
    for union in (BufferRequest, BufferReply):
        try:
            wire.Codec(union).decode(frames)
        except WireError as error:
            assert "\n" not in str(error)


@given(st.data())
def test_a_message_with_flipped_bytes_decodes_or_is_refused(data):
    codec = wire.Codec(BufferRequest)
    lease = LeaseId(1, 0, "generate")
    finish = FinishGenerate("w", "i", [Sampled(lease, 0, trajectory(300))])
    message = data.draw(st.sampled_from([Draw(3, 1, 0.5), finish]))
    frames = [bytearray(frame) for frame in codec.encode(message)]
    for _ in range(data.draw(st.integers(1, 6))):
        frame = data.draw(st.sampled_from(frames))
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.decode([bytes(frame) for frame in frames])
    except WireError as error:
        assert "\n" not in str(error)


def test_a_greeting_of_another_schema_is_read_whatever_it_adds():
    longer = msgspec.msgpack.encode(["hello", 9, "buffer", "rollout-0", "run", {"new": [1]}])
    shorter = msgspec.msgpack.encode(["hello", 0, "buffer", "rollout-0"])
    assert wire.decode_envelope(longer).schema == 9
    assert wire.decode_envelope(shorter).schema == 0
