"""The splits that byte-level BPE vocabularies make before they merge, by their GGUF name.

A vocabulary was trained on text that a list of regular expressions had cut into words, and merges
only within a word. GGUF files name the list in `tokenizer.ggml.pre`. The expressions are those of
the models' own tokenizer.json files (Oniguruma's syntax, as the `tokenizers` library runs them);
names and groups follow llama.cpp (src/llama-vocab.cpp, `llm_tokenizer_bpe` and `impl::load`).

Python's `regex`, another engine, cuts as these where the model's own list is published (models.md,
"Tokens"). llama.cpp 0.5.0 differs in some signs: it has no classes for upper and lower case outside
ASCII, nor for marks, in o200k's and kimi-k2's words.
"""

from __future__ import annotations

from dataclasses import dataclass

from orinllm.errors import BadInput

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _gpt4_pattern(
    digits: str,
    punctuation_end: str = r"[\r\n]*",
    contraction: str = _CONTRACTION,
    spaces: str = _SPACES,
) -> str:
    """GPT-4's expression: contractions, letters, digits, punctuation, line ends, spaces."""
    return (
        (f"{contraction}|" if contraction else "")
        + rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        + rf"| ?[^\s\p{{L}}\p{{N}}]+{punctuation_end}|\s*[\r\n]+|{spaces}"
    )


def _o200k_pattern(
    digits: str, contraction: str = _CONTRACTION, without: str = "", end: str = r"[\r\n/]*"
) -> str:
    """o200k's expression: as GPT-4's, but a word also ends where lower case turns to upper.

    `without`: characters that are in no word; `end`: of punctuation.
    """
    suffix = f"{contraction}?" if contraction else ""
    both = rf"\p{{Lm}}\p{{Lo}}\p{{M}}{f'&&[^{without}]' if without else ''}"
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}{both}]", rf"[\p{{Ll}}{both}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+{end}|\s*[\r\n]+|{_SPACES}"
    )


_THREES, _SINGLE = r"\p{N}{1,3}", r"\p{N}"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3_TAIL = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
# From the end of a number on.
_THREES_FROM_THE_END = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_SPARK_TAIL = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}"
)
# Spaces in powers of two.
_HALVED_SPACES = "|".join(
    [*(rf"\s{{{1 << n}}}(?!\S)" for n in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s"]
)
# Scripts without spaces: Han, kana, Thai, Lao, Khmer, Burmese, Hangul.
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_CJK_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"
# The letters that DeepSeek's first vocabulary names one by one.
_DEEPSEEK_LETTERS = (
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """The cuts that a text gets before BPE merges it.

    Attributes:
      splits: Expressions applied one after the other, each to the pieces of the one before; both
        matches and what lies between them are pieces.
      byte_level: Pieces are respelled with GPT-2's letters for bytes; else they are UTF-8 with
        U+2581 for the space, and bytes that the vocabulary lacks are tokens of their own.
      whole_words: A piece that is an entry of the vocabulary is that token, whatever the merges.
      adds_bos: A prompt begins with the beginning-of-sequence token if the file does not say.
      drops_spaces: White space is no part of any piece, and no token.
    """

    splits: tuple[str, ...]
    byte_level: bool = True
    whole_words: bool = False
    adds_bos: bool = False
    drops_spaces: bool = False


_LLAMA3 = PreTokenizer((_gpt4_pattern(_THREES),), whole_words=True, adds_bos=True)
_GPT2_PRE = PreTokenizer((_GPT2,))
_DIGITS_FIRST = PreTokenizer((_SINGLE, _GPT2))
_QWEN2 = PreTokenizer((_gpt4_pattern(_SINGLE),))
_O200K = PreTokenizer((_o200k_pattern(_THREES),))
_DEEPSEEK3 = PreTokenizer((_THREES, _CJK, _DEEPSEEK3_TAIL))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}",
    )
)
# llama.cpp's `default`, for files of 2023 that name no pre-tokenizer.
_UNNAMED = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_RAW_LINES = PreTokenizer((r"[^\n]+|[\n]+",), byte_level=False, adds_bos=True)

_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", _UNNAMED),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3),
    ("glm4 glm5", PreTokenizer((_gpt4_pattern(_THREES),), whole_words=True)),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_gpt4_pattern(_THREES),))),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    (
        "qwen35",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}",
            )
        ),
    ),
    ("ufakzeka", PreTokenizer((_gpt4_pattern(_SINGLE, contraction=""),))),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _gpt4_pattern(_SINGLE)))),
    ("minicpm5", PreTokenizer((_THREES, _gpt4_pattern(r"\p{N}+")), whole_words=True)),
    (
        "seed-coder",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}",
            )
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
                rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
            )
        ),
    ),
    ("bailingmoe bailingmoe2 llada-moe", _BAILING),
    ("gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", _O200K),
    (
        "kimi-k2",
        PreTokenizer((r"\p{Han}+|" + _o200k_pattern(_THREES, without=r"\p{Han}", end=r"[\r\n]*"),)),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(?:\d{3})+(?!\d))"))),
    (
        "chameleon",
        PreTokenizer(
            (
                *("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", _SINGLE),
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            )
        ),
    ),
    ("afmoe", PreTokenizer((_THREES_FROM_THE_END, _ASIAN, _DEEPSEEK3_TAIL))),
    ("spark2_5", PreTokenizer((_THREES, _CJK, _SPARK_TAIL, _SINGLE))),
    ("jais-2", PreTokenizer((_gpt4_pattern(_THREES, spaces=_HALVED_SPACES),))),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _o200k_pattern(_THREES)))),
    (
        "tekken",
        PreTokenizer((_o200k_pattern(_SINGLE, contraction=""),), whole_words=True, adds_bos=True),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK,
                _o200k_pattern(_SINGLE),
            ),
            whole_words=True,
        ),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?{_DEEPSEEK_LETTERS}+",
                r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                r"\s+$",
                _CJK_AND_HANGUL,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, _SINGLE)),
    ),
    (
        "falcon",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGITS_FIRST),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4"
        " modern-bert jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
        _GPT2_PRE,
    ),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, _SINGLE))),
    ("gemma4", _RAW_LINES),
    ("granite-embed-multi-311m sarvam-moe", PreTokenizer(_RAW_LINES.splits, byte_level=False)),
    ("whitespace", PreTokenizer((), byte_level=False, drops_spaces=True)),
)
PRE_TOKENIZERS = {name: pre for names, pre in _GROUPS for name in names.split()}


def pre_tokenizer_by_name(name: str) -> PreTokenizer:
    """Return the pre-tokenizer that a GGUF file calls `name`.

    Raises:
      BadInput: The name is unknown; wrong splits would give wrong tokens without a word.
    """
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise BadInput(
            f"tokenizer.ggml.pre: '{name}' is no pre-tokenizer known here; known are {known}"
        ) from None
