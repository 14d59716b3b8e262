"""ResNet-50, MobileNetV2 and EfficientNet-B0 for images, each written once over an interface.

`Shapes` walks a network and counts, `TinygradOps` and `NumpyOps` compute it. Batch norms are
inference's: a scale and a shift a channel. Sources: He et al. 2015 (arXiv 1512.03385, with the
stride in the 3x3 convolution, as torchvision has it), Sandler et al. 2018 (arXiv 1801.04381), Tan
and Le 2019 (arXiv 1905.11946).
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

CLASSES = 1000
Weights = Mapping[str, npt.NDArray[np.float32]]


class Ops(Protocol):
    """What networks are made of. Images are (batch, channels, height, width)."""

    def conv(
        self, x: Any, out: int, size: int, stride: int = 1, groups: int = 1, act: str = ""
    ) -> Any:
        """Convolve with zeros around, then scale, shift and activate (relu, relu6, silu)."""
        ...

    def max_pool(self, x: Any) -> Any:
        """Return the maximum of 3x3 at stride 2, with one of padding."""
        ...

    def squeeze(self, x: Any, hidden: int) -> Any:
        """Weigh the channels by what two layers make of their means (squeeze and excitation)."""
        ...

    def add(self, x: Any, y: Any, act: str = "") -> Any:
        """Return x + y, activated."""
        ...

    def classify(self, x: Any, classes: int) -> Any:
        """Return (batch, classes) from the channels' means."""
        ...

    def channels(self, x: Any) -> int:
        """Return the number of channels."""
        ...


def resnet50(ops: Ops, x: Any) -> Any:
    """Bottlenecks of 1x1, 3x3, 1x1 in stages of 3, 4, 6 and 3."""
    x = ops.max_pool(ops.conv(x, 64, 7, 2, act="relu"))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            x = bottleneck(ops, x, 64 << stage, 2 if stage and not block else 1)
    return ops.classify(x, CLASSES)


def bottleneck(ops: Ops, x: Any, width: int, stride: int) -> Any:
    """Return ResNet's block of `4 * width` channels."""
    out = 4 * width
    shortcut = x if ops.channels(x) == out else ops.conv(x, out, 1, stride)
    y = ops.conv(ops.conv(x, width, 1, act="relu"), width, 3, stride, act="relu")
    return ops.add(ops.conv(y, out, 1), shortcut, act="relu")


