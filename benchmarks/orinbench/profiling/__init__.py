"""Profile of the time that a token and a prompt take."""

# Decoded behind the prompt: some before anything is timed, and all.
WARM_TOKENS, TIMED_TOKENS = 4, 32


def context_of(n_prompt: int, depth: int) -> int:
    """Return the context that a profile needs, in tokens."""
    return depth + n_prompt + WARM_TOKENS + TIMED_TOKENS + 2
