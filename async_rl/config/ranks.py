"""What the ranks of a trainer ask of the settings. Pure."""

from collections.abc import Iterator

from async_rl.config.schema import Config


def rank_problems(config: Config) -> Iterator[str]:
    """One line each."""
    settings = config.trainer
    ranks, local = settings.ranks, settings.local_ranks
    sequence, tensor = settings.sequence_parallel, settings.tensor_parallel
    if ranks % (sequence * tensor):
        yield (
            f"trainer.sequence_parallel = {sequence} times trainer.tensor_parallel = {tensor} does not divide "
            f"trainer.ranks = {ranks}; ranks are a multiple of {sequence * tensor}"
        )
    if tensor > 1 and config.model.lora is not None:
        yield f"trainer.tensor_parallel = {tensor} with model.lora: adapters are not cut; leave it at 1"
    if local is not None and local > ranks:
        yield f"trainer.local_ranks = {local}: there are trainer.ranks = {ranks}"
    if local is not None and local < ranks and not settings.rendezvous:
        yield (
            f"trainer.local_ranks = {local} of {ranks}: the others need trainer.rendezvous = 'HOST:PORT', an address "
            "of this host that they can reach"
        )
    if local is not None and local < ranks and config.weight_sync.transport == "shm":
        yield (
            "weight_sync.transport = 'shm': ranks on another host do not reach the shared memory of this one; use "
            "'collective' or 'disk'"
        )
    host, _, port = settings.rendezvous.rpartition(":")
    if settings.rendezvous and not (host and port.isdecimal() and 0 < int(port) < 65536):
        yield f"trainer.rendezvous = '{settings.rendezvous}': HOST:PORT, as 10.0.0.1:29500"


def first_remote(config: Config) -> int:
    """The first rank that the leading one does not start."""
    return config.trainer.local_ranks or config.trainer.ranks
