"""The same work in sync, one-step and async mode: held-out score, wall-clock, lag, idle shares of each.

    python benchmarks/modes.py recipes/quickstart.toml [key.sub=value ...]

Every mode runs `async-rl train` on the recipe with the same seed, one after the other, and nothing else beside
it. The last line printed is one JSON object; `speedup` is sync's wall-clock over the mode's, from the first
draw to the end of the last step.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MODES = {
    "sync": ["mode=sync"],
    "one-step": ["mode=one-step"],
    "async": ["mode=async", "staleness.max=2", "staleness.on_exceed=mask"],
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("recipe")
    options.add_argument("overrides", nargs="*")
    given = options.parse_args()
    results = {mode: measure(given.recipe, mode, settings + given.overrides) for mode, settings in MODES.items()}
    for result in results.values():
        result["speedup"] = round(results["sync"]["train_wall_s"] / result["train_wall_s"], 3)
        print({key: result[key] for key in ("held_out_before", "held_out_after", "train_wall_s", "speedup")})
    print(json.dumps({"benchmark": "modes", "recipe": given.recipe, "modes": results}))


def measure(recipe: str, mode: str, settings: list[str]) -> dict[str, Any]:
    name = f"bench-{Path(recipe).stem}-{mode}"
    command = [sys.executable, "-m", "async_rl.cli.main", "train", recipe, f"name={name}", *settings]
    subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads(Path("runs", name, "summary.json").read_text())
    steps = [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]
    records = [line for line in steps if line["kind"] == "step"]
    first = records[0]["wall_s"] - records[0]["draw_wait_s"] - records[0]["train_s"]
    return {
        "held_out_before": summary["held_out"]["before"],
        "held_out_after": summary["held_out"]["after"],
        "train_wall_s": round(records[-1]["wall_s"] - first, 2),
        "largest_lag": summary["largest_lag_trained"],
        "idle_trainer": summary["idle_trainer"],
        "idle_rollouts": summary["idle_rollout"],
        "mismatch_kl": summary["mismatch_kl_k3"],
    }


if __name__ == "__main__":
    main()
