"""The patch series on tinygrad: read it, apply it, edit it, prove it, install it."""
