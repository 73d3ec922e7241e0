"""What in `[weight_sync]` cannot be meant, or cannot work here. Pure."""

from collections.abc import Iterator

from async_rl.config.schema import Config
from async_rl.errors import nearest

DEVICES = ("cpu", "cuda", "npu")


def weight_sync_problems(config: Config) -> Iterator[str]:
    """One line each."""
    settings = config.weight_sync
    if settings.relays > 1 and config.services.weight_sync:
        yield (
            f"services.weight_sync = '{config.services.weight_sync}' is the address of one relay: leave it empty with "
            f"weight_sync.relays = {settings.relays}, so that each takes a free port and announces it"
        )
    if settings.relays > config.rollout.workers:
        yield (
            f"weight_sync.relays = {settings.relays}: a relay is of use to rollouts alone, and "
            f"rollout.workers = {config.rollout.workers}"
        )
    if settings.full_every > 1 and settings.transport == "shm":
        yield (
            f"weight_sync.full_every = {settings.full_every} saves nothing with transport = 'shm', where a slot is "
            "written whole; use 1, or transport 'collective' or 'disk'"
        )
    if settings.path and settings.transport != "disk":
        yield f"weight_sync.path = '{settings.path}' is for transport = 'disk', not for '{settings.transport}'"
    kind, _, number = settings.device.partition(":")
    if kind not in DEVICES or (":" in settings.device and not number.isdecimal()):
        yield f"weight_sync.device = '{settings.device}': no such device{nearest(kind, DEVICES)}"
    elif kind != "cpu" and settings.transport != "collective":
        yield f"weight_sync.device = '{settings.device}' is for transport = 'collective', not '{settings.transport}'"
    if settings.operation_s > settings.publish_s:
        yield (
            f"weight_sync.operation_s = {settings.operation_s:g} is longer than the whole publication may take, "
            f"weight_sync.publish_s = {settings.publish_s:g}"
        )
