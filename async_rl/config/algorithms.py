"""`[algorithm]`: how a step learns. One table for each advantage estimator and each policy loss, with the settings
that it uses and no others; docs/algorithms.md says when to use which.

The functions are in async_rl/algorithms, under the same names.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from async_rl.config.base import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Table

Share = Annotated[float, Meta(gt=0, le=1)]

# --- advantage estimators ----------------------------------------------------------------------------


class GRPO(Table, frozen=True, tag_field="kind", tag="grpo"):
    """(R - mean) / (std + 1e-6) of the group (Shao et al. 2024); undivided, Dr. GRPO (Liu et al. 2025)."""

    normalize_by_std: bool = True


class GDPO(Table, frozen=True, tag_field="kind", tag="gdpo"):
    """GRPO for each reward component by itself, weighted, summed, whitened (Liu et al. 2026)."""

    weights: dict[str, float]  # of the components that the grader names


class GRPOPassK(Table, frozen=True, tag_field="kind", tag="grpo_passk"):
    """For pass@k: the best member of a group alone gets best minus second best (Chen et al. 2025)."""

    normalize_by_std: bool = True


class GAE(Table, frozen=True, tag_field="kind", tag="gae"):
    """Generalised advantage estimation over the values of a critic, whitened (Schulman et al. 2016)."""

    gamma: Fraction = 1.0
    lam: Fraction = 1.0


class ReinforcePlusPlus(Table, frozen=True, tag_field="kind", tag="reinforce_plus_plus"):
    """Discounted return of each token, whitened over the step (Hu et al. 2025)."""

    gamma: Fraction = 1.0


class ReinforcePlusPlusBaseline(Table, frozen=True, tag_field="kind", tag="reinforce_plus_plus_baseline"):
    """R - mean of the group, whitened over the step (Hu et al. 2025)."""


class ReMax(Table, frozen=True, tag_field="kind", tag="remax"):
    """Against the greedy completion of the same prompt, which is sampled beside the group (Li et al. 2024)."""


class RLOO(Table, frozen=True, tag_field="kind", tag="rloo"):
    """Against the mean of the others of the group (Ahmadian et al. 2024)."""

    normalize_by_std: bool = False  # divided by the others' deviation, where they differ


class OPO(Table, frozen=True, tag_field="kind", tag="opo"):
    """Against the length-weighted mean of the group (Hao et al. 2025)."""


class GPG(Table, frozen=True, tag_field="kind", tag="gpg"):
    """alpha (R - mean) / f_norm, alpha = members / members with a reward other than 0 (Chu et al. 2025)."""

    f_norm: PositiveFloat = 1.0


class OptimalTokenBaseline(Table, frozen=True, tag_field="kind", tag="optimal_token_baseline"):
    """Return minus, at each position, the mean of the group's returns weighted by accumulated squared scores."""


class TIROptimalTokenBaseline(Table, frozen=True, tag_field="kind", tag="tir_optimal_token_baseline"):
    """The same with positions counted over action tokens alone, for trajectories with tool output between."""


class MaxRL(Table, frozen=True, tag_field="kind", tag="maxrl"):
    """(R - mean) / mean: weighs hard tasks up (Tajwar et al. 2026)."""


class PRIME(Table, frozen=True, tag_field="kind", tag="prime"):
    """Token rewards of an implicit reward model that is trained online on the outcomes (Cui et al. 2025)."""

    implicit: NonNegativeFloat = 5.0  # weight of the implicit token rewards
    outcome: NonNegativeFloat = 5.0  # weight of the grader's reward
    beta: PositiveFloat = 0.05
    learning_rate: PositiveFloat = 1e-6  # of the reward model


class CustomAdvantage(Table, frozen=True, tag_field="kind", tag="custom"):
    """Your own `def estimate(members, settings) -> Tensor [A]`, named `module:attribute`."""

    function: str
    settings: dict[str, Any] = {}


Advantage = (
    GRPO
    | GDPO
    | GRPOPassK
    | GAE
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | ReMax
    | RLOO
    | OPO
    | GPG
    | OptimalTokenBaseline
    | TIROptimalTokenBaseline
    | MaxRL
    | PRIME
    | CustomAdvantage
)

