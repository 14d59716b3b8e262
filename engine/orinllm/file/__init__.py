"""A file's bytes."""
