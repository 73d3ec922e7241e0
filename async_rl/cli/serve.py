"""`async-rl serve SERVICE RUN.toml`: one service, wherever you like."""

import os
import signal
import sys
from collections.abc import Sequence

from async_rl.actor.process import PARENT, die_with_parent
from async_rl.actor.service import Service, run_service
from async_rl.cli.resume import keep_config
from async_rl.config import Config, load
from async_rl.config.ranks import first_remote, rank_problems
from async_rl.errors import ConfigError, RankLost, UserError
from async_rl.rundir import RunDir
from async_rl.weights.relays import relay_names

ELASTIC = ("rollout", "reward")
"""Workers may join a run beyond those that `async-rl train` starts."""


def serve(service: str, path: str, overrides: Sequence[str], *, index: int = 0, rank: int = 0) -> int:
    """Run the service until its run ends; its exit status. rank: of the trainer."""
    # The relay stops in order: its slots in shared memory would outlive it.
    die_with_parent(os.environ.get(PARENT), signal.SIGTERM if service == "weight-sync" else signal.SIGKILL)
    config = load(path, overrides)
    if rank:
        return serve_rank(config, service, rank)
    run = RunDir.of(config)
    name = service_name(config, service, index)
    run.create()
    with run.claim(name):
        if PARENT not in os.environ and service in ("buffer", "trainer"):
            run.set_aside_complete()
            if service == "trainer":
                keep_config(config, run)
        return run_service(build(config, service, name))


def serve_rank(config: Config, service: str, rank: int) -> int:
    """A rank of the trainer beside the leading one, on another host; again with the next where that one is lost."""
    first, ranks = first_remote(config), config.trainer.ranks
    if service != "trainer" or not first <= rank < ranks:
        known = f"{first} to {ranks - 1}" if first < ranks else f"none (trainer.ranks = {ranks}, all on one host)"
        raise UserError(f"serve {service} --rank {rank}: ranks of the trainer that are started by hand: {known}")
    for problem in rank_problems(config):
        raise ConfigError(problem)
    from async_rl.services.trainer.follower import follow

    host, _, port = config.trainer.rendezvous.rpartition(":")
    status = follow(host, int(port), rank, config, config.services.connect_s)
    if status == RankLost.exit_status:  # torch's groups cannot be made anew in the same process
        os.execv(sys.executable, [sys.executable, "-m", "async_rl.cli.main", *sys.argv[1:]])
    return status


def service_name(config: Config, service: str, index: int) -> str:
    """The name that the service has in its run: "buffer", "rollout-1"."""
    if service == "weight-sync":
        names = relay_names(config)
        if not 0 <= index < len(names):
            raise UserError(f"--index {index}: weight_sync.relays = {len(names)}, so the last one is {len(names) - 1}")
        return names[index]
    if service not in ELASTIC:
        if index:
            raise UserError(f"--index {index}: a run has one {service}")
        return service.replace("-", "_")
    if index < 0:
        raise UserError(f"--index {index}: workers are numbered from 0")
    return f"{service}-{index}"


def build(config: Config, service: str, name: str) -> Service:
    """The service object; only its own modules are imported."""
    match service:
        case "buffer":
            from async_rl.buffers.service import BufferService

            return BufferService(config, name)
        case "rollout":
            from async_rl.services.rollout.service import RolloutService

            return RolloutService(config, name)
        case "reward":
            from async_rl.services.reward.service import RewardService

            return RewardService(config, name)
        case "trainer":
            from async_rl.services.trainer.service import TrainerService

            return TrainerService(config, name)
        case "weight-sync":
            from async_rl.services.weight_sync.service import WeightSyncService

            return WeightSyncService(config, name)
    raise UserError(f"no service '{service}'")
