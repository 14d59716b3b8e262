"""What was measured on this machine, kept in one local SQLite file."""
