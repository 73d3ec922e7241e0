"""Whether staleness costs reward: the same recipe in sync, one-step and async, over several seeds.

    python benchmarks/parity.py recipes/agents/calculator.toml [--seeds 0 1 2] [key.sub=value ...]

All begin with the same model, which is made first where the recipe makes one. The last line printed is one JSON object:
held-out reward after the run, of each seed, and its mean and standard deviation; `gap` is async's mean less sync's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config import Config, load
from async_rl.config.dump import to_toml

MODES: dict[str, list[str]] = {
    "sync": ["mode=sync"],
    "one-step": ["mode=one-step"],
    "async eta 2": ["mode=async", "staleness.max=2"],
    "async eta 8": ["mode=async", "staleness.max=8"],
}


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "async_rl.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL)


def measure(config: Config, mode: str, seed: int, folder: Path) -> dict[str, Any]:
    name = f"parity-{config.name}-{mode.replace(' ', '-')}-{seed}"
    file = folder / f"{name}.toml"
    file.write_text(to_toml(msgspec.structs.replace(config, warmup=None, name=name, seed=seed)))
    run("train", str(file), *MODES[mode])
    summary: dict[str, Any] = json.loads(Path("runs", name, "summary.json").read_text())
    return {
        "held_out": round(summary["held_out"]["after"], 4),
        "largest_lag": summary["largest_lag_trained"],
        "wall_s": round(summary["wall_s"], 1),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("recipe")
    options.add_argument("overrides", nargs="*")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = options.parse_args()
    config = load(given.recipe, given.overrides)
    if config.warmup is not None:
        run("warmup", given.recipe, *given.overrides)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            runs = [measure(config, mode, seed, Path(folder)) for seed in given.seeds]
            after = [one["held_out"] for one in runs]
            results[mode] = {
                "mean": round(statistics.mean(after), 4),
                "spread": round(statistics.stdev(after), 4) if len(after) > 1 else None,
                "runs": runs,
            }
            print(f"{mode:12} {results[mode]}", flush=True)
    gap = round(results["async eta 2"]["mean"] - results["sync"]["mean"], 4)
    print(json.dumps({"benchmark": "parity", "recipe": given.recipe, "modes": results, "gap": gap}))


if __name__ == "__main__":
    main()
