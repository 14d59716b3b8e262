"""The cuts of a text before it is joined: llama.cpp's expressions, and published ones."""

import random
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from tests.engine.models import metadata, tokenizer
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence as SplitSequence
from tokenizers.pre_tokenizers import Split

from orinllm.text.pretokenizers import pre_tokenizer_by_name

PLAIN = "a wOrd 1234 中文b!\n   c"


def cuts(name: str) -> SplitSequence:
    return SplitSequence(
        [Split(Regex(one), "isolated") for one in pre_tokenizer_by_name(name).splits]
    )


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [  # by the expressions of llama.cpp 0.5.0's llama-vocab.cpp, read by hand
        (
            *("kimi-k2", PLAIN),
            ["a", " w", "Ord", " ", "123", "4", " ", "中文", "b", "!\n", "  ", " c"],
        ),
        ("superbpe", PLAIN, ["a wOrd ", "1", "234", " 中文b!\n   c"]),
        ("chameleon", PLAIN, ["a", " wOrd", " ", *"1234", " 中文b", "!", "\n", "  ", " c"]),
        ("afmoe", PLAIN, ["a", " wOrd", " ", "1", "234", " ", "中文", "b", "!\n", "  ", " c"]),
        ("spark2_5", PLAIN, ["a", " wOrd", " ", *"1234", " ", "中文", "b", "!", "\n", "  ", " c"]),
        ("jais-2", PLAIN, ["a", " wOrd", " ", "123", "4", " 中文b", "!\n", "  ", " c"]),
        ("sarvam-moe", PLAIN, ["a wOrd 1234 中文b!", "\n", "   c"]),
        (
            *("granite-embed-multi-97m", PLAIN),
            ["a", " w", "Ord", " ", "123", "4", " 中文b", "!\n", "  ", " c"],
        ),
        ("jais-2", "a" + " " * 519 + "b", ["a", " " * 512, " " * 4, " " * 2, " b"]),
        ("afmoe", "한국어 9", ["한국어", " ", "9"]),
        ("afmoe", "ㄱ\u1112\u1161b", ["ㄱ", "\u1112\u1161", "b"]),
        ("chameleon", "IMGIMGABZ<sentinel:12>\t1", ["IMGIMGABZ", *"<", "sentinel", *":12>\t1"]),
    ],
)
def test_how_text_is_cut(name: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in cuts(name).pre_tokenize_str(text)] == pieces


# Of scripts, and signs that tokenizers treat in ways of their own.
_SIGNS = (
    " \n\t\u00a0\u2003\u3000\u0085abZ1.,!?-_/()#$+<~|`éÉñßжЖδΔאب"
    "अक中文かカ한국ไທកက😀…。！«№½٣४Ⅷ²"
    "\u0301\u093f\u0e34\u200d\u017fǅ\u02b0\ufeff\u1112Ⓐ𝐀\ufffd"
)
_WORDS = [*("  ", "   ", "\r\n", "wOrD", "'s", "'S", "'ll", "’s", "'ſ", "1234567", "0.5", "👍🏽")]


def _random_texts() -> list[str]:
    draw = random.Random(5)
    return ["".join(draw.choices([*_SIGNS, *_WORDS], k=draw.randrange(1, 14))) for _ in range(800)]


def test_bert_cuts_as_the_original() -> None:
    """The witness is Google's tokenizer in Python; llama.cpp drops Hangul's vowels, and ि."""
    from transformers.models.bert import tokenization_bert_legacy  # takes seconds

    tokens = metadata("bert-bge")["tokenizer.ggml.tokens"]
    whole = [token.replace("▁", "") if token[0] == "▁" else f"##{token}" for token in tokens]
    known = {word: i for i, word in enumerate(whole)} | {"[UNK]": tokens.index("[UNK]")}
    original: Any = tokenization_bert_legacy
    basic, pieces = original.BasicTokenizer(), original.WordpieceTokenizer(known, "[UNK]", 100)
    texts = [*_random_texts(), "한국어 Élan", "दिल्ली", "a\ufffd\x01국", "b" * 100, "b" * 101]
    for text in texts:
        want = [known[piece] for word in basic.tokenize(text) for piece in pieces.tokenize(word)]
        assert tokenizer("bert-bge").encode(text) == want, ascii(text)


_O200K = (  # tiktoken_ext/openai_public.py
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m"
    r"|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re"
    r"|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUBLISHED = {
    "gpt-4o": _O200K,
    # tokenization_kimi.py
    "kimi-k2": r"(?V1)[\p{Han}]+|"
    + _O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*"),
    # tokenizer.json, cited by llama.cpp's llama-vocab.cpp
    "jais-2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
    r"[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)"
    r"|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
    "exaone-moe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*"
    r")+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_text_is_cut_as_published_in_another_engine_of_expressions(name: str) -> None:
    for text in _random_texts():
        pieces = [piece for piece, _ in cuts(name).pre_tokenize_str(text)]
        assert pieces == regex.findall(_PUBLISHED[name], text), ascii(text)
