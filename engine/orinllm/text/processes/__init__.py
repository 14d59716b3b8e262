"""Processes of their own for what a client or a file may make endless."""
