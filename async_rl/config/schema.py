"""One TOML file describes a run. Each struct is one table of it; the docs are made from these docstrings.

Importing this module pulls in neither torch nor any engine.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from async_rl.config.algorithms import Algorithm
from async_rl.config.base import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Seconds, Table

Mode = Literal["sync", "one-step", "async", "off-policy"]
OnExceed = Literal["wait", "drop", "mask", "correct"]
Dtype = Literal["float32", "bfloat16", "float16"]


# --- model -------------------------------------------------------------------------------------------


class LoRA(Table, frozen=True):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) beside weights that stay as they are: the adapters alone
    are trained, saved and published."""

    rank: Positive = 16
    alpha: PositiveFloat = 32.0  # the adapter's product is weighed by alpha / rank
    targets: list[str] = []  # last part of the names of the linear layers; empty: all but the head


class Model(Table, frozen=True):
    """The policy: a folder that transformers loads (config, safetensors, tokenizer), or a .gguf file."""

    path: str
    from_package: str | None = None  # made on first use from the only .gguf file this installed package ships
    dtype: Dtype = "float32"  # that it computes in, and is published in
    lora: LoRA | None = None  # None: all weights are trained


class Warmup(Table, frozen=True):
    """`async-rl warmup`: builds a small model with a character tokenizer at `model.path` and trains it by
    supervised steps on noisy demonstrations, so that reinforcement learning has something to reinforce."""

    characters: str
    architecture: Literal["llama", "qwen3_moe"] = "llama"
    experts: Positive = 8  # in each layer of a qwen3_moe
    experts_per_token: Positive = 2
    hidden_size: Positive = 128
    layers: Positive = 3
    heads: Positive = 4
    context: Positive = 128
    steps: Positive = 600
    batch_size: Positive = 64
    learning_rate: PositiveFloat = 2e-3
    noise: Fraction = 0.25  # share of the answers' characters replaced by another one
    words: list[str] = []  # texts of several characters that are one token each
    template: str = ""  # chat template; empty: the model reads plain prompts
    demonstrate: str | None = None  # `module:function` that plays episodes, for tasks of several turns


# --- data --------------------------------------------------------------------------------------------


class ReasoningGym(Table, frozen=True, tag_field="kind", tag="reasoning_gym"):
    """Tasks of the reasoning-gym package, made from (name, seed)."""

    name: str
    seed: NonNegative = 0
    size: Positive = 10_000
    weight: PositiveFloat = 1.0
    config: dict[str, Any] = {}
    suffix: str = ""  # appended to every question


class JsonLines(Table, frozen=True, tag_field="kind", tag="jsonl"):
    """One JSON object a line: `prompt` or `messages`, `answer`, any further key becomes metadata."""

    path: str
    weight: PositiveFloat = 1.0
    name: str = ""  # in metrics; the file's stem by default
    prompt_key: str = "prompt"
    messages_key: str = "messages"
    answer_key: str = "answer"
    suffix: str = ""


class HFDataset(Table, frozen=True, tag_field="kind", tag="datasets"):
    """A Hugging Face data set on disk (`Dataset.save_to_disk`, or a folder of parquet files)."""

    path: str
    split: str = "train"
    weight: PositiveFloat = 1.0
    name: str = ""
    prompt_key: str = "prompt"
    messages_key: str = "messages"
    answer_key: str = "answer"
    suffix: str = ""


Source = ReasoningGym | JsonLines | HFDataset


class Data(Table, frozen=True):
    """Training sources are mixed by weight. `format` says how a prompt that is plain text reaches the model."""

    train: list[Source]
    held_out: list[Source] = []
    held_out_size: Positive = 256  # first so many tasks of the held-out sources
    format: Literal["chat", "plain"] = "chat"  # chat: one user message through the chat template
    template: str = "{prompt}"  # text around a plain prompt
    system: str = ""  # system message in front of a chat
    shuffle: bool = True
    epochs: Positive | None = None  # None: begin again until max_steps
    at_end: Literal["smaller_step", "drop"] = "smaller_step"  # what a last incomplete batch becomes


# --- the step ----------------------------------------------------------------------------------------


