"""What a person sees of a run: one live line, and the table at the end."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from async_rl.actor.remote import Remote
from async_rl.config.schema import Config
from async_rl.errors import AsyncRLError, UserError
from async_rl.protocol.buffer import BufferReply, BufferReport, BufferRequest, GetBuffer
from async_rl.protocol.control import ControlReply, ControlRequest, GetStatus, ServiceStatus
from async_rl.rundir import RunDir

SUMMARY_FORMAT = 1
TICK_S = 1.0

Figures = dict[str, float | int | str]


class LiveLine:
    """Asks the trainer and the buffer every second, and says so on one line.

    On a terminal the line is rewritten in place; elsewhere a line is printed when the step has changed.
    """

    def __init__(self, config: Config, run: RunDir, console: Console, *, quiet: bool = False) -> None:
        self._config = config
        self._run = run
        self._console = console
        self._quiet = quiet
        self._printed = -1
        self._concern = ""
        self._rates = Rates()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    async def show(self) -> None:
        times = self._config.services
        common: dict[str, Any] = {
            "sender": "train",
            "connect_s": times.connect_s,
            "ask_s": times.ask_s,
            "heartbeat_s": times.heartbeat_s,
        }
        trainer_at, buffer_at = (lambda: self._run.address("trainer")), (lambda: self._run.address("buffer"))
        status = (
            self._console.status("starting", spinner="dots") if self._console.is_terminal and not self._quiet else None
        )
        async with (
            Remote("trainer", trainer_at, ControlRequest, ControlReply, **common) as trainer,
            Remote("buffer", buffer_at, BufferRequest, BufferReply, **common) as buffer,
        ):
            if status:
                status.start()
            try:
                while True:
                    await asyncio.sleep(TICK_S)
                    try:
                        state = await trainer.ask(GetStatus())
                        report = await buffer.ask(GetBuffer())
                    except AsyncRLError:
                        continue  # a service that starts, restarts or ends; the supervisor judges that
                    self._update(state, report, status)
            finally:
                if status:
                    status.stop()

    def _update(self, state: ServiceStatus, report: BufferReport, status: Any) -> None:
        if self._quiet:
            return
        text = live_text(self._config.max_steps, state, self._rates.update(time.monotonic(), report))
        step = int(state.detail.get("step", 0))
        concern = str(state.detail.get("concern", ""))
        if concern and concern != self._concern:
            self._concern = concern
            self.say(f"warning: {concern}")
        if status is not None:
            status.update(text)
        elif step != self._printed:
            self._printed = step
            self.say(text)


class Rates:
    """Generated tokens per second and the rollouts' idle share, over the time since the last update."""

    def __init__(self) -> None:
        self._last: tuple[float, int, float, float] | None = None

    def update(self, now: float, report: BufferReport) -> tuple[float, float]:
        """(tokens/s, idle share) of all rollout workers together; (0, 0) at the first call."""
        workers = [stats for name, stats in report.workers.items() if name.startswith("rollout")]
        sums = (
            now,
            sum(w.tokens for w in workers),
            sum(w.up_s for w in workers),
            sum(w.busy_s for w in workers),
        )
        last, self._last = self._last, sums
        if last is None or now <= last[0] or sums[2] <= last[2]:
            return 0.0, 0.0
        idle = 1 - (sums[3] - last[3]) / (sums[2] - last[2])
        return (sums[1] - last[1]) / (now - last[0]), min(max(idle, 0.0), 1.0)


def live_text(max_steps: int, state: ServiceStatus, rates: tuple[float, float]) -> str:
    """`step 7/12 | reward 0.53 | held-out 0.61 | v7 | lag 0.9 (max 2) | ...`; what is not known yet is left out."""
    known: Figures = state.detail
    parts = [f"step {known.get('step', 0)}/{max_steps}"]
    for key, text in (("reward", "reward {:.3f}"), ("held_out", "held-out {:.3f}")):
        if key in known:
            parts.append(text.format(known[key]))
    parts.append(f"v{max(state.version, 0)}")
    if "lag_mean" in known:
        parts.append(f"lag {known['lag_mean']:.2f} (max {known['lag_max']:.0f})")
    parts.append(f"tokens/s {rates[0]:,.0f} generated, {known.get('trained_tokens_per_s', 0):,.0f} trained")
    parts.append(f"idle trainer {known.get('idle_share', 0):.0%}, rollouts {rates[1]:.0%}")
    if "mismatch_kl" in known:
        parts.append(f"mismatch KL {known['mismatch_kl']:.2e}")
    return " | ".join(parts)


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a run that has ended."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the run has not ended") from None
    except ValueError as error:
        raise UserError(f"{path}: not a summary: {error}") from None
    if not isinstance(summary, dict) or summary.get("format") != SUMMARY_FORMAT:
        raise UserError(f"{path}: not a summary of format {SUMMARY_FORMAT}")
    return summary


