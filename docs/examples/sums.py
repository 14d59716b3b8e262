"""The sums of the rows of x + 1, computed: what DEBUG, BEAM, PROFILE and VIZ show of one kernel."""

from tinygrad import Tensor

x = Tensor.arange(64 * 256).reshape(64, 256).float().contiguous().realize()
print((x + 1).sum(axis=1).tolist()[:2])
