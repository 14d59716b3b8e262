"""Which path a model takes on a device, tensor by tensor, and what stands in the way."""

from dataclasses import dataclass

from orinllm.config import Config
from orinllm.device import unsupported
from orinllm.ggml import kernel_types
from orinllm.gguf import GGUF, TensorInfo
from orinllm.launches.attention import HEAD_DIMS
from orinllm.launches.buffers import F16, PAGE, KeyType, round_up
from orinllm.launches.gemm import COLUMN_STEP
from orinllm.launches.gemv import fits
from orinllm.launches.rows import COLUMNS as NORM_COLUMNS


@dataclass(frozen=True)
class Plan:
    """A model on a device."""

    device: str
    obstacles: dict[str, str]  # tensor or part -> why the fused kernels cannot run it
    prompt_obstacle: str | None  # why prompts go through token by token
    weight_bytes: int  # in the device's memory, as `weights_as` says
    weights_as: str  # how weights lie there, in words
    cache_bytes_per_token: int

    @property
    def fused(self) -> bool:
        """Say whether the fused kernels run the model."""
        return not self.obstacles

    def reason(self, tensor: str) -> str | None:
        """Return why a tensor is not on the fused kernels, or None."""
        if tensor in self.obstacles:
            return self.obstacles[tensor]
        return next((f"{what}: {why}" for what, why in self.obstacles.items()), None)


# Matrices that may be floats: routers.
_FLOATS = (".ffn_gate_inp.weight",)


def make_plan(gguf: GGUF, config: Config, device: str, kv: KeyType = F16) -> Plan:
    """Plan a model for a tinygrad device such as "CUDA" or "NV"; `kv` is of keys and values."""
    why = unsupported(device)
    obstacles = {"device": why} if why else _of_model(config) | _of_tensors(gguf, config, device)
    size, how = _weights(gguf, config, device, fused=not obstacles)
    return Plan(
        device=device,
        obstacles=obstacles,
        prompt_obstacle=None if obstacles else _of_prompts(gguf),
        weight_bytes=size,
        weights_as=how,
        cache_bytes_per_token=sum(
            kv.bytes_of(2 * layer.attention.kv_heads * layer.attention.head_dim)
            for layer in config.layers
        ),
    )


def _weights(gguf: GGUF, config: Config, device: str, fused: bool) -> tuple[int, str]:
    """Return the bytes of the weights on a device, and how they lie there."""
    if fused or not config.layers:  # the kernels, and tinygrad.llm
        return gguf.size_bytes, "they lie in the file"
    if device.split(":")[0] != "CPU":
        return 2 * sum(tensor.n_elements for tensor in gguf.tensors.values()), "16-bit floats"
    from orinllm.byte_weights import LAYOUTS, weight_bytes

    as_bytes = any(tensor.type in LAYOUTS for tensor in gguf.tensors.values())
    return weight_bytes(gguf), "bytes and scales" if as_bytes else "16-bit floats"


def cache_bytes(plan: Plan, context: int) -> int:
    """Return the bytes of keys and values of a context of so many tokens."""
    return plan.cache_bytes_per_token * round_up(context, PAGE)


def _of_model(config: Config) -> dict[str, str]:
    found = {}
    if config.general_only is not None:
        found["model"] = config.general_only
    if config.logit_softcap:
        found["head"] = "soft-caps its logits"
    if config.dim % NORM_COLUMNS:
        found["model"] = f"its width {config.dim} is no multiple of {NORM_COLUMNS}"
    for layer in config.layers:
        attention = layer.attention
        if attention.head_dim not in HEAD_DIMS:
            known = ", ".join(map(str, HEAD_DIMS))
            found["attention"] = f"head dimension {attention.head_dim} is none of {known}"
        if (experts := layer.feed_forward.experts) is not None:
            from orinllm.launches.experts import MOST_USED  # dense models do not wait for it

            if layer.post_norms:
                found["experts"] = "have norms of their own behind them"
            elif experts.used > MOST_USED:
                found["experts"] = f"{experts.used} for each token, more than {MOST_USED}"
    return found


def _of_tensors(gguf: GGUF, config: Config, device: str) -> dict[str, str]:
    found = {}
    for tensor in gguf.tensors.values():
        is_matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
        if not is_matrix or tensor.name.endswith(_FLOATS):
            continue
        if (why := _of_matrix(tensor, device)) is not None:
            found[tensor.name] = why
    for index, layer in enumerate(config.layers):
        if layer.feed_forward.experts is not None:
            gate, up = (
                gguf.tensors[config.matrix(f"blk.{index}.ffn_{name}_exps").tensor]
                for name in ("gate", "up")
            )
            if gate.type != up.type:
                found[up.name] = f"its type is not that of {gate.name}, with which it is launched"
    return found


def _of_matrix(tensor: TensorInfo, device: str) -> str | None:
    type_ = kernel_types().get(int(tensor.type))
    if type_ is None:
        return "no kernel for its type"
    cols = tensor.shape[-1]
    row_bytes = cols // type_.block_values * type_.block_bytes
    if cols % 32:
        return f"its rows of {cols} are no multiple of 32"
    if tensor.offset % type_.alignment or row_bytes % type_.alignment:
        return f"its rows are not aligned to {type_.alignment} bytes"
    if not fits(device, "GATED" if "ffn_gate" in tensor.name else "STORE", type_, tensor.shape):
        return f"its rows of {cols} do not fit shared memory"
    return None


def _of_prompts(gguf: GGUF) -> str | None:
    for tensor in gguf.tensors.values():
        is_matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
        if is_matrix and tensor.shape[-1] % COLUMN_STEP:
            return f"{tensor.name} has rows of {tensor.shape[-1]}, no multiple of {COLUMN_STEP}"
    return None


def type_name(tensor: TensorInfo) -> str:
    """Return the name of a tensor's type, for people."""
    return tensor.type.name