class Batch(Table, frozen=True):
    """One step draws `groups` groups of `group_size` trajectories each and makes
    `mini_batches` x `epochs` optimizer updates with them."""

    groups: Positive = 16
    group_size: Positive = 8
    mini_batches: Positive = 1
    epochs: Positive = 1
    min_valid: Positive | None = None  # voting members a group needs; None: max(2, half of the group)


class Filter(Table, frozen=True):
    """Which scored groups are worth a place in a step. One that is dropped makes room for another task's."""

    equal: bool = False  # drop groups whose votes are all equal: they carry no gradient (DAPO, Yu et al. 2025)
    min_mean: float | None = None  # drop groups whose mean reward is below it: too hard
    max_mean: float | None = None  # drop groups whose mean reward is above it: too easy
    component: str | None = None  # judged by this component of the score, where it has it; None: by the reward
    max_in_row: Positive | None = None  # dropped in a row that end the run; None: ten batches


class Staleness(Table, frozen=True):
    """The bound on the lag of every token that enters the loss. None: what the mode presets."""

    max: NonNegative | None = None  # eta
    on_exceed: OnExceed | None = None
    hard_max: NonNegative | None = None  # bound under `correct`, required there
    reuse: Positive | None = None  # consecutive steps that train one draw; above 1 only off-policy
    keep_cache: bool = False  # keep the KV cache over an in-flight update


class Sampling(Table, frozen=True):
    """Distribution that trajectories are sampled from; log-probabilities are of log_softmax(z / temperature)."""

    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0  # 0: the whole vocabulary
    max_new_tokens: Positive = 256


class Trainer(Table, frozen=True):
    learning_rate: PositiveFloat = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0  # counted in optimizer updates
    min_learning_rate: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0
    micro_batch_tokens: Positive = 4096  # packed tokens of one forward pass
    logits_bytes: Positive = 256 * 2**20  # float32 logits that stand at once; more are made in parts, twice
    max_nonfinite: Positive = 3  # skipped updates in a row that end the run
    checkpoint_every: NonNegative = 0  # steps; 0: only the last
    keep_checkpoints: Positive = 2
    checkpoint_s: Seconds = 1800.0  # until a checkpoint, which is written while training goes on, must be whole
    router_replay: bool = False  # a mixture of experts is trained through the experts that the sampler chose
    dtype: Dtype | None = None  # of what the optimizer updates; None: model.dtype, which it computes in
    recompute: bool = False  # activations are made again in the backward pass: less memory, a third more work
    offload: bool = False  # weights and optimizer in the host's memory, on the device for their layer's turn alone
    ranks: Positive = 1  # processes that share the weights and the batch (FSDP2)
    sequence_parallel: Positive = 1  # ranks that share each sequence, each with a part of the heads (Ulysses)
    tensor_parallel: Positive = 1  # ranks that share each matrix of a layer, by the plan of transformers
    local_ranks: Positive | None = None  # the first so many, started here; others: `serve trainer --rank`. None: all
    rendezvous: str = ""  # host:port where the ranks meet; empty: a free port of this host
    collective_s: Seconds = 120.0  # until all ranks must have come to an exchange
    threads: Positive = 1  # of each rank
    device: str = "cpu"
    draw_wait_s: Seconds = 600.0  # a step without a batch for so long ends the run


# --- rollout -----------------------------------------------------------------------------------------


class TransformersEngine(Table, frozen=True, tag_field="kind", tag="transformers"):
    """Continuous batching by Hugging Face transformers, on any device."""

    max_batch_tokens: Positive = 512  # tokens of one forward pass
    max_requests: Positive = 128  # sequences decoded together
    page_size: Positive = 16  # tokens; whole pages of a prompt are shared by the members of a group
    num_blocks: Positive | None = None  # pages of the KV cache; None: enough for max_requests of full length
    device: str = "cpu"


class VLLMEngine(Table, frozen=True, tag_field="kind", tag="vllm"):
    """vLLM (AsyncLLM), on GPUs or on a CPU. It lives in an environment of its own: see `rollout.python`."""

    max_requests: Positive = 128  # sequences decoded together
    max_batch_tokens: Positive | None = None  # tokens of one forward pass; None: vLLM's default
    context: Positive | None = None  # tokens of prompt and completion together; None: the model's
    kv_cache_bytes: Positive | None = None  # None: on a CPU 1 GiB, on a GPU what gpu_memory leaves
    gpu_memory: Fraction = 0.9  # share of the GPU's memory
    tensor_parallel: Positive = 1
    compile: bool = False  # torch.compile and CUDA graphs: faster, a minute and a half more at the start


