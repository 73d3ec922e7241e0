"""The warm-up: a small character model that solves some tasks of a run, so that rewards differ.

Supervised steps on noisy demonstrations: prompt + answer of the run's training tasks, a share
`warmup.noise` of the answers' characters replaced by another one, loss on the answer and the end token only.
The model learns the task and, faithfully, the noise: what it samples is right about as often as the
demonstrations were. Held-out tasks are never among them; the order is another than the run's (SEED_OFFSET).

The folder is cached: warmup.json in it holds a digest of the settings it was made with.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from async_rl.config.schema import Config, Warmup
from async_rl.data import TaskStream
from async_rl.errors import ConfigError, UserError
from async_rl.models.folder import replaced_folder
from async_rl.models.played import own_source, played
from async_rl.models.tiny import build_model, build_tokenizer, check_shape, missing_characters
from async_rl.trajectory import Task

if TYPE_CHECKING:
    import torch

MARK = "warmup.json"
FORMAT = 1  # of the training below; a change of it makes cached folders stale
SEED_OFFSET = 1_000_003  # added to the run's seed: the demonstrations come in another order than the run's tasks
DEMONSTRATIONS = 16_384  # at most so many different ones, each with new noise whenever it is shown
RAMP_STEPS = 20
REPORTS = 6


class Example(msgspec.Struct, frozen=True):
    prompt: list[int]
    answer: list[int]  # without the end token; of an episode all that follows its first prompt
    learned: list[bool] | None = None  # of the answer and the end token, which ones; None: all


def warmup(config: Config, *, report: Callable[[str], None]) -> Path:
    """The warmed-up model's folder, `model.path`; made now unless it was made with the same settings before.

    `report` gets a line now and then. Raises UserError where the folder is somebody else's, and ConfigError
    where the data does not suit the settings.
    """
    settings, path = config.warmup, Path(config.model.path)
    if settings is None:
        raise ConfigError("no [warmup] in this configuration: there is nothing to warm up")
    if is_current(config):
        report(f"warm-up: {path} is up to date")
        return path
    check_shape(settings)
    tokenizer = build_tokenizer(settings)
    tasks = demonstrations(config)
    if settings.demonstrate is None:
        examples = [_example(task, tokenizer) for task in tasks]
    else:
        examples = played(config, tokenizer, tasks)
    with replaced_folder(path) as fresh:
        model = _train(settings, config, tokenizer, examples, report)
        _save(model, tokenizer, config, fresh)
        (fresh / MARK).write_text(json.dumps({"digest": digest(config)}) + "\n", encoding="utf-8")
    report(f"warm-up: {path} is ready")
    return path


def is_current(config: Config) -> bool:
    """Whether `model.path` holds what `warmup` would make; UserError where the folder is somebody else's."""
    path = Path(config.model.path)
    if not path.exists():
        return False
    found = _digest_in(path)
    if found is None:
        raise UserError(
            f"model.path = '{path}' exists and was not made by the warm-up: it is left as it is; "
            "give another model.path, or take [warmup] out"
        )
    return found == digest(config)


def digest(config: Config) -> str:
    """Of everything that the warm-up's result depends on."""
    parts = [FORMAT, config.warmup, config.model.dtype, config.data, config.seed, own_source(config)]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def demonstrations(config: Config) -> list[Task]:
    """Training tasks with answers, which fit model and characters; ConfigError names what does not."""
    assert config.warmup is not None
    settings = config.warmup
    stream = TaskStream(config.data, config.seed + SEED_OFFSET)
    count = min(DEMONSTRATIONS, settings.steps * settings.batch_size, stream.length or DEMONSTRATIONS)
    tasks = [stream.task(position) for position in range(count)]
    for task in tasks:
        if task.prompt is None and not settings.template:
            raise ConfigError("[warmup] makes a model without a chat template: set data.format = 'plain'")
        if settings.demonstrate is not None:
            continue
        if task.prompt is None:
            raise ConfigError("[warmup] learns from plain prompts: set data.format = 'plain', or warmup.demonstrate")
        if not task.answer:
            raise ConfigError(f"[warmup] learns from answers: a task of '{task.source}' has none")
        length = len(task.prompt) + len(task.answer) + 1
        if length > settings.context:
            raise ConfigError(
                f"warmup.context = {settings.context}: prompt, answer and end of a task of "
                f"'{task.source}' are {length} tokens"
            )
    if settings.demonstrate is not None:
        return tasks
    missing = missing_characters(settings.characters, ((task.prompt or "") + (task.answer or "") for task in tasks))
    if missing:
        raise ConfigError(f"warmup.characters lacks {missing!r}, which the tasks contain")
    return tasks


