"""The rollout service: leases groups from the buffer and samples them, under weights that follow the trainer.

service.py               the loop: lease, sample, hand in; updates of the weights
held.py                  the leases held, and what may be done about them (pure)
meter.py                 the worker's own counts
prompts.py               a task's prompt as tokens, a completion as text
engine.py                the seam: what an engine owes
transformers_engine.py   continuous batching by Hugging Face transformers
  sampler.py             one token for each row of logits, and its log-probability
  live_weights.py        new weights into the live parameters
  prefixes.py            one prompt of a group computed once
  paged_cache.py         the size of the cache, and how attention reads it
vllm_engine.py           vLLM's AsyncLLM
  vllm_worker.py         inside vLLM's workers: new weights from shared memory
sglang_engine.py         SGLang servers over HTTP
fake_engine.py           scripted latency, no model
backends.py              the engine that the configuration names
"""
