"""Connections and requests before a protocol: who may ask, how long, how much."""