def add_noise(answer: list[int], alphabet: np.ndarray, share: float, rng: np.random.Generator) -> list[int]:
    """`answer` with each token, with probability `share`, replaced by another one of `alphabet`."""
    if len(alphabet) < 2:
        return answer
    hit = rng.random(len(answer)) < share
    steps = rng.integers(1, len(alphabet), size=len(answer))  # never 0: another one
    places = (np.searchsorted(alphabet, answer) + steps) % len(alphabet)
    return [int(alphabet[place]) if h else token for token, h, place in zip(answer, hit, places, strict=True)]


def learning_rate(settings: Warmup, step: int) -> float:
    """Linear ramp up, then linearly down to a tenth."""
    ramp = min(1.0, (step + 1) / RAMP_STEPS)
    return settings.learning_rate * ramp * (1.0 - 0.9 * step / settings.steps)


def _example(task: Task, tokenizer: Any) -> Example:
    return Example(prompt=tokenizer.encode(task.prompt), answer=tokenizer.encode(task.answer))


def _train(
    settings: Warmup, config: Config, tokenizer: Any, examples: list[Example], report: Callable[[str], None]
) -> Any:
    import torch

    torch.set_num_threads(config.trainer.threads)
    rng = np.random.default_rng([config.seed, SEED_OFFSET])
    alphabet = np.unique(np.concatenate([example.answer for example in examples]))
    model = build_model(settings, tokenizer, config.seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    every = max(1, settings.steps // REPORTS)
    for step in range(settings.steps):
        chosen = rng.integers(len(examples), size=settings.batch_size)
        batch = [
            e if e.learned else Example(e.prompt, add_noise(e.answer, alphabet, settings.noise, rng))
            for e in (examples[i] for i in chosen)
        ]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        loss = answer_loss(model, batch, tokenizer.eos_token_id)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % every == 0:
            report(f"warm-up: step {step + 1} of {settings.steps}, loss {loss.item():.2f}")
    return model.eval()


def answer_loss(model: Any, batch: list[Example], end: int) -> "torch.Tensor":
    """Mean negative log-likelihood of the answers and their end tokens.

    The tokens that all prompts begin with run through the model once, not once for each example: a
    question's constant text costs next to nothing. The last prompt token always belongs to the rest, whose
    outputs are needed.
    """
    import torch

    shared = _shared_prefix([example.prompt[:-1] for example in batch])
    rests = [[*e.prompt[shared:], *e.answer, end] for e in batch]
    width = max(map(len, rests))
    ids = torch.full((len(batch), width), end)
    labels = torch.full((len(batch), width), -100)
    for row, (example, rest) in enumerate(zip(batch, rests, strict=True)):
        ids[row, : len(rest)] = torch.tensor(rest)
        begin = len(example.prompt) - shared
        labels[row, begin : len(rest)] = torch.tensor(rest[begin:])
        if example.learned is not None:
            labels[row, begin : len(rest)][~torch.tensor(example.learned)] = -100
    cache = None
    if shared:
        cache = model(input_ids=torch.tensor([batch[0].prompt[:shared]]), use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(batch))
    # Padding stands on the right: no token that counts can see it, so no mask is needed.
    logits = model(input_ids=ids[:, :-1], cache=cache, use_cache=cache is not None).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def _shared_prefix(rows: list[list[int]]) -> int:
    """Length of the longest beginning that all rows have in common."""
    first, last = min(rows), max(rows)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _save(model: Any, tokenizer: Any, config: Config, folder: Path) -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.to(getattr(torch, config.model.dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _digest_in(path: Path) -> str | None:
    """The digest in the folder's mark; None where the warm-up did not make this folder."""
    try:
        mark = json.loads((path / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(mark.get("digest")) if isinstance(mark, dict) else None
