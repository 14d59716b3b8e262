"""Instructions as functions over all lanes, on numpy arrays."""
