"""Which path a model takes on a device, tensor by tensor, and what stands in the way."""

from collections.abc import Iterator
from dataclasses import dataclass

from orinllm.errors import BadInput
from orinllm.file.ggml import GgmlType, kernel_ggml_types
from orinllm.file.gguf import GGUF, TensorInfo
from orinllm.gpu.device import reason_unsupported
from orinllm.gpu.kernels.buffers import F16, PAGE, KvCacheType, round_up
from orinllm.network.arch.tensor_check import wanted_tensors
from orinllm.network.config import Config
from orinllm.network.layer import Activate, Activation, MixExperts, Recurrence


@dataclass(frozen=True)
class PathPlan:
    """A model on a device."""

    device: str
    path: str  # fused, cpu or general: that of tinygrad.llm
    obstacles: dict[str, str]  # tensor or part -> why the fused kernels cannot run it
    weight_bytes: int  # in the device's memory, as `weights_as` says
    weights_as: str  # how weights lie there, in words
    cache_bytes_per_token: int

    @property
    def is_fused(self) -> bool:
        """Say whether the fused kernels run the model."""
        return self.path == "fused"

    def reason_not_fused(self, tensor: str) -> str | None:
        """Return why a tensor is not on the fused kernels, or None."""
        if tensor in self.obstacles:
            return self.obstacles[tensor]
        return next((f"{what}: {why}" for what, why in self.obstacles.items()), None)


# Matrices that may be floats: routers.
_FLOATS = (".ffn_gate_inp.weight",)
# Others that are floats become halves on the device (weights.py) up to so many elements.
_SMALL = 1 << 20


def make_path_plan(gguf: GGUF, config: Config, device: str, kv: KvCacheType = F16) -> PathPlan:
    """Plan a model for a tinygrad device such as "CUDA" or "NV"; `kv` is of keys and values."""
    why = reason_unsupported(device)
    obstacles = (
        {"device": why}
        if why
        else _model_obstacles(config) | _tensor_obstacles(gguf, config, device)
    )
    on_cpu = device.split(":")[0] == "CPU" and config.layers
    path = "fused" if not obstacles else "cpu" if on_cpu else "general"
    size, how = _weight_bytes_and_layout(gguf, config, path)
    return PathPlan(
        device=device,
        path=path,
        obstacles=obstacles,
        weight_bytes=size,
        weights_as=how,
        cache_bytes_per_token=sum(
            kv.bytes_for_elements(attention.kv_elements_per_token)
            for attention in config.attention_by_layer.values()
        ),
    )


def _weight_bytes_and_layout(gguf: GGUF, config: Config, path: str) -> tuple[int, str]:
    """Return the bytes of the weights on a device, and how they lie there."""
    if path != "cpu":
        size = sum(t.n_bytes for n, t in gguf.tensors.items() if not config.is_in_other_block(n))
        return size, "they lie in the file"
    from orinllm.cpu.weight_layout import is_read_in_place, model_weight_bytes

    matrices = [tensor for tensor in gguf.tensors.values() if len(tensor.shape) > 1]
    return model_weight_bytes(gguf, config), (
        "they lie in the file" if all(map(is_read_in_place, matrices)) else "16-bit floats in part"
    )


def cache_bytes(plan: PathPlan, context: int) -> int:
    """Return the bytes of keys and values of a context of so many tokens."""
    return plan.cache_bytes_per_token * round_up(context, PAGE)


def _model_obstacles(config: Config) -> dict[str, str]:
    from orinllm.gpu.kernels.attention import HEAD_DIMS  # a CPU does not wait for tinygrad
    from orinllm.gpu.kernels.rows import COLUMNS as NORM_COLUMNS

    found = {}
    if config.general_only is not None:
        found["model"] = config.general_only
    if config.dim % NORM_COLUMNS:
        found["model"] = f"its width {config.dim} is no multiple of {NORM_COLUMNS}"
    found |= _operation_obstacles(config)
    for attention in config.attention_by_layer.values():
        if attention.head_dim not in HEAD_DIMS:
            known = ", ".join(map(str, HEAD_DIMS))
            found["attention"] = f"head dimension {attention.head_dim} is none of {known}"
    for step in (step for layer in config.layers for step in layer.steps):
        if isinstance(step.operation, MixExperts):
            from orinllm.gpu.kernels.experts import MOST_USED  # dense models do not wait for it

            if step.post is not None:
                found["experts"] = "have norms of their own behind them"
            elif step.operation.experts.used > MOST_USED:
                used = step.operation.experts.used
                found["experts"] = f"{used} for each token, more than {MOST_USED}"
    return found


