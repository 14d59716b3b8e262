"""Lists of launches that compute one token, a chunk of a prompt, or a batch."""
