"""One run: what is measured, by which backend, in which order; and the llama-bench command."""