def _operation_obstacles(config: Config) -> dict[str, str]:
    """Return what of a network no launch computes."""
    found = {}
    operations = [op for layer in config.layers for op in layer.operations]
    for op in operations:
        if isinstance(op, Recurrence):
            from orinllm.gpu.kernels.recurrent import reason_unsupported

            if (why := reason_unsupported(op)) is not None:
                found["recurrent layer"] = why
        elif isinstance(op, Activate) and not op.by and op.activation != Activation.RELU_SQUARED:
            found["activation without a gate of its own"] = "has no kernels"
    for step in (step for layer in config.layers for step in layer.steps):
        if step.post is not None and step.add is not None and step.add.by is not None:
            found["shared expert"] = "with a gate and a norm behind it, it has no kernels"
    if config.layers and not config.attention_by_layer:
        found["attention"] = "no layer has any"
    return found


def _used_matrices(gguf: GGUF, config: Config) -> Iterator[TensorInfo]:
    """Yield the file's matrices that the network computes with, each once."""
    wanted = (each for each in wanted_tensors(config) if each.is_matrix)
    names = (config.rows_of_matrix(each.name.removesuffix(".weight")).tensor for each in wanted)
    yield from (gguf.tensors[name] for name in dict.fromkeys(names) if name in gguf.tensors)


def _tensor_obstacles(gguf: GGUF, config: Config, device: str) -> dict[str, str]:
    found = {}
    for tensor in _used_matrices(gguf, config):
        if tensor.name.endswith(_FLOATS):
            continue
        if (why := _matrix_obstacle(tensor, device)) is not None:
            found[tensor.name] = why
    for index, layer in enumerate(config.layers):
        if layer.experts_operation is not None and layer.experts_operation.experts.gated:
            gate, up = (
                gguf.tensors[
                    config.rows_of_matrix(f"{config.tensor_prefix(index)}ffn_{name}_exps").tensor
                ]
                for name in ("gate", "up")
            )
            if gate.type != up.type:
                found[up.name] = f"its type is not that of {gate.name}, with which it is launched"
    return found


def _matrix_obstacle(tensor: TensorInfo, device: str) -> str | None:
    from orinllm.gpu.kernels.gemv import fits_shared_memory

    halves = tensor.type == GgmlType.F32 and tensor.n_elements <= _SMALL
    type_ = kernel_ggml_types().get(int(GgmlType.F16 if halves else tensor.type))
    if type_ is None:
        return "no kernel for its type"
    cols = tensor.shape[-1]
    row_bytes = cols // type_.block_values * type_.block_bytes
    if cols % 32 or cols < 64:  # cuda/batch.cu reads the last 64
        return f"its rows of {cols} are no multiple of 32 from 64 on"
    if tensor.offset % type_.alignment or row_bytes % type_.alignment:
        return f"its rows are not aligned to {type_.alignment} bytes"
    if not fits_shared_memory(
        device, "GATED" if "ffn_gate" in tensor.name else "STORE", type_, tensor.shape
    ):
        return f"its rows of {cols} do not fit shared memory"
    return None


def require_known_types(gguf: GGUF) -> None:
    """Raise BadInput for a tensor whose type no path of the engine reads."""
    known = {int(t) for t in (*kernel_ggml_types(), GgmlType.F32)}
    for tensor in gguf.tensors.values():
        if int(tensor.type) not in known:
            names = ", ".join(sorted(t.name for t in kernel_ggml_types().values()))
            raise BadInput(
                f"{gguf.path}: tensor {tensor.name} has the type {tensor.type.name}, which is not "
                f"supported; supported are F32, {names}"
            )
