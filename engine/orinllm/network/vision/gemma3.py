"""Gemma 3: SigLIP, patches pooled to 256 rows a picture, which see each other.

Source: tools/mtmd/{clip.cpp,models/siglip.cpp} of llama.cpp; the text around a picture is that of
`transformers`' Gemma3Processor, on which the model was trained.
"""

from orinllm.network.layer import Norm
from orinllm.network.vision.encoder import JoinRows, MatrixProduct, MmprojConfig, layers_operations
from orinllm.network.vision.header import ClipHeader

_BEGIN, _END = "<start_of_image>", "<end_of_image>"


def gemma3_mmproj(header: ClipHeader) -> MmprojConfig:
    """Return the config of a Gemma 3."""
    shape, pool = header.square_tile_shape_and_merge(4)
    out = header.tensor_shape("mm.input_projection.weight")[-1]
    operations = [
        *layers_operations(shape),
        JoinRows("pooled", "seen", pool**2, mean=True),
        Norm("normed rows", "pooled", "mm.soft_emb_norm"),
        MatrixProduct("rows", "normed rows", (("mm.input_projection", out),)),
    ]
    positions = range(shape.patches_per_side**2)
    encoder = header.make_encoder(
        shape, pool, positions, operations, across=("mm.input_projection",)
    )
    return MmprojConfig(
        kind="gemma3",
        encoder=encoder,
        way="square",
        sizes={"size": shape.size},
        n_rows=(shape.patches_per_side // pool) ** 2,
        slot=_BEGIN,
        kept=True,
        text=lambda grid: f"\n\n{_BEGIN}{_END}\n\n",
        whole=True,
    )
