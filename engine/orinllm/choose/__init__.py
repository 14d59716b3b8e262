"""The choice of the next token from logits, and states that become embeddings."""
