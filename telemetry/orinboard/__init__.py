"""Typed readings of a Jetson's sensors, in base units; a missing sensor is absent, never zero.

`orinboard.board.read_state()` is the stamp of a benchmark, `orinboard.energy.EnergySampler` its
joules, `orinboard.require.unmet_conditions()` its conditions. The standard library is all that this
package needs; nvidia-ml-py adds discrete GPUs where it is installed.
"""
