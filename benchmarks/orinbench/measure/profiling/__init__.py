"""Profile of the time that a token and a prompt take."""
