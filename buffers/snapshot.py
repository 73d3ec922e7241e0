"""The state as plain bytes, and again. Pure.

A segment of the journal begins with one, so that what came before need not be read. Every field of State and of
what it holds is in it by its declaration; what two parts of the state share is shared again after `thaw`.
"""

import msgspec

from async_rl.buffers.state import State


def freeze(state: State) -> bytes:
    return _encoder.encode(state)


def thaw(frozen: bytes | memoryview) -> State:
    """msgspec.DecodeError (a ValueError) where `frozen` is no state of this version of the program."""
    state = _decoder.decode(frozen)
    for pool in (state.training, state.held_out):
        for group in pool.groups.values():
            if group.lease is not None:
                group.lease = state.leases[group.lease.id]
    if state.batch is not None:  # with reuse, groups that ended are in it alone
        state.batch.groups = [state.find(group.id) or group for group in state.batch.groups]
    return state


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)
