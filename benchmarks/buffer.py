"""How many samples a second go through the buffer, and how that compares with what others use for it.

    make bench-buffer       # in an environment of its own, .venv-bench: Ray and TransferQueue bring many packages
    python benchmarks/buffer.py [--sections throughput,workers,memory] [--quick] [--folder DIR]

throughput   the same trajectories of about 20 KB are put by one process and then got by another: through our
             buffer with its journal on and off, TransferQueue (SimpleStorage, the fastest backend that runs
             without further services), ray.util.queue.Queue, Ray's object store, and bare ZeroMQ PUSH/PULL with
             our encoding. They are put one a call with 32 calls under way; in batches of 8, one call after
             another and 8 under way; in batches of 128, one call after another and 2 under way. They are got
             128 a call, a step's; by `ray_queue_single` one a call too, 32 calls under way. Rounds of all of
             them take turns; the figures are medians. `put` lasts until the last call is answered (ours with the
             journal: until it is durable), `get` until the consumer holds the last sample; `put_get` is both,
             and what the ratios compare. Ours is leased before and scored between the two, which no other
             does: `life` is lease, put, score and get together.
             `buffer_cpu_us`: CPU of the buffer's process, of all its threads, for a sample that is put.
workers      1,000 scripted rollout workers on one buffer against ten, on the same groups; `ratio` is the median
             of that of each round, since the machine's pace changes between them.
memory       resident memory of the buffer's process over 100,000 groups.

The last line printed is one JSON object. Packages that are not installed are named in it and left out.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from buffer_others import installed
from buffer_ours import remembered, through, worked

from async_rl.config.schema import Journal

GRANULARITIES = ((1, 32), (8, 1), (8, 8), (128, 1), (128, 2))  # samples of a call, calls under way
SLOW = ("transfer_queue", "ray_queue", "ray_queue_single")  # at one sample a call a quarter of the samples is enough
SMALL = {"journal/transfer_queue": 5.0, "journal/ray_queue": 5.0, "no_journal/zeromq": 0.5}
GOALS = {1: SMALL, 8: SMALL, 128: {"journal/transfer_queue": 1.0, "no_journal/zeromq": 0.5}}  # of the ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="throughput,workers,memory")
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that it works")
    parser.add_argument("--folder", default=".", help="where the journals are written, in a folder that is deleted")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-buffer-", dir=given.folder))
    try:
        sections = {name: SECTIONS[name](folder, given.quick) for name in given.sections.split(",")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"benchmark": "buffer", "quick": given.quick, **sections}))


def throughput(folder: Path, quick: bool) -> dict[str, Any]:
    samples, rounds = (256, 1) if quick else (2048, 5)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with installed() as (others, missing):
        systems = {
            **others,
            "ours": partial(through, folder, journal=Journal()),
            "ours_no_journal": partial(through, folder, journal=Journal(enabled=False)),
        }
        for number in range(rounds):
            for per_call, under_way in GRANULARITIES:
                granularity = f"{per_call}x{under_way}"
                for name, system in systems.items():
                    if name == "ray_queue_single" and per_call > 1:
                        continue
                    few = max(128, samples // 4) if per_call == 1 and name in SLOW else samples
                    rates = _rates(few, system(few, per_call, under_way))
                    found.setdefault(granularity, {}).setdefault(name, []).append(rates)
                    print(f"round {number}, {granularity}, {name}: {_shown(rates)}", flush=True)
    figures = {granularity: {name: _medians(of) for name, of in rates.items()} for granularity, rates in found.items()}
    ratios = {granularity: _ratios(rates) for granularity, rates in figures.items()}
    return {
        "samples_per_s": figures,
        "ratios": ratios,
        "missed": [missed for granularity, found in ratios.items() for missed in _missed(granularity, found)],
        "disk_mb_per_s": disk(folder),
        "not_installed": missing,
    }


def _rates(samples: int, seconds: dict[str, float]) -> dict[str, float]:
    """Samples a second of each part and of what they make together."""
    seconds = dict(seconds)
    cpu = seconds.pop("buffer_cpu", None)
    rates = {part: samples / s for part, s in seconds.items() if s}
    rates["put_get"] = samples / (seconds["put"] + seconds["get"])
    rates["life"] = samples / sum(seconds.values())
    return rates if cpu is None else rates | {"buffer_cpu_us": cpu / samples * 1e6}


def _ratios(rates: dict[str, dict[str, float]]) -> dict[str, float]:
    """Ours over each of the others, by `put_get`; of ours with the journal on, by its whole `life` too. Bare
    ZeroMQ takes one way and ours two: each of them alone is compared with it as well."""
    ratios: dict[str, float] = {}
    for name in [name for name in rates if not name.startswith("ours")]:
        theirs = rates[name]["put_get"]
        ratios[f"journal/{name}"] = rates["ours"]["put_get"] / theirs
        ratios[f"life/{name}"] = rates["ours"]["life"] / theirs
        ratios[f"no_journal/{name}"] = rates["ours_no_journal"]["put_get"] / theirs
    for part in ("put", "get"):
        ratios[f"no_journal_{part}/zeromq"] = rates["ours_no_journal"][part] / rates["zeromq"]["get"]
    return {name: round(ratio, 2) for name, ratio in ratios.items()}


def _missed(granularity: str, ratios: dict[str, float]) -> list[str]:
    """The goals that are not reached, each with what is."""
    goals = GOALS[int(granularity.partition("x")[0])]
    return [
        f"{granularity} {name}: {ratios[name]} of {goal}"
        for name, goal in goals.items()
        if ratios.get(name, goal) < goal
    ]


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {part: round(statistics.median(one[part] for one in found), 1) for part in found[0]}


def _shown(rates: dict[str, float]) -> str:
    return ", ".join(f"{part} {rate:,.0f}" for part, rate in rates.items())


def disk(folder: Path, mebibytes: int = 64) -> float:
    """Sequential writes of 1 MiB, each made durable."""
    block, began = os.urandom(2**20), time.perf_counter()
    file = os.open(folder / "disk", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in range(mebibytes):
        os.write(file, block)
        os.fdatasync(file)
    os.close(file)
    return round(mebibytes * 2**20 / 1e6 / (time.perf_counter() - began), 1)


def workers(folder: Path, quick: bool) -> dict[str, Any]:
    few, many, groups, rounds = (2, 20, 512, 1) if quick else (10, 1000, 8192, 5)
    found: dict[int, list[dict[str, float]]] = {few: [], many: []}
    for _ in range(rounds):
        for count, rates in found.items():
            rates.append(worked(folder, count, groups))
            print(f"{count} workers: {_shown(rates[-1])}", flush=True)
    pairs = zip(found[many], found[few], strict=True)
    ratios = [round(one["groups_per_s"] / other["groups_per_s"], 3) for one, other in pairs]
    medians = {count: _medians(rates) for count, rates in found.items()}
    return {"workers": medians, "ratio": statistics.median(ratios), "ratios": ratios}


def memory(folder: Path, quick: bool) -> dict[str, Any]:
    groups = 2000 if quick else 100_000
    resident, on_disk = remembered(folder, groups)
    print(f"resident MiB after each tenth of {groups} groups: {resident}", flush=True)
    growth = round(resident[-1] / resident[0], 3)
    return {"groups": groups, "resident_mb": resident, "growth": growth, "journal_mb": round(on_disk, 1)}


SECTIONS = {"throughput": throughput, "workers": workers, "memory": memory}

if __name__ == "__main__":
    main()
