"""Engines that answer the same cases, each in fresh processes."""
