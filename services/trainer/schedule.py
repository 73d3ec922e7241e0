"""The learning rate of each optimizer update, known before the first one."""

import math

from async_rl.config.schema import Config, Trainer


def total_updates(config: Config) -> int:
    """Optimizer updates of the whole run: max_steps x mini-batches x epochs."""
    return config.max_steps * config.batch.mini_batches * config.batch.epochs


def learning_rate(update: int, total: int, settings: Trainer) -> float:
    """Of update 0 <= `update` < `total`.

    Rises linearly over trainer.warmup_steps updates to trainer.learning_rate; then stays, or falls in a line
    or half a cosine, towards trainer.min_learning_rate at `total`.
    """
    peak, low, warmup = settings.learning_rate, settings.min_learning_rate, settings.warmup_steps
    if update < warmup:
        return peak * (update + 1) / warmup
    progress = min((update - warmup) / max(total - warmup, 1), 1.0)
    match settings.schedule:
        case "constant":
            return peak
        case "linear":
            return low + (peak - low) * (1.0 - progress)
        case "cosine":
            return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
