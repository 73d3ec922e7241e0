"""The models that a step works with, by name. Which there are follows from `[algorithm]`.

policy         what is trained and published
reference      the run's first model, or algorithm.reference.path: for `kl` and `prime`
critic         values, for `gae`
reward_model   implicit token rewards, for `prime`
teacher        algorithm.teacher.path: its log-probabilities on the policy's samples
"""

from dataclasses import dataclass

import msgspec

from async_rl.config.algorithms import GAE, PRIME
from async_rl.config.schema import Config, Model
from async_rl.errors import UserError
from async_rl.models.load import load_policy
from async_rl.services.trainer import lora
from async_rl.services.trainer.critic import Critic, value_model
from async_rl.services.trainer.network import Network
from async_rl.services.trainer.policy import Policy
from async_rl.services.trainer.ranks import Ranks, sharded
from async_rl.services.trainer.reward_model import RewardModel
from async_rl.services.trainer.trained import Trained


@dataclass
class Roles:
    policy: Policy
    reference: Network | None = None
    critic: Critic | None = None
    reward_model: RewardModel | None = None
    teacher: Network | None = None
    kl: float = 0.0  # the coefficient of algorithm.kl, as it is now

    @classmethod
    def load(cls, config: Config, first: Model, ranks: Ranks | None = None) -> "Roles":
        """A policy that begins as `first`, and the others."""
        return cls.around(Policy(lora.load(config, first), config, ranks), config, first, ranks)

    @classmethod
    def around(cls, policy: Policy, config: Config, first: Model, ranks: Ranks | None = None) -> "Roles":
        """`policy` and the others that `config` asks for. first: the model that the run began with. UserError where
        one cannot be loaded, or speaks another vocabulary."""
        settings = config.algorithm
        roles = cls(policy, kl=settings.kl.coefficient if settings.kl is not None else 0.0)
        prime = settings.advantage if isinstance(settings.advantage, PRIME) else None

        def load(key: str, path: str | None, *, learns: bool = False) -> object:
            chosen = lora.in_trained_dtype(_at(first, path), config) if learns else _at(first, path)
            device = "cpu" if sharded(config.trainer) else config.trainer.device
            model = load_policy(chosen, device=device)
            theirs, ours = model.config.vocab_size, policy.model.config.vocab_size
            if theirs != ours:
                raise UserError(f"{key} = '{path}' has a vocabulary of {theirs} tokens, the policy one of {ours}")
            return model

        if settings.kl is not None or prime is not None:
            roles.reference = Network(load("algorithm.reference.path", settings.reference.path), config, ranks)
        if isinstance(settings.advantage, GAE):
            roles.critic = Critic(
                value_model(load("algorithm.critic.path", settings.critic.path, learns=True)), config, ranks
            )
        if prime is not None:
            roles.reward_model = RewardModel(
                load("algorithm.reference.path", settings.reference.path, learns=True), config, prime, ranks
            )
        if settings.teacher is not None:
            roles.teacher = Network(load("algorithm.teacher.path", settings.teacher.path), config, ranks)
        return roles

    def beside(self) -> dict[str, Trained]:
        """The roles beside the policy that learn, by name."""
        found: dict[str, Trained | None] = {"critic": self.critic, "reward_model": self.reward_model}
        return {name: role for name, role in found.items() if role is not None}


def _at(first: Model, path: str | None) -> Model:
    return first if path is None else msgspec.structs.replace(first, path=path)
