"""Load on a server that speaks OpenAI's protocol: latencies and throughput at its client."""