# --- policy losses -----------------------------------------------------------------------------------


class PPO(Table, frozen=True, tag_field="kind", tag="ppo"):
    """The clipped ratio (Schulman et al. 2017), with the dual clip where the advantage is negative."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: PositiveFloat = 3.0


class DPPOTV(Table, frozen=True, tag_field="kind", tag="dppo_tv"):
    """Tokens whose probability has moved further than delta leave the loss, instead of ratios being clipped."""

    delta_low: PositiveFloat = 0.2
    delta_high: PositiveFloat = 0.2
    max_ratio: PositiveFloat = 20.0


class DPPOKL(Table, frozen=True, tag_field="kind", tag="dppo_kl"):
    """The same, judged by the KL divergence of the two Bernoulli distributions (this token, any other)."""

    delta_low: PositiveFloat = 0.05
    delta_high: PositiveFloat = 0.05
    max_ratio: PositiveFloat = 20.0


class GSPO(Table, frozen=True, tag_field="kind", tag="gspo"):
    """One ratio for the sequence, the geometric mean of its tokens' (Zheng et al. 2025)."""

    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4


class SAPO(Table, frozen=True, tag_field="kind", tag="sapo"):
    """A sigmoid gate instead of the clip (Gao et al. 2025)."""

    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05


class Reinforce(Table, frozen=True, tag_field="kind", tag="reinforce"):
    """-A log pi (Williams 1992)."""


