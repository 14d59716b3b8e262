"""Verdicts on samples, and the records that keep them."""
