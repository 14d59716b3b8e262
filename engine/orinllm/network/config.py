"""A model's shape as the executors need it: its layers (layer.py), free of file formats.

An architecture (`arch/`) makes one from a file's metadata. Every scaling of rotary positions ends
as plain frequencies and one magnitude, so that executors know nothing of YaRN or its peers.
"""

from dataclasses import dataclass, field
from functools import cached_property

from orinllm.errors import BadInput
from orinllm.network.layer import AddDeepstackRows, Attention, Layer

#: The value that has what Config.layer_embedding says, of all layers one after the other.
LAYERS = "layers"


@dataclass(frozen=True)
class TensorRows:
    """Rows of one tensor of the file: `rows` rows from `first_row`, None for all of them.

    Of stacked experts (3-D tensors) rows are those of each expert.
    """

    tensor: str
    first_row: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Config:
    """A decoder-only transformer."""

    architecture: str  # general.architecture of the file
    dim: int
    vocab_size: int  # rows of the head; the tokenizer may know fewer
    trained_context: int  # tokens
    norm_eps: float
    layers: tuple[Layer, ...]
    embedding_scale: float = 1.0  # times the token's embedding
    logit_scale: float = 1.0  # times the logits
    whole_pictures: bool = False  # rows of a picture see those behind them, too
    logit_softcap: float = 0.0  # c: logits become c * tanh(logits / c); 0: they stay
    # Fused tensors of the file by logical name, such as blk.0.attn_q:
    # TensorRows("blk.0.attn_qkv.weight", 0, 3072). A logical name without an entry is the tensor
    # NAME.weight itself.
    matrices: dict[str, TensorRows] = field(default_factory=dict)
    final_norm: str = "output_norm"  # the vector of the norm before the logits
    # Elements of an embedding of each token for each layer, which the value LAYERS has; 0: none.
    layer_embedding: int = 0
    # Of a block behind a model's layers, which is a model of one layer: its number, and the matrix
    # that makes X of a token's embedding and the model's state before it, both normed.
    first: int = 0
    joined: str | None = None
    # Why the fused kernels cannot run it, or None; the general path may.
    general_only: str | None = None

    @cached_property
    def attention_by_layer(self) -> dict[int, Attention]:
        """The layers that have attention, by their number."""
        found = ((index, layer.attention) for index, layer in enumerate(self.layers))
        return {index: attention for index, attention in found if attention is not None}

    @cached_property
    def kv_elements_per_token(self) -> int:
        """The elements of a token's keys and values in all layers."""
        return sum(a.kv_elements_per_token for a in self.attention_by_layer.values())

    @cached_property
    def n_state_floats(self) -> int:
        """The floats of a sequence's recurrent states in all layers; 0: it has none."""
        return sum(layer.n_state_floats for layer in self.layers)

    @cached_property
    def uses_mrope(self) -> bool:
        """Say whether positions have three parts: rows of a picture have a place in it."""
        return any(a.rope is not None and a.rope.axes for a in self.attention_by_layer.values())

    @cached_property
    def n_deepstack_parts(self) -> int:
        """The parts that rows of pictures have beside their embeddings, each `dim` wide."""
        operations = (op for layer in self.layers for op in layer.operations)
        return sum(isinstance(op, AddDeepstackRows) for op in operations)

    @cached_property
    def value_widths(self) -> dict[str, int]:
        """The elements of each value of a token, of the layer where it is widest."""
        found = {LAYERS: self.layer_embedding * len(self.layers)} if self.layer_embedding else {}
        for layer in self.layers:
            for name, width in layer.value_widths(self.dim).items():
                found[name] = max(width, found.get(name, 0))
        return found

    def is_in_other_block(self, tensor: str) -> bool:
        """Say whether a tensor of the file is of a block that is none of these layers.

        Behind a model's layers are blocks that propose later tokens.
        """
        number = tensor.split(".")[1] if tensor.startswith("blk.") else ""
        if not number.isdecimal() or not self.layers:
            return False
        return int(number) - self.first not in range(len(self.layers))

    def tensor_prefix(self, layer: int) -> str:
        """Return what the names of a layer's tensors begin with."""
        return f"blk.{self.first + layer}."

    def rows_of_matrix(self, name: str) -> TensorRows:
        """Return where the matrix of a logical name, such as blk.0.attn_q, is in the file."""
        return self.matrices.get(name, TensorRows(f"{name}.weight"))


def context_overflow_error(tokens: int, start: int, context: int) -> BadInput:
    """Return what is raised where so many tokens from a position on do not fit a context."""
    return BadInput(
        f"{tokens} tokens from position {start} on do not fit a context of {context} tokens"
    )
