"""Expert routing in trajectories: through turns and branches, over the wire, into the journal's bytes."""

import msgspec
import numpy as np
import pytest

from async_rl.actor.wire import Codec, WireError
from async_rl.agents.recording import Recording
from async_rl.services.rollout.engine import Completion, Draft
from async_rl.services.rollout.held import trajectory
from async_rl.trajectory import UNROUTED, Trajectory, routing_dtype

LAYERS, PER_TOKEN = 2, 3


def rows(tokens, start=0):
    """Routing of so many tokens, each other than the rest."""
    count = tokens * LAYERS * PER_TOKEN
    return (np.arange(start, start + count, dtype=np.int16) % 997).reshape(tokens, LAYERS, PER_TOKEN)


def completion(tokens, routing):
    return Completion(tokens, [-1.0] * len(tokens), [(0, len(tokens))], "eos", None, routing)


def test_a_completion_has_the_routing_of_all_but_its_last_token():
    made = trajectory([5, 6, 7], completion([8, 9], rows(4)), "")
    assert made.problems() is None and np.array_equal(made.routing, rows(4))
    for wrong in (rows(5), rows(3), rows(4)[:, 0]):
        assert "it is of all but the last" in msgspec.structs.replace(made, routing=wrong).problems()


def test_a_draft_without_any_gives_none():
    draft = Draft()
    draft.tokens, draft.logprobs = [1], [-0.5]
    assert draft.completion("eos").routing is None
    draft.routing += list(rows(3))
    assert np.array_equal(draft.completion("eos").routing, rows(3))


def test_turns_keep_the_routing_that_their_tokens_were_sampled_with():
    """The second turn's pass over the first is another one; it adds the tokens from the last sampled one on."""
    recording = Recording()
    recording.add([1, 2], [3, 4], [-1, -1], [(0, 2)], None, rows(3))
    recording.add([1, 2, 3, 4, 5], [6, 7], [-1, -1], [(0, 2)], None, rows(6, start=500))
    recording.add([1, 2, 9], [8], [-1], [(0, 1)], None, rows(3, start=700))
    whole = recording.trajectory("eos", "", None)
    assert whole.problems() is None
    assert np.array_equal(whole.routing, np.concatenate([rows(3), rows(6, start=500)[3:]]))
    (branch,) = whole.branches
    assert np.array_equal(branch.routing, rows(3, start=700))


def test_episodes_of_engines_without_routing_have_none():
    recording = Recording()
    recording.add([1], [2], [-1], [(0, 1)])
    recording.add([1, 2, 3], [4], [-1], [(0, 1)])
    assert recording.trajectory("eos", "", None).routing is None


@pytest.mark.parametrize("tokens", [4, 4000])
@pytest.mark.parametrize("experts", [128, 256])
def test_routing_passes_the_wire_as_it_is(tokens, experts):
    """In the body where it is small, in a frame of its own where it is large; the journal writes the same frames."""
    routing = (rows(tokens) % experts).astype(routing_dtype(experts))
    routing[0] = UNROUTED
    prompt = list(range(tokens - 1))
    recording = Recording()
    recording.add(prompt, [1, 2], [-1, -1], [(0, 2)], None, routing)
    recording.add([7, 7], [8], [-1], [(0, 1)], None, routing[:2])
    sent = recording.trajectory("eos", "", None)
    codec = Codec(Trajectory)
    frames = codec.encode(sent)
    assert (len(frames) > 1) == (tokens > 1000)
    got = codec.decode(frames)
    assert got.routing.dtype == routing.dtype and np.array_equal(got.routing, routing)
    assert np.array_equal(got.branches[0].routing, routing[:2])
    assert got.problems() is None
    assert got.nbytes - msgspec.structs.replace(got, routing=None).nbytes == routing.nbytes


def test_routing_that_is_no_array_is_refused():
    sent = trajectory([5], completion([8], rows(1)), "")
    body = msgspec.msgpack.decode(Codec(Trajectory).encode(sent)[0])
    with pytest.raises(WireError):
        Codec(Trajectory).decode([msgspec.msgpack.encode({**body, "routing": [1, 2]})])


@pytest.mark.parametrize(("experts", "dtype"), [(2, "int8"), (128, "int8"), (129, "int16"), (2**15, "int16")])
def test_ids_of_all_experts_and_none_fit(experts, dtype):
    assert routing_dtype(experts) == np.dtype(dtype)
    assert np.array([UNROUTED, experts - 1]).astype(dtype).tolist() == [UNROUTED, experts - 1]
