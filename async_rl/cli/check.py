"""`async-rl check RUN.toml`: everything that can be known to be wrong before anything starts."""

import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_rl.actor.mailbox import refuse_public
from async_rl.buffers.settings import Settings
from async_rl.cli.engines import engine_problems
from async_rl.cli.environments import environment_problems
from async_rl.config import Config, bounds, load
from async_rl.config.algorithms import CustomAdvantage, CustomLoss
from async_rl.config.consistency import algorithm_problems
from async_rl.config.memory import Estimate, estimate, readable
from async_rl.config.modes import correction
from async_rl.config.placement import placement_problems
from async_rl.config.ranks import rank_problems
from async_rl.config.schema import CustomGrader
from async_rl.config.weight_sync import weight_sync_problems
from async_rl.data import check as check_data
from async_rl.errors import UserError, nearest
from async_rl.models import lora, prepare
from async_rl.models.load import without_weights
from async_rl.user_code import load as load_function

PROXIMAL = {
    "behaviour": "policy that sampled",
    "recompute": "policy before the step",
    "loglinear": "policy between sampler and step",
}


def check(path: str, overrides: Sequence[str]) -> int:
    """Print every problem, one a line, or what the run will be."""
    config = load(path, overrides)
    found = list(problems(config))
    if found:
        for problem in found[:-1]:
            print(f"{path}: {problem}")
        raise UserError(f"{path}: {found[-1]}")
    for line in facts(config):
        print(line)
    return 0


def facts(config: Config) -> Iterator[str]:
    """What the run is, in a few lines."""
    limits, batch = bounds(config), config.batch
    held = (limits.eta_prime + 1) * batch.groups
    updates = batch.mini_batches * batch.epochs
    yield (
        f"{config.name}: {config.max_steps} steps of {batch.groups} groups x {batch.group_size} trajectories, "
        f"{updates} update{'s' if updates > 1 else ''} each"
    )
    lag = limits.hard_max if limits.hard_max is not None else limits.eta
    yield f"mode {config.mode}: no trained token lags more than {lag} ({limits.on_exceed}), at most {held} groups held"
    yield _algorithm_in_words(config)
    if config.model.dtype != "float32":
        yield (
            f"model.dtype = '{config.model.dtype}': the optimizer works on these weights, without a float32 copy: "
            "updates much smaller than a weight are lost in rounding"
        )
    memory = estimate(config)
    if memory is not None:
        yield f"memory: {memory.describe()}"


def _algorithm_in_words(config: Config) -> str:
    settings, fix = config.algorithm, correction(config)
    words = [f"ratios against the {PROXIMAL[fix.proximal]}"]
    if fix.weights is not None:
        bound = f"within {fix.weights.band}" if fix.weights.band else f"up to {fix.weights.cap}"
        words.append(f"importance weights of {fix.weights.level}s {bound}")
    words += [f"rejection {rejection.kind}" for rejection in fix.rejections]
    if settings.kl is not None:
        words.append(f"KL {settings.kl.coefficient:g} in the {settings.kl.place}")
    names = [table.kind for table in (settings.advantage, settings.loss)]
    own = f" in the step {settings.step}" if settings.step else ""
    return f"algorithm: {names[0]} with {names[1]}{own}, {', '.join(words)}"


def problems(config: Config) -> Iterator[str]:
    """One line each, the most basic first, each once."""
    said: set[str] = set()
    basic = (_staleness, batch_problems, placement_problems, rank_problems, _algorithm, _groups, engine_problems)
    for step in (
        *basic,
        environment_problems,
        _data,
        _model,
        _lora,
        _shared_model,
        _grader,
        _addresses,
        weight_sync_problems,
        _device,
        _memory,
    ):
        try:
            found = list(step(config))
        except UserError as error:
            found = [str(error)]
        yield from (problem for problem in found if problem not in said)
        said.update(found)


def _staleness(config: Config) -> Iterator[str]:
    bounds(config)
    yield from ()


def batch_problems(config: Config) -> Iterator[str]:
    """What a step could not be cut into."""
    batch = config.batch
    if batch.groups % batch.mini_batches:
        divisors = [n for n in range(1, batch.groups + 1) if batch.groups % n == 0]
        yield (
            f"batch.mini_batches = {batch.mini_batches} does not divide batch.groups = {batch.groups}; "
            f"one of {divisors}"
        )
    if config.evaluation.every and not config.data.held_out:
        yield f"evaluation.every = {config.evaluation.every} needs data.held_out"


