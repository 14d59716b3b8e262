"""The benchmarks beside llama-bench: their cases, what they do on a device, and their command."""
