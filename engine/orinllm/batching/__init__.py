"""Sequences that share a device: who runs next, where keys and values lie, what is guessed."""
