"""Where the time of a token and of a prompt goes."""
