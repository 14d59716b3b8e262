"""CUDA and C sources stay readable: functions of at most 60 lines, files of fewer than 500."""

import re

from orinllm.file.ggml import CUDA

LONGEST_FUNCTION, LONGEST_FILE = 60, 500
SOURCES = [*CUDA.glob("*.cu*"), *CUDA.glob("*.h"), *(CUDA.parent / "cpu").glob("*.c")]
# Text with braces or parentheses that are no code; a line keeps its end.
NO_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|^#(?:[^\n]*\\\n)*[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'\\?.'", re.M | re.S
)


def function_lengths(text: str) -> dict[str, int]:
    """Lines of each function with a body, by name and the line that its header starts in.

    A function is what opens a brace behind parentheses, outside another function.
    """
    code = NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    found: dict[str, int] = {}
    header, depth, opened = 0, 0, None
    for at, c in enumerate(code):
        if c == "{":
            depth += 1
            if opened is None and "(" in code[header:at]:
                start = header + len(code[header:at]) - len(code[header:at].lstrip())
                opened = (start, depth)
        if c == "}":
            if opened is not None and opened[1] == depth:
                start = opened[0]
                named = re.search(r"(\w+)(?:<\w+>)?\s*\(", code[start:at])
                first = code.count("\n", 0, start)
                assert named is not None
                found[f"{named[1]} at {first + 1}"] = code.count("\n", 0, at) - first + 1
                opened = None
            depth -= 1
        if c in "{};":
            header = at + 1
    assert depth == 0
    return found


def test_functions_and_files_are_short() -> None:
    assert len(SOURCES) > 20
    long: dict[str, int] = {}
    for path in sorted(SOURCES):
        text = path.read_text()
        lengths = function_lengths(text)
        includes = all(line.startswith(("//", "#include")) for line in text.splitlines())
        assert lengths or includes or path.suffix == ".h", path
        long |= {f"{path.name}: {k}": n for k, n in lengths.items() if n > LONGEST_FUNCTION}
        if (n := len(text.splitlines())) >= LONGEST_FILE:
            long[path.name] = n
    assert long == {}