def mobilenet_v2(ops: Ops, x: Any) -> Any:
    """Inverted residuals: expansion, channels, blocks, stride of each stage."""
    x = ops.conv(x, 32, 3, 2, act="relu6")
    for expand, out, blocks, stride in (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for block in range(blocks):
            x = _inverted(ops, x, out, 3, 1 if block else stride, expand, "relu6", squeeze=False)
    return ops.classify(ops.conv(x, 1280, 1, act="relu6"), CLASSES)


def efficientnet_b0(ops: Ops, x: Any) -> Any:
    """MobileNetV2's blocks with squeeze and excitation: expansion, size, channels, ..., stride."""
    x = ops.conv(x, 32, 3, 2, act="silu")
    for expand, size, out, blocks, stride in (
        *((1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2)),
        *((6, 5, 112, 3, 1), (6, 5, 192, 4, 2), (6, 3, 320, 1, 1)),
    ):
        for block in range(blocks):
            x = _inverted(ops, x, out, size, 1 if block else stride, expand, "silu", squeeze=True)
    return ops.classify(ops.conv(x, 1280, 1, act="silu"), CLASSES)


def _inverted(
    ops: Ops, x: Any, out: int, size: int, stride: int, expand: int, act: str, squeeze: bool
) -> Any:
    inside = ops.channels(x)
    wide = inside * expand
    y = x if expand == 1 else ops.conv(x, wide, 1, act=act)
    y = ops.conv(y, wide, size, stride, groups=wide, act=act)
    if squeeze:
        y = ops.squeeze(y, max(1, inside // 4))
    y = ops.conv(y, out, 1)
    return ops.add(x, y) if stride == 1 and inside == out else y


NETWORKS: dict[str, Callable[[Ops, Any], Any]] = {
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_b0": efficientnet_b0,
}


class Shapes:
    """Walks shapes: the weights' in `shapes`, by the order of use, and `macs` of one image."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.macs = 0
        self._layers = 0

    @property
    def n_params(self) -> int:
        """How many weights there are."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def _layer(self, out: int, *inside: int) -> None:
        """Note a layer: a matrix, and a vector that is added."""
        self.shapes[f"{self._layers}.weight"] = (out, *inside)
        self.shapes[f"{self._layers}.shift"] = (out,)
        self._layers += 1

    def conv(
        self, x: Any, out: int, size: int, stride: int = 1, groups: int = 1, act: str = ""
    ) -> Any:
        """Note weights, scale and shift."""
        batch, inside, height, width = x
        self.shapes[f"{self._layers}.scale"] = (out,)
        self._layer(out, inside // groups, size, size)
        height, width = -(-height // stride), -(-width // stride)
        self.macs += out * inside // groups * size * size * height * width
        return batch, out, height, width

    def max_pool(self, x: Any) -> Any:
        """Halve the image."""
        return (*x[:2], -(-x[2] // 2), -(-x[3] // 2))

    def squeeze(self, x: Any, hidden: int) -> Any:
        """Note both layers."""
        self._layer(hidden, x[1])
        self._layer(x[1], hidden)
        self.macs += 2 * hidden * x[1]
        return x

    def add(self, x: Any, y: Any, act: str = "") -> Any:
        """Keep the shape."""
        assert x == y, f"{x} + {y}"
        return x

    def classify(self, x: Any, classes: int) -> Any:
        """Note the layer."""
        self._layer(classes, x[1])
        self.macs += classes * int(x[1])
        return x[0], classes

    def channels(self, x: Any) -> int:
        """Return the number of channels."""
        return int(x[1])


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    """Return weights that keep activations near one (He et al. 2015, arXiv 1502.01852)."""
    draw = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        if name.endswith("weight"):
            spread = np.sqrt(2 / np.prod(shape[1:]))
            made[name] = draw.standard_normal(shape, np.float32) * np.float32(spread)
        elif name.endswith("scale"):
            made[name] = draw.uniform(0.5, 1.0, shape).astype(np.float32)
        else:
            made[name] = draw.uniform(-0.1, 0.1, shape).astype(np.float32)
    return made


class _Weighted:
    """Hands out weights in the order of use; `restart` before each walk."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = weights
        self._layers = 0

    def restart(self) -> None:
        """Begin with the first layer."""
        self._layers = 0

    def _next(self) -> tuple[Any, Any, Any]:
        """Return weight, scale (None without) and shift of the next layer."""
        name = str(self._layers)
        self._layers += 1
        weights = self._weights
        return weights[f"{name}.weight"], weights.get(f"{name}.scale"), weights[f"{name}.shift"]

    def channels(self, x: Any) -> int:
        """Return the number of channels."""
        return int(x.shape[1])


class TinygradOps(_Weighted):
    """Computes on tinygrad's device: weights and images are its tensors."""

    def conv(
        self, x: Any, out: int, size: int, stride: int = 1, groups: int = 1, act: str = ""
    ) -> Any:
        """Convolve, scale, shift, activate."""
        weight, scale, shift = self._next()
        y = x.conv2d(weight, groups=groups, stride=stride, padding=size // 2)
        return self._act(y * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1), act)

    def max_pool(self, x: Any) -> Any:
        """Return the maximum of 3x3 at stride 2."""
        return x.max_pool2d(3, 2, padding=1)

    def squeeze(self, x: Any, hidden: int) -> Any:
        """Weigh the channels."""
        mean = x.mean((2, 3))
        for act in ("silu", "sigmoid"):
            weight, _, shift = self._next()
            mean = self._act(mean @ weight.T + shift, act)
        return x * mean.reshape(*mean.shape, 1, 1)

    def add(self, x: Any, y: Any, act: str = "") -> Any:
        """Return x + y, activated."""
        return self._act(x + y, act)

    def classify(self, x: Any, classes: int) -> Any:
        """Return the classes' logits."""
        weight, _, shift = self._next()
        return x.mean((2, 3)) @ weight.T + shift

    def _act(self, x: Any, act: str) -> Any:
        return getattr(x, act)() if act else x


class NumpyOps(_Weighted):
    """Computes in numpy, in float64: the reference."""

    def conv(
        self, x: Any, out: int, size: int, stride: int = 1, groups: int = 1, act: str = ""
    ) -> Any:
        """Convolve by windows, scale, shift, activate."""
        weight, scale, shift = (
            None if values is None else values.astype(np.float64) for values in self._next()
        )
        assert weight is not None and scale is not None and shift is not None
        around = (size // 2, size // 2)
        padded = np.pad(x, ((0, 0), (0, 0), around, around))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (2, 3))
        windows = windows[:, :, ::stride, ::stride]  # (batch, inside, height, width, size, size)
        if groups == 1:
            y = np.tensordot(windows, weight, ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)
        else:
            assert groups == out == x.shape[1], "depthwise alone"
            y = np.einsum("bchwij,cij->bchw", windows, weight[:, 0])
        return _act(y * scale[:, None, None] + shift[:, None, None], act)

    def max_pool(self, x: Any) -> Any:
        """Return the maximum of 3x3 at stride 2."""
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        return windows[:, :, ::2, ::2].max((-1, -2))

    def squeeze(self, x: Any, hidden: int) -> Any:
        """Weigh the channels."""
        mean = x.mean((2, 3))
        for act in ("silu", "sigmoid"):
            weight, _, shift = self._next()
            mean = _act(mean @ weight.T.astype(np.float64) + shift, act)
        return x * mean[:, :, None, None]

    def add(self, x: Any, y: Any, act: str = "") -> Any:
        """Return x + y, activated."""
        return _act(x + y, act)

    def classify(self, x: Any, classes: int) -> Any:
        """Return the classes' logits."""
        weight, _, shift = self._next()
        return x.mean((2, 3)) @ weight.T.astype(np.float64) + shift


def _act(x: Any, act: str) -> Any:
    match act:
        case "relu":
            return np.maximum(x, 0)
        case "relu6":
            return np.clip(x, 0, 6)
        case "silu":
            return x / (1 + np.exp(-x))
        case "sigmoid":
            return 1 / (1 + np.exp(-x))
    return x
