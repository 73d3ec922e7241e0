"""`async-rl`: parses the command line, loads the configuration, turns errors into one line each.

Exit status: 0 done; 2 something the user can mend; 1 any other failure; 130 interrupted.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from async_rl.errors import AsyncRLError, Interrupted, UserError
from async_rl.version import __version__

SERVICES = ("buffer", "rollout", "reward", "trainer", "weight-sync")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except AsyncRLError as error:
        text = str(error) if isinstance(error, Interrupted) else f"error: {error}"
        print(f"async-rl: {text}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("async-rl: interrupted", file=sys.stderr)
        return 130


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; overrides may stand before and behind them."""
    options, rest = parser().parse_known_args(arguments)
    strange = [word for word in rest if word.startswith("-") or not ("=" in word or word.endswith(".toml"))]
    if strange:
        parser().error(f"unrecognized arguments: {' '.join(strange)}")
    options.overrides = [*options.overrides, *rest]
    return options


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="async-rl", description="Asynchronous reinforcement learning for language models."
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = _on_run(commands, "train", "start every service of a run here, supervised", _train)
    train.add_argument("--resume", action="store_true", help="go on with the run of this name; default: begin anew")
    train.add_argument("--quiet", action="store_true", help="no live line, only the table at the end")

    serve = commands.add_parser("serve", help="one service of a run")
    serve.add_argument("service", choices=SERVICES)
    _run_arguments(serve)
    serve.add_argument("--index", type=int, default=0, help="which of several services of its kind this is, from 0")
    serve.add_argument("--rank", type=int, default=0, help="of a trainer over several hosts: which one this is, from 0")
    serve.set_defaults(command=_serve)

    _on_run(commands, "check", "validate a configuration without starting anything", _check)
    _on_run(commands, "warmup", "prepare the model of a run: supervised warm-up or conversion, cached", _warmup)

    evaluate = _on_run(commands, "eval", "score a checkpoint on the held-out data", _eval)
    evaluate.add_argument("--checkpoint", help="a model folder; default: model.path of the run")
    evaluate.add_argument("--samples", type=int, default=1, help="samples per task, for pass@k (default 1)")
    evaluate.add_argument("--temperature", type=float, default=None, help="0: greedy (default with one sample)")

    replay = commands.add_parser("replay", help="train again from a run's journal, without generating")
    _run_arguments(replay, "RUN")
    replay.add_argument("--steps", type=int, help="at most so many; default: all that were made")
    replay.add_argument("--out", metavar="DIR", help="default: replay/N/ in the run's folder")
    replay.set_defaults(command=_replay)

    export = commands.add_parser("export", help="a model folder for others: adapters are merged into their base")
    export.add_argument("source", metavar="CHECKPOINT_OR_RUN", help="of a run: its newest checkpoint")
    export.add_argument("out", metavar="OUT")
    export.set_defaults(command=_export, overrides=[])

    buffer = commands.add_parser("buffer", help="what is in the buffer of a run, live or dead; changes nothing")
    buffer.add_argument("run", metavar="RUN")
    buffer.add_argument("--group", type=int, metavar="N", help="the history of one group, and its members")
    buffer.add_argument("--member", type=int, metavar="M", help="of that group: its trajectory, token by token")
    buffer.set_defaults(command=_buffer, overrides=[])
    return top


def _on_run(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    command: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text)
    _run_arguments(parser)
    parser.set_defaults(command=command)
    return parser


def _run_arguments(parser: argparse.ArgumentParser, run: str = "RUN.toml") -> None:
    parser.add_argument("run", metavar=run)
    parser.add_argument(
        "overrides", metavar="key.sub=value", nargs="*", help="settings over those of the file, or files laid over it"
    )


def _train(options: argparse.Namespace) -> int:
    from async_rl.cli.train import train

    return train(options.run, options.overrides, quiet=options.quiet, go_on=options.resume)


def _serve(options: argparse.Namespace) -> int:
    from async_rl.cli.serve import serve

    return serve(options.service, options.run, options.overrides, index=options.index, rank=options.rank)


def _check(options: argparse.Namespace) -> int:
    from async_rl.cli.check import check

    return check(options.run, options.overrides)


def _warmup(options: argparse.Namespace) -> int:
    from async_rl.cli.warmup import warmup

    return warmup(options.run, options.overrides)


def _eval(options: argparse.Namespace) -> int:
    from async_rl.cli.evaluate import evaluate

    return evaluate(
        options.run,
        options.overrides,
        checkpoint=options.checkpoint,
        samples=options.samples,
        temperature=options.temperature,
    )


def _replay(options: argparse.Namespace) -> int:
    from async_rl.cli.replay import replay

    return replay(options.run, options.overrides, steps=options.steps, out=options.out)


def _export(options: argparse.Namespace) -> int:
    from async_rl.cli.export import export

    if options.overrides:
        raise UserError(f"'{options.overrides[0]}': `export` takes no settings")
    return export(options.source, options.out)


def _buffer(options: argparse.Namespace) -> int:
    from async_rl.cli.buffer import buffer

    if options.overrides:
        raise UserError(f"'{options.overrides[0]}': `buffer` takes no settings")
    return buffer(options.run, group=options.group, member=options.member)


if __name__ == "__main__":
    sys.exit(main())
