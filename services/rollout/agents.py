"""An agent of the user's own that talks to the gateway: a program started for each episode, or a function."""

import asyncio
import contextlib
import inspect
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec

from async_rl.config.schema import AgentProgram
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.services.rollout.episodes import Policy
from async_rl.services.rollout.gateway import Gateway, Session
from async_rl.trajectory import Task
from async_rl.user_code import load

LAST_WORDS = 500  # characters of what a failed program printed


class AgentFailed(AsyncRLError):
    """The agent ended with an error, and gave no reward before."""


class AgentEpisode:
    """An Episode."""

    def __init__(self, settings: AgentProgram, gateway: Gateway) -> None:
        if bool(settings.command) == (settings.function is not None):
            raise ConfigError("environment.run of kind 'agent' has either a command or a function")
        self._gateway, self._command = gateway, settings.command
        self._function: Callable[..., Any] | None = None
        if settings.function is not None:
            self._function = load("environment.run.function", settings.function, "agent(task, base_url)", "either")

    async def __call__(self, task: Task, policy: Policy) -> float | None:
        """Its reward: what was posted, else what the function returned, else None. A cap that the agent ran into (and
        mostly dies of) ends the episode as any other does."""
        session = self._gateway.open(task, policy)
        try:
            returned = await (self._run(session) if self._function is None else self._call(self._function, session))
        except Exception:  # whatever an agent dies of: told, unless its reward is posted or the episode is over
            if session.died is not None:
                raise session.died from None
            if session.reward is None and not policy.is_over:
                raise
            returned = None
        finally:
            self._gateway.close(session)
        return returned if session.reward is None else session.reward

    async def _call(self, function: Callable[..., Any], session: Session) -> float | None:
        if inspect.iscoroutinefunction(function):
            value = await function(session.task, session.base_url + "/v1")
        else:
            value = await asyncio.to_thread(function, session.task, session.base_url + "/v1")
        return None if value is None else float(value)

    async def _run(self, session: Session) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=os.environ
            | {
                "OPENAI_BASE_URL": session.base_url + "/v1",
                "OPENAI_API_KEY": "none",
                "ANTHROPIC_BASE_URL": session.base_url,
                "ANTHROPIC_API_KEY": "none",
                "ASYNC_RL_EPISODE": session.base_url,
                "ASYNC_RL_TASK": json.dumps(msgspec.to_builtins(session.task)),
            },
        )
        try:
            printed, _ = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
        if process.returncode:
            words = printed.decode(errors="replace").strip()[-LAST_WORDS:]
            raise AgentFailed(f"{self._command[0]} ended with status {process.returncode}: {words}")
