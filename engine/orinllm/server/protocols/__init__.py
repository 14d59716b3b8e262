"""Clients' protocols: one thin adapter each, all on the same kind of job."""
