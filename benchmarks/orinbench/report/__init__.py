"""Results as one page: no script, nothing loaded from anywhere, for a phone, a screen or paper."""
