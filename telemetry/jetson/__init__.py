"""Typed readers of the sensors and of the power and clock state of a Jetson."""