class ClipCov(Table, frozen=True, tag_field="kind", tag="clip_cov"):
    """PPO without the gradient of a few tokens of high covariance, which cost entropy (Cui et al. 2025)."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    share: Share = 2e-4  # of the tokens
    low: float = 1.0  # covariance between these
    high: float = 5.0


class KLCov(Table, frozen=True, tag_field="kind", tag="kl_cov"):
    """A KL penalty on the tokens of the highest covariance (Cui et al. 2025)."""

    share: Share = 2e-4
    beta: NonNegativeFloat = 1.0


class GMPO(Table, frozen=True, tag_field="kind", tag="gmpo"):
    """The geometric mean of clipped token ratios (Zhao et al. 2025)."""

    clip_low: PositiveFloat = 0.4
    clip_high: PositiveFloat = 0.4


class DRO(Table, frozen=True, tag_field="kind", tag="dro"):
    """A log pi with a quadratic penalty on the log ratio (Richemond et al. 2024)."""

    beta: PositiveFloat


class CISPO(Table, frozen=True, tag_field="kind", tag="cispo"):
    """A clipped ratio as a weight without a gradient: no token loses its gradient (MiniMax 2025)."""

    clip_low: PositiveFloat = 1.0
    clip_high: PositiveFloat = 0.28


class TOPR(Table, frozen=True, tag_field="kind", tag="topr"):
    """Truncated sequence ratios for negative advantages alone (Le Roux et al. 2025)."""


class CustomLoss(Table, frozen=True, tag_field="kind", tag="custom"):
    """Your own `def loss(tokens, settings) -> Tensor [A]`, named `module:attribute`."""

    function: str
    settings: dict[str, Any] = {}


PolicyLoss = PPO | DPPOTV | DPPOKL | GSPO | SAPO | Reinforce | ClipCov | KLCov | GMPO | DRO | CISPO | TOPR | CustomLoss

# --- corrections -------------------------------------------------------------------------------------


class Weights(Table, frozen=True):
    """Importance weights r = exp(log pi_old - log pi_behaviour), without a gradient, on the loss."""

    level: Literal["token", "sequence"] = "token"
    cap: PositiveFloat | None = 2.0  # truncated importance sampling
    band: tuple[float, float] | None = None  # instead of the cap: 0 outside (IcePop, masked importance sampling)
    normalize: bool = False  # mean 1 over the update


class Reject(Table, frozen=True, tag_field="kind", tag="reject"):
    """Tokens or whole sequences whose divergence lies outside [min, max] leave the loss."""

    by: Literal[
        "token_k1",
        "token_k2",
        "token_k3",
        "seq_sum_k1",
        "seq_sum_k2",
        "seq_sum_k3",
        "seq_mean_k1",
        "seq_mean_k2",
        "seq_mean_k3",
        "seq_max_k2",
        "seq_max_k3",
    ]
    max: float
    min: float | None = None  # of k1, which has a sign


class M2PO(Table, frozen=True, tag_field="kind", tag="m2po"):
    """The tokens of the largest squared log ratio leave the loss until the mean is tau (Zheng et al. 2025)."""

    tau: PositiveFloat = 0.04


class OPSM(Table, frozen=True, tag_field="kind", tag="opsm"):
    """Sequences of negative advantage and a mean KL above delta leave the loss (off-policy sequence masking)."""

    delta: PositiveFloat = 1e-4


Rejection = Reject | M2PO | OPSM


class Correction(Table, frozen=True):
    """What is done about tokens that another policy than the newest one sampled.

    `proximal` is what the ratio of the loss is taken against: the behaviour policy as stored; the policy before the
    step's first update, computed once (`recompute`, the decoupled loss of AReaL, Fu et al. 2025); or a point between
    the two by their versions, without a computation (`loglinear`)."""

    proximal: Literal["behaviour", "recompute", "loglinear"] = "behaviour"
    weights: Weights | None = None
    rejections: list[Rejection] = []


# --- the rest ----------------------------------------------------------------------------------------


class KL(Table, frozen=True):
    """KL divergence from the reference policy, as a part of the loss or of the reward."""

    coefficient: PositiveFloat
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"] = "k3"  # +: gradient of k2, value of the other
    place: Literal["loss", "reward"] = "loss"
    target: PositiveFloat | None = None  # adapts the coefficient towards this KL (Ziegler et al. 2019)
    horizon: Positive = 10_000  # trajectories over which it adapts


class Overlong(Table, frozen=True):
    """Soft overlong penalty: 0 up to max - buffer tokens, then linearly down to -1 at max (DAPO, Yu et al. 2025)."""

    buffer: Positive
    max: Positive | None = None  # None: sampling.max_new_tokens
    factor: PositiveFloat = 1.0


class Resample(Table, frozen=True):
    """Members are drawn anew by weights of their rewards, to filter noisy ones out (PF-PPO, Shen et al. 2024)."""

    method: Literal["pow", "max_min", "max_random"] = "pow"
    power: PositiveFloat = 2.0


class Critic(Table, frozen=True):
    """The value model of `gae`: the policy's architecture with one output for each token."""

    path: str | None = None  # None: from model.path
    learning_rate: PositiveFloat = 1e-5
    warmup_steps: NonNegative = 0  # steps in which the critic alone is trained
    clip: PositiveFloat = 0.5  # of a value against the one before the step
    epochs: Positive = 1


class Reference(Table, frozen=True):
    """The policy that `kl` and `prime` compare with."""

    path: str | None = None  # None: model.path


class Teacher(Table, frozen=True):
    """A policy whose log-ratio to the sampler is added to the advantage of each token: on-policy distillation
    (Agarwal et al. 2024)."""

    path: str
    weight: NonNegativeFloat = 1.0  # 0: for your own step alone
    alone: bool = False  # instead of the advantage, not beside it


class Algorithm(Table, frozen=True):
    advantage: Advantage = GRPO()
    loss: PolicyLoss = PPO()
    correction: Correction | None = None  # None: none up to eta = 1, above it recompute with weights up to 2
    aggregation: (
        Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
        | None
    ) = None  # None: the loss's own, token-mean for most
    horizon: Positive | None = None  # divisor of seq-mean-token-sum-norm
    truncated: Literal["train", "mask"] = "train"  # masked completions still vote
    entropy: NonNegativeFloat = 0.0  # coefficient of the entropy bonus
    kl: KL | None = None
    overlong: Overlong | None = None
    resample: Resample | None = None
    critic: Critic = Critic()
    reference: Reference = Reference()
    teacher: Teacher | None = None
    step: str | None = None  # your own dataflow, `module:attribute`, instead of async_rl.services.trainer.step
