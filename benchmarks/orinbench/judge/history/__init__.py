"""History of this machine's measurements, in one local SQLite file."""
