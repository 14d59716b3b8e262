"""The `orinllm` command."""
