"""Weights on their way from the trainer to the rollouts, over shared memory on one host.

    manifest.py   where each tensor lies in a slot, and the checks of a receiver
    slot.py       a slot: a mapped file in `weight_sync.directory`, reused from version to version
    writer.py     the trainer's side: Publisher
    reader.py     a rollout's side: Subscriber

A publication is Offer -> Slot -> write -> Commit -> Visible (async_rl/protocol/weight_sync.py).
"""