class SGLangEngine(Table, frozen=True, tag_field="kind", tag="sglang"):
    """SGLang servers that run already, spoken to over HTTP; each is an engine of its own."""

    urls: Annotated[list[str], Meta(min_length=1)]
    context: Positive = 32768  # tokens of prompt and completion together, as the servers were started with
    request_s: Seconds = 600.0  # until an answer must have come


class FakeEngine(Table, frozen=True, tag_field="kind", tag="fake"):
    """No model: scripted latency, for tests of orchestration. Token text is the task's answer or noise."""

    tokens_per_s: PositiveFloat = 1000.0
    median_tokens: Positive = 32
    sigma: NonNegativeFloat = 0.0  # of the log-normal number of tokens
    accuracy: Fraction = 0.5
    vocabulary: Positive = 64


Engine = TransformersEngine | VLLMEngine | SGLangEngine | FakeEngine


class EpisodeFunction(Table, frozen=True, tag_field="kind", tag="episode"):
    """The user's `async def episode(task, llm) -> float | None`, named `module:attribute`."""

    function: str


class ToolLoop(Table, frozen=True, tag_field="kind", tag="tools"):
    """The model calls tools until it answers without one."""

    functions: list[str] = []  # each `module:attribute`, a function with type hints
    mcp: list[str] = []  # each the command line, or the http address, of an MCP server whose tools are added
    system: str = ""  # system message in front


class AgentProgram(Table, frozen=True, tag_field="kind", tag="agent"):
    """An agent that talks to the gateway as to OpenAI or Anthropic. A command, started for each episode with
    OPENAI_BASE_URL, ANTHROPIC_BASE_URL, ASYNC_RL_EPISODE and ASYNC_RL_TASK set; or a function of
    (task, base_url), which runs in a thread, or is awaited."""

    command: list[str] = []
    function: str | None = None


class Adapter(Table, frozen=True, tag_field="kind", tag="adapter"):
    """A function of no arguments that makes an episode, named `module:attribute`: see async_rl.agents.adapters."""

    make: str


Run = EpisodeFunction | ToolLoop | AgentProgram | Adapter


class Environment(Table, frozen=True):
    """What an episode is, where it is more than one completion, and how far it may go. What the policy causes (a cap,
    a malformed call) is its own doing: the episode ends, is graded and votes."""

    run: Run
    parser: Literal["auto", "hermes", "llama3", "deepseek", "harmony", "mistral"] = "auto"  # of tool calls
    on_rewrite: Literal["branch", "fail"] = "branch"  # when the chat template renders earlier turns otherwise
    max_turns: Positive = 16
    max_tokens: Positive | None = None  # sampled in one episode; None: what the context holds
    max_invalid_turns: Positive = 3  # in a row: malformed calls, or neither an answer nor a call
    timeout_s: Seconds = 600.0  # of an episode
    tool_timeout_s: Seconds = 30.0  # of a tool call, kept from outside
    tool_processes: Positive = 4  # that plain functions run in, of each worker
    retries: NonNegative = 1  # anew, after the environment raised


class Rollout(Table, frozen=True):
    workers: Positive = 1
    engine: Engine = TransformersEngine()
    engines: Positive = 1  # of each worker; a prompt goes to the one that has its beginning cached
    max_in_flight: Positive = 128  # trajectories a worker holds at once
    threads: Positive = 1
    python: str = ""  # interpreter of the environment the workers run in; empty: that of the other services


# --- reward ------------------------------------------------------------------------------------------


class ExactGrader(Table, frozen=True, tag_field="kind", tag="exact"):
    """1 where the stripped completion equals the answer."""

    correct: float = 1.0
    wrong: float = 0.0
    ignore_case: bool = False


class MathGrader(Table, frozen=True, tag_field="kind", tag="math"):
    """math-verify on the last \\boxed{} or the final answer; what does not parse is `unparsed`."""

    correct: float = 1.0
    wrong: float = 0.0
    unparsed: float = 0.0


class ReasoningGymGrader(Table, frozen=True, tag_field="kind", tag="reasoning_gym"):
    """The score of the task's own reasoning-gym data set, in [0, 1]."""


