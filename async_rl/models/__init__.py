"""Models and tokenizers: loading, attention over packed sequences, the small model of `async-rl warmup`."""
