"""Typed readings of a Jetson's sensors, in base units; a missing sensor is absent, never zero.

`jetson.board.read_state()` is the stamp of a benchmark, `jetson.energy.EnergySampler` its joules,
`jetson.require.unmet()` its conditions. The standard library is all this package needs;
nvidia-ml-py adds discrete GPUs where it is installed.
"""
