"""One trajectory: a completion of a prompt, or an episode of a task."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from async_rl.config.schema import Sampling
from async_rl.models.text import ChatText
from async_rl.services.rollout.engine import Completion, Draft, Engine
from async_rl.services.rollout.episodes import Episodes
from async_rl.services.rollout.held import trajectory
from async_rl.trajectory import Task, Trajectory


@dataclass
class Sampler:
    engine: Engine
    text: ChatText
    episodes: Episodes | None

    async def sample(
        self, task: Task, sampling: Sampling, *, greedy: bool, seed: Callable[[int], int], drafts: list[Draft]
    ) -> Trajectory:
        """`seed`: of the n-th call; `drafts`: where each call's draft is put while it is made."""

        async def call(ids: list[int], limit: int | None, number: int, draft: Draft) -> Completion:
            asked = sampling
            if limit is not None and limit < sampling.max_new_tokens:
                asked = msgspec.structs.replace(sampling, max_new_tokens=limit)
            return await self.engine.generate(ids, asked, greedy=greedy, seed=seed(number), draft=draft)

        if self.episodes is not None:
            return await self.episodes.run(task, call, drafts)
        prompt = self.text.encode(task)
        drafts[:] = [Draft()]
        completion = await call(prompt, None, 0, drafts[0])
        return trajectory(prompt, completion, self.text.decode(completion.tokens))

    def unfit(self, task: Task) -> str | None:
        """Why no completion of the task's prompt can be sampled; None where one can, or where it is an episode's."""
        if self.episodes is not None:
            return None
        try:
            prompt = self.text.encode(task)
        except Exception as error:  # a chat template is code that came with the model
            return f"the prompt cannot be rendered: {type(error).__name__}: {error}"
        if not prompt:
            return "the prompt is empty"
        if len(prompt) >= self.engine.context:
            return f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.engine.context}"
        return None
