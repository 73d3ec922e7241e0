"""A dataflow of one's own: GRPO, and a teacher's opinion of each token mixed into its advantage.

    async-rl train recipes/quickstart.toml
    async-rl train recipes/quickstart.toml name=distilled algorithm.step=recipes.own.distil:step \
        'algorithm.teacher={path="runs/quickstart/checkpoints/step-00000060", weight=0}'

The teacher is the checkpoint of the first run. `weight = 0` keeps the built-in mixing off: here we do it.
"""

from dataclasses import replace

from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.step import Batch, StepResult, advantages, teacher_gap, update

MIX = 0.3  # of the teacher, at the first step; it fades over the run


def step(batch: Batch, roles: Roles) -> StepResult:
    share = MIX * (1 - batch.drawn.step / batch.config.max_steps)
    grpo = advantages(batch, roles)
    gap = teacher_gap(batch, roles)  # log pi_teacher - log pi_sampler, of each token
    result = update(batch, roles, replace(grpo, advantages=(1 - share) * grpo.advantages + share * gap))
    return replace(result, figures=result.figures | {"teacher_gap": float(gap.mean())})
