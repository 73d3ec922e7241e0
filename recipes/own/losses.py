"""A policy loss of one's own.

    async-rl train recipes/quickstart.toml \
        'algorithm.loss={kind="custom", function="recipes.own.losses:one_sided", settings={clip=0.2}}'
"""

import torch
from torch import Tensor

from async_rl.algorithms.members import Tokens


def one_sided(tokens: Tokens, settings: dict[str, float]) -> Tensor:
    """[A] -A min(rho, 1 + clip): only the way up is bounded."""
    ratio = (tokens.logprobs - tokens.old).clamp(-20, 20).exp()
    return -tokens.advantages * torch.clamp(ratio, max=1 + settings["clip"])
