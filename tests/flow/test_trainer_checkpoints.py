"""A checkpoint of some ranks goes on on others, in the same place."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow.test_trainer_ranks import finish

RANK = """
import json, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[5])
import msgspec, torch
torch.set_num_threads(1)
from trainer_material import configuration, random_samples
from async_rl.models.load import load_tokenizer
from async_rl.services.trainer import lora
from async_rl.services.trainer.checkpoint import Checkpoints
from async_rl.services.trainer.objective import Objective
from async_rl.services.trainer.ranks import join
from async_rl.services.trainer.roles import Roles
from async_rl.services.trainer.trained import full, weights_checksum

# in float64, so that the order of sums does not matter
real = lora.load_policy
lora.load_policy = lambda model, device: real(msgspec.structs.replace(model, dtype="float64"), device=device)

rank, size, folder, asked = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[6])
trainer = {"learning_rate": 0.01, "ranks": size, "micro_batch_tokens": 24, **asked["trainer"]}
config = configuration(model={"path": str(folder / "model")}, trainer=trainer)
ranks = join(config.trainer, rank, torch.distributed.FileStore(sys.argv[4], size))
checkpoints = Checkpoints(folder / "checkpoints", 5, ranks)
resumed = checkpoints.resume(config, config.model)
roles = Roles.load(config, config.model, ranks) if resumed is None else resumed.roles
tokenizer = load_tokenizer(config.model) if resumed is None else resumed.tokenizer
version = begun = 0 if resumed is None else resumed.state.version
while version < asked["until"]:
    roles.policy.update(random_samples(5, version), Objective.of(config))
    version += 1
    if version in asked["save"]:
        checkpoints.save(roles, tokenizer, config, version)
if asked.get("kill") == rank:
    import os
    os.kill(os.getpid(), signal.SIGKILL)
try:
    checkpoints.finish()
except Exception as error:
    print(json.dumps({"error": str(error)}))
    raise SystemExit(1)
print(json.dumps({
    "begun": begun,
    "checksum": weights_checksum(roles.policy.model),
    "rate": roles.policy.progress.updates,
    "weights": [float(full(p.detach()).abs().sum()) for p in roles.policy.model.parameters()],
    "moments": [float(full(v).abs().sum()) for _, v in sorted(roles.policy.optimizer_tensors().items())],
}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from async_rl.config.schema import Warmup
    from async_rl.models.tiny import build_model, build_tokenizer

    settings, folder = Warmup(characters="abcdefghi", hidden_size=16, layers=2, heads=4), tmp_path_factory.mktemp("m")
    tokenizer = build_tokenizer(settings)
    build_model(settings, tokenizer, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """With the model alone."""
    return Path(shutil.copytree(model, tmp_path / "run"))


def start(folder, size, **asked):
    store = folder / f"store-{len(list(folder.iterdir()))}"
    unit = Path(__file__).parent.parent / "unit"
    asked = {"trainer": {}, "save": [], **asked}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size), str(folder), str(store), str(unit), json.dumps(asked)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]


def together(folder, size, **asked):
    return finish(start(folder, size, **asked))


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory):
    """Four updates by one process that never stopped."""
    (found,) = together(Path(shutil.copytree(model, tmp_path_factory.mktemp("straight") / "run")), 1, until=4)
    return found


@pytest.mark.parametrize(
    ("sizes", "trainer"),
    [((4, 2), {}), ((1, 2), {}), ((4, 1), {"tensor_parallel": 2})],
)
def test_it_goes_on_as_if_nothing_had_been(folder, straight, sizes, trainer):
    before, after = sizes
    saved = together(folder, before, until=2, save=[1, 2], trainer=trainer)
    found = together(folder, after, until=4)
    assert {one["begun"] for one in found} == {2}
    assert len({one["checksum"] for one in found}) == 1
    assert saved[0]["checksum"] != found[0]["checksum"]
    for figure in ("rate", "weights", "moments"):
        assert found[0][figure] == pytest.approx(straight[figure], abs=1e-9), figure


def test_on_as_many_ranks_it_goes_on_bit_for_bit(folder, tmp_path):
    apart = Path(shutil.copytree(folder, tmp_path / "apart"))
    together(folder, 2, until=2, save=[2])
    again, never = together(folder, 2, until=4), together(apart, 2, until=4)
    assert again[0]["begun"] == 2 and again[0]["checksum"] == never[0]["checksum"]


def test_damage_is_seen_by_all_ranks_which_take_the_one_before(folder):
    together(folder, 2, until=2, save=[1, 2])
    path = folder / "checkpoints" / "step-00000002" / "trainer" / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = together(folder, 2, until=2)
    assert [one["begun"] for one in found] == [1, 1]
    assert (folder / "checkpoints" / "damaged-step-00000002").is_dir()


def test_a_rank_that_is_killed_while_all_write_leaves_the_one_before(folder):
    ranks = start(folder, 2, until=3, save=[2, 3], kill=1)
    first, _ = (process.communicate(timeout=90)[0] for process in ranks)
    assert ranks[1].returncode == -signal.SIGKILL
    names = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert "step-00000002" in names
    if "step-00000003" not in names:  # else it was killed too late
        assert "exchange between the ranks failed" in json.loads(first)["error"]
    (found,) = together(folder, 1, until=3)
    assert found["begun"] == (3 if "step-00000003" in names else 2)
