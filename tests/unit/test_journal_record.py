"""Records: what is written is what is found, wherever the bytes around it went wrong."""

import struct

from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from async_rl.buffers.journal import record
from async_rl.buffers.journal.record import HEAD, MAGIC, Kind

Payload = list[bytes]
PAYLOADS = st.lists(st.lists(st.binary(max_size=60) | st.just(MAGIC * 5), max_size=4), max_size=8)


def laid_out(payloads: list[Payload], segment: int = 3) -> tuple[bytes, list[int]]:
    """A segment of records, and where each ends."""
    data, ends = b"", []
    for number, frames in enumerate(payloads):
        parts, nbytes = record.encode(Kind.EVENTS, segment, number, len(data), 12.5, frames)
        whole = b"".join(parts)
        assert len(whole) == nbytes
        data += whole
        ends.append(len(data))
    return data, ends


def found(data: bytes, segment: int = 3) -> list[tuple[int, Payload]]:
    return [(one.number, [bytes(frame) for frame in one.frames]) for one in record.scan(data, segment)]


@given(PAYLOADS)
def test_what_was_written_is_found(payloads: list[Payload]) -> None:
    data, ends = laid_out(payloads)
    assert found(data) == list(enumerate(payloads))
    assert [one.end for one in record.scan(data, 3)] == ends
    assert all(one.time == 12.5 and one.kind == Kind.EVENTS for one in record.scan(data, 3))


@given(PAYLOADS, st.data())
def test_cut_off_anywhere_the_whole_ones_are_found(payloads: list[Payload], drawn: st.DataObject) -> None:
    data, ends = laid_out(payloads)
    cut = drawn.draw(st.integers(0, len(data)))
    whole = sum(end <= cut for end in ends)
    assert found(data[:cut]) == list(enumerate(payloads[:whole]))


@profile(max_examples=200)
@given(PAYLOADS.filter(bool), st.data())
def test_bytes_overwritten_anywhere_cost_the_records_they_lie_in(payloads: list[Payload], drawn: st.DataObject) -> None:
    data, ends = laid_out(payloads)
    start = drawn.draw(st.integers(0, len(data) - 1))
    wrong = drawn.draw(st.binary(min_size=1, max_size=200) | st.just(MAGIC * 20))[: len(data) - start]
    broken = data[:start] + wrong + data[start + len(wrong) :]
    begins = [0, *ends[:-1]]
    hit = {n for n in range(len(ends)) if broken[begins[n] : ends[n]] != data[begins[n] : ends[n]]}
    assert found(broken) == [(n, payload) for n, payload in enumerate(payloads) if n not in hit]


@given(st.binary(max_size=300) | st.lists(st.sampled_from([MAGIC, b"\0" * HEAD, b"x"])).map(b"".join))
def test_noise_holds_no_record(noise: bytes) -> None:
    assert found(noise) == []


def test_a_record_inside_another_is_none_even_where_the_outer_one_is_damaged() -> None:
    """A trajectory may hold any bytes, those of a whole journal too."""
    inner, _ = laid_out([[b"forged"], [b"forged too"]])
    data, _ = laid_out([[b"before"], [inner], [b"behind"]])
    assert found(data) == [(0, [b"before"]), (1, [inner]), (2, [b"behind"])]
    broken = bytearray(data)
    broken[data.index(inner) + len(inner) - 1] ^= 1
    assert found(bytes(broken)) == [(0, [b"before"]), (2, [b"behind"])]


def test_a_record_counts_in_its_own_segment_alone() -> None:
    data, _ = laid_out([[b"one"]])
    assert found(data) and not found(data, segment=4)


def test_a_length_beyond_the_file_is_damage() -> None:
    data, _ = laid_out([[b"one"], [b"two"]])
    length = HEAD - 16
    assert struct.unpack_from("<Q", data, length)[0] == 11
    for wrong in (0, 2**40, 2**64 - 1):
        assert found(data[:length] + struct.pack("<Q", wrong) + data[length + 8 :]) == [(1, [b"two"])]


def test_a_record_is_read_alone_by_its_place() -> None:
    data, ends = laid_out([[b"one"], [b"two", b"more"], [b"three"]])
    alone = memoryview(data)[ends[0] : ends[1]]
    one = record.read(alone, 3, ends[0], base=ends[0])
    assert one is not None and [bytes(frame) for frame in one.frames] == [b"two", b"more"]
    assert record.read(alone[:-1], 3, ends[0], base=ends[0]) is None
    assert record.read(alone, 3, 0, base=0) is None
