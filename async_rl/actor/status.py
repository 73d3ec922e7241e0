"""One question to one service of a run, from outside of it: its status, or an ordered stop."""

import asyncio
from typing import Any

from async_rl.actor.remote import Remote
from async_rl.actor.service import configured_address, run_id
from async_rl.config.schema import Config
from async_rl.errors import DeadlineExceeded
from async_rl.protocol.control import ControlReply, ControlRequest
from async_rl.rundir import RunDir


async def ask_once(
    run: RunDir, service_name: str, kind: str, message: ControlRequest, config: Config, deadline_s: float
) -> Any:
    """The reply of `service_name` ("rollout-1"), a service of `kind` ("rollout"), to GetStatus or Stop.

    Raises DeadlineExceeded where it has not answered within `deadline_s`, greeting included, and PeerRefused
    where it speaks another schema.
    """

    def address() -> str | None:
        return configured_address(config, kind) or run.address(service_name)

    remote = Remote(
        kind,
        address,
        ControlRequest,
        ControlReply,
        sender="async-rl",
        connect_s=2 * deadline_s,  # the deadline below comes first
        ask_s=2 * deadline_s,
        heartbeat_s=config.services.heartbeat_s,
        run=run_id(run),
    )
    try:
        async with asyncio.timeout(deadline_s), remote:
            return await remote.ask(message)
    except TimeoutError:
        where = address() or "it has announced no address"
        missing = f"the answer of {service_name} ({where}) to {type(message).__name__}"
        raise DeadlineExceeded(missing, deadline_s, "the deadline of a single question") from None