def _algorithm(config: Config) -> Iterator[str]:
    yield from algorithm_problems(config)
    settings = config.algorithm
    if isinstance(settings.advantage, CustomAdvantage) or isinstance(settings.loss, CustomLoss):
        from async_rl.algorithms.registry import estimator, policy_loss

        estimator(settings.advantage)
        policy_loss(settings.loss)
    if settings.step is not None:
        load_function("algorithm.step", settings.step, "step(batch, roles)")


def _groups(config: Config) -> Iterator[str]:
    Settings.of(config, tasks=None, held_out=len(config.data.held_out))
    yield from ()


def _model(config: Config) -> Iterator[str]:
    prepare.check(config)
    path = Path(config.model.path)
    if (path / "config.json").is_file():
        context = json.loads((path / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
        if isinstance(context, int) and config.sampling.max_new_tokens >= context:
            yield (
                f"sampling.max_new_tokens = {config.sampling.max_new_tokens} leaves no room for a prompt in the "
                f"model's context of {context}"
            )


def _lora(config: Config) -> Iterator[str]:
    settings, path = config.model.lora, Path(config.model.path)
    if settings is None:
        return
    lora.require_peft("model.lora")
    problem = lora.engine_problem(config)
    if problem is not None:
        yield problem
    if lora.is_adapter(path):
        yield f"model.path = '{path}' is an adapter, and model.lora needs a whole model: `async-rl export` makes one"
    elif (path / "config.json").is_file():
        lora.targets(settings, lora.linear_layers(without_weights(path)))


def _shared_model(config: Config) -> Iterator[str]:
    """Whether the model's heads and matrices can be shared as the trainer's ranks are to share them."""
    settings, path = config.trainer, Path(config.model.path)
    if settings.sequence_parallel == settings.tensor_parallel == 1 or not (path / "config.json").is_file():
        return
    from async_rl.services.trainer.sequence import require_heads
    from async_rl.services.trainer.tensor import planned, require_divisible

    model = without_weights(path)
    if settings.tensor_parallel > 1:
        planned(model)
        require_divisible(model, settings.tensor_parallel)
    require_heads(model, settings.sequence_parallel, settings.tensor_parallel)
    yield from ()


def _data(config: Config) -> Iterator[str]:
    check_data(config.data)
    yield from ()


def _grader(config: Config) -> Iterator[str]:
    if isinstance(config.reward.grader, CustomGrader):
        from async_rl.services.reward.graders import build

        build(config.reward.grader)
    yield from ()


def _addresses(config: Config) -> Iterator[str]:
    named = {name: getattr(config.services, name) for name in ("buffer", "trainer", "weight_sync")}
    given = {name: address for name, address in named.items() if address}
    for name, address in given.items():
        try:
            refuse_public(address)
        except UserError as error:
            yield f"services.{name} = {error}"
            continue
        twins = [other for other, theirs in given.items() if theirs == address and other != name]
        if twins:
            yield f"services.{name} = '{address}' is also the address of {', '.join(twins)}"
        elif problem := _port_problem(address):
            yield f"services.{name} = '{address}': {problem}"


def _port_problem(address: str) -> str | None:
    if not address.startswith("tcp://"):
        return None
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if port == "*":
        return None
    if int(port) > 65535:
        return f"{port} is no port; the largest is 65535"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            return f"the port is in use ({os.strerror(error.errno or 0)}); choose another, or leave the address empty"
    return None


def _device(config: Config) -> Iterator[str]:
    """A device that this machine cannot give to the relay."""
    settings = config.weight_sync
    kind = settings.device.partition(":")[0]
    if settings.transport != "collective" or kind not in ("cuda", "npu"):
        return
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        yield f"weight_sync.device = '{settings.device}': torch finds no CUDA device here; 'cpu' is gloo"
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        yield f"weight_sync.device = '{settings.device}': torch_npu is not installed; 'cpu' is gloo"


def _memory(config: Config) -> Iterator[str]:
    folder = Path(config.weight_sync.directory)
    if not folder.is_dir():
        yield f"weight_sync.directory = '{folder}': no such folder{nearest(str(folder), ['/dev/shm', '/tmp'])}"
        return
    memory = estimate(config)
    if memory is None:
        return
    room = shutil.disk_usage(folder).free
    if memory.slots > room:
        yield (
            f"weight_sync.directory = '{folder}' has {readable(room)} free, and "
            f"weight_sync.slots = {config.weight_sync.slots} copies of the model take {readable(memory.slots)}"
            + f" with weight_sync.relays = {config.weight_sync.relays}"
            * (config.weight_sync.relays > 1)
        )
    total = Estimate.machine_bytes()
    if total and memory.total > total:
        yield f"memory: {memory.describe()}, and this machine has {readable(total)}"
