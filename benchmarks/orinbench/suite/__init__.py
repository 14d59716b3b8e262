"""The benchmarks beside llama-bench: one module each, over one runner, record and worker."""
