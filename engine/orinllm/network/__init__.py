"""A file's network, said once: its configuration, and the families of models."""