class EpisodeGrader(Table, frozen=True, tag_field="kind", tag="episode"):
    """The reward that the episode itself gave. Where it gave none: `cut` when a cap ended it, otherwise no vote."""

    cut: float = 0.0


class CustomGrader(Table, frozen=True, tag_field="kind", tag="custom"):
    """The user's `def grade(task, trajectory) -> Score | float | None`, named `module:attribute`."""

    function: str


Grader = ExactGrader | MathGrader | ReasoningGymGrader | EpisodeGrader | CustomGrader


class Reward(Table, frozen=True):
    workers: Positive = 1  # reward services
    processes: Positive = 1  # killable graders of each
    grader: Grader = ExactGrader()
    timeout_s: Seconds = 10.0  # of one grading; a hang is retried once, then it is the policy's
    timeout_reward: float = 0.0


# --- services ----------------------------------------------------------------------------------------


class WeightSync(Table, frozen=True):
    """Publication of new weights to relays, one on each host that holds rollouts."""

    transport: Literal["shm", "collective", "disk"] = "shm"  # on one host; over the network; over a shared file system
    relays: Positive = 1
    full_every: Positive = 1  # above 1: what comes between is the difference to the version before (delta)
    device: str = "cpu"  # that a collective receives on: gloo, NCCL or HCCL follows from it
    bucket_bytes: Positive = 32 * 2**20
    slots: Annotated[int, Meta(ge=2)] = 3  # copies in shared memory: visible, being written, being read
    publish_s: Seconds = 120.0  # deadline of one publication
    operation_s: Seconds = 5.0  # deadline of one bucket over the network
    directory: str = "/dev/shm"  # of the slots
    path: str = ""  # folder that trainer and relays share, for transport "disk"; empty: one in the run's folder


class Journal(Table, frozen=True):
    """What the buffer writes to the run's folder before it acknowledges anything."""

    enabled: bool = True  # false: all in memory; a buffer or a trainer that dies ends the run
    keep: Literal["run", "checkpoint"] = "run"  # all of it, for replay; or what the kept checkpoints need
    max_bytes: Positive = 64 * 2**30  # on disk; reaching it ends the run, to be resumed
    segment_bytes: Positive = 64 * 2**20  # of one file
    cache_bytes: NonNegative = 256 * 2**20  # trajectories kept in memory, too; the newest


class Evaluation(Table, frozen=True):
    every: NonNegative = 0  # steps; 0: only before and after
    samples: Positive = 1  # per held-out task
    temperature: NonNegativeFloat = 0.0  # 0: greedy
    at_start: bool = True
    wait_s: Seconds = 600.0


class Services(Table, frozen=True):
    """Where the actors meet. An empty address is a free loopback port, announced in the run's folder."""

    buffer: str = ""
    trainer: str = ""
    weight_sync: str = ""
    connect_s: Seconds = 120.0  # until a peer must have greeted
    ask_s: Seconds = 60.0  # until an answer must have come
    heartbeat_s: Seconds = 1.0
    lease_s: Seconds = 30.0  # a lease lapses when its holder is silent for so long
    lease_max_s: Seconds = 3600.0  # what is not done after so long goes to another worker, its holder alive or not
    stop_s: Seconds = 30.0  # of an ordered stop, before SIGKILL; more than a step and a checkpoint take
    max_failures: Positive = 8  # failures in a row (attempts of a group, deaths of a worker) that end the run


class Config(Table, frozen=True):
    """A whole run."""

    name: str
    model: Model
    data: Data
    max_steps: Positive
    mode: Mode = "async"
    seed: NonNegative = 0
    runs: str = "runs"  # the run's folder is runs/name
    placement: Literal["apart", "shared"] = "apart"  # shared: trainer and engine take turns on one device (sync)
    batch: Batch = Batch()
    filter: Filter = Filter()
    staleness: Staleness = Staleness()
    sampling: Sampling = Sampling()
    algorithm: Algorithm = Algorithm()
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    environment: Environment | None = None
    reward: Reward = Reward()
    evaluation: Evaluation = Evaluation()
    weight_sync: WeightSync = WeightSync()
    journal: Journal = Journal()
    services: Services = Services()
    warmup: Warmup | None = None
