"""The rollout service: leases groups from the buffer and samples them, under weights that follow the trainer.

service.py               the loop: lease, sample, hand in; updates of the weights
held.py                  the leases held, and what may be done about them (pure)
meter.py                 the worker's own counts
device.py                the engine asleep while the trainer has the device
  turn.py                when it is awake (pure)
member.py                one trajectory: a completion, or an episode
episodes.py              many calls of the engine, one trajectory: what an episode sees, its caps
environments.py          the environment that the configuration names
agents.py                an agent of the user's own, a program or a function
gateway.py               OpenAI's and Anthropic's endpoints in front of the policy
  dialects.py            their requests and replies

engine.py                the seam: what an engine owes
router.py                several engines as one, by cached prefixes and load
transformers_engine.py   continuous batching by Hugging Face transformers
  sampler.py             one token for each row of logits, and its log-probability
  live_weights.py        new weights into the live parameters
  live_adapters.py       new adapters into them
  routing.py             the experts that the routers chose for each token
  prefixes.py            one prompt of a group computed once
  paged_cache.py         the size of the cache, and how attention reads it
vllm_engine.py           vLLM's AsyncLLM
  vllm_worker.py         inside vLLM's workers: new weights from shared memory
sglang_engine.py         SGLang servers over HTTP
adapters.py              adapters as they are published
experts.py               stacks of experts by the names of a model's files
fake_engine.py           scripted latency, no model
backends.py              the engine that the configuration names
"""