def summary_table(rows: list[tuple[str, str]], title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def summary_rows(summary: dict[str, Any], restarts: dict[str, int]) -> list[tuple[str, str]]:
    """(what, figure) for the table at the end; a figure that nothing gave is "unknown"."""
    held_out, groups = summary["held_out"], summary["groups"] or {}
    rows = [
        ("held-out score", f"{_figure(held_out['before'], '.3f')} -> {_figure(held_out['after'], '.3f')}"),
        (
            "held-out curve",
            ", ".join(f"v{version} {score:.3f}" for version, score in held_out["curve"]) or "none",
        ),
        ("reward", f"{_figure(summary['reward_first'], '.3f')} -> {_figure(summary['reward_last'], '.3f')}"),
        ("steps", f"{summary['steps']} ({summary['ended']}), mode {summary['mode']}, eta {summary['eta']}"),
        ("groups", conservation_line(groups)),
        ("tokens generated", _rate(summary["tokens_generated"], summary["tokens_generated_per_s"])),
        ("tokens trained", _rate(summary["tokens_trained"], summary["tokens_trained_per_s"])),
        (
            "idle",
            f"trainer {_figure(summary['idle_trainer'], '.0%')}, rollouts {_figure(summary['idle_rollout'], '.0%')}",
        ),
        ("lag of trained tokens", lag_line(summary["lag_histogram"])),
        ("mismatch KL (k3)", _figure(summary["mismatch_kl_k3"], ".2e")),
        *episode_rows(summary),
        ("skipped updates", str(summary["skipped_updates"])),
        ("failed publications", str(summary["failed_publications"])),
        ("restarts", ", ".join(f"{name} {count}" for name, count in sorted(restarts.items())) or "none"),
        ("wall-clock", f"{summary['wall_s']:.1f} s"),
        ("checkpoint", summary["checkpoint"] or "none"),
    ]
    return rows


def episode_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """`turns 2.1, tool calls 1,234 (error 3, ok 1,231)`, where there were any."""
    tools, turns = summary["tools"], summary["turns_mean"]
    if not tools and turns <= 1:
        return []
    return [("episodes", f"turns {turns:.1f}, tool calls {_by_reason(tools)}")]


def conservation_line(groups: dict[str, Any]) -> str:
    """`admitted 180 = trained 160 + dropped 3 (stale 3) + failed 0 + held 17`."""
    if not groups:
        return "unknown"
    dropped, failed = groups["dropped"], groups["failed"]
    sign = "=" if groups["conserved"] else "IS NOT"
    return (
        f"admitted {groups['admitted']} {sign} trained {groups['trained']} + dropped {_by_reason(dropped)}"
        f" + failed {_by_reason(failed)} + held {groups['held']}"
    )


def lag_line(histogram: dict[str, int]) -> str:
    """`0: 62%, 1: 30%, 2: 8% (largest 2)`."""
    total = sum(histogram.values())
    if not total:
        return "no token trained"
    lags = sorted((int(lag), count) for lag, count in histogram.items())
    return ", ".join(f"{lag}: {count / total:.0%}" for lag, count in lags) + f" (largest {lags[-1][0]})"


def _by_reason(counts: dict[str, int]) -> str:
    total = sum(counts.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
    return f"{total} ({reasons})" if total else "0"


def _figure(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _rate(total: int | None, per_s: float | None) -> str:
    return "unknown" if total is None or per_s is None else f"{total:,} ({per_s:,.0f}/s)"
