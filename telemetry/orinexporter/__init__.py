"""Prometheus exporter on top of the jetson readers."""
