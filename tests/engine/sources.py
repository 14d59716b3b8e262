"""The kernels' sources as one text, for compilers that read no files."""

from orinllm.file.ggml import CUDA


def flat(*names: str) -> str:
    """Return sources of cuda/ with what they include in place, each header once."""
    seen: set[str] = set()

    def resolved(name: str) -> str:
        seen.add(name)
        lines = []
        for line in (CUDA / name).read_text().splitlines():
            if line.startswith("#include"):
                other = line.split('"')[1]
                if other not in seen or other == "ggml_types.h":
                    lines.append(resolved(other))
            elif line != "#pragma once":
                lines.append(line)
        return "\n".join(lines)

    return "\n".join(resolved(name) for name in names if name not in seen)
