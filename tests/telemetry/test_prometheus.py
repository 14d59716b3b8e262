"""End to end: a board, the exporter, a real Prometheus with our rules, node_exporter's textfile."""
