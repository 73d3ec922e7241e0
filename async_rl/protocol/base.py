"""What all messages have in common."""

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of every message: immutable, tagged by its class name, unknown fields refused.

    A field of type np.ndarray travels as a frame of its own (async_rl/actor/wire.py)."""
