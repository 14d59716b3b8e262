"""A GGUF file's vocabulary: its tokens, their kinds, and the ids with a meaning of their own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orinllm.errors import BadInput

# tokenizer.ggml.token_type (llama.cpp, include/llama.h, enum llama_token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Texts of tokens that end an answer, whatever the file's eos is (llama.cpp, src/llama-vocab.cpp,
# `special_eog_ids`).
_END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "[e~[", "<｜end▁of▁sentence｜>"),
    }
)
# Fill-in-the-middle: padding, the next repository and the next file end an answer too; the key of
# the file comes first, then the texts.
_FIM_ENDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("fim_pad_token_id", frozenset(["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"])),
    (
        "fim_rep_token_id",
        frozenset(["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    ),
    ("fim_sep_token_id", frozenset(["<|file_sep|>"])),
)
_KNOWN_TEXTS = _END_TEXTS.union(*(texts for _, texts in _FIM_ENDS))
# Ids of bos, eos and unknown by model, if the file does not say: SentencePiece's and BERT's own.
_DEFAULT_IDS: dict[str, tuple[int | None, int | None, int | None]] = {
    "llama": (1, 2, 0),
    "bert": (101, None, 100),
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file.

    Attributes:
      model: Kind of tokenizer: "gpt2", "whitespace", "gemma4", "llama" or "bert".
      pre: Name of the pre-tokenizer; empty if the file has none.
      name: The model's name (`general.name`), lower case; one family is known only by it.
      tokens: Text of each token as the file spells it, by id.
      kinds: `NORMAL` to `BYTE` of each token.
      scores: Score of each token, or empty.
      merges: BPE's pairs "left right", best first, or empty.
      bos_id, eos_id, unknown_id: Special ids; None if the file has none.
      end_ids: Every token that ends an answer.
      suppressed: Tokens that no answer has, such as those that stand for pictures.
      lowercase, strip_accents: Whether a text is made so; None: as the kind of tokenizer does.
    """

    model: str
    pre: str
    name: str
    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: frozenset[int]
    suppressed: frozenset[int] = frozenset()
    lowercase: bool | None = None
    strip_accents: bool | None = None

    @functools.cached_property
    def unusual_ids(self) -> list[int]:
        """Ids of tokens that are not normal ones."""
        return [i for i, kind in enumerate(self.kinds) if kind != NORMAL]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Read the vocabulary from a file's key-values.

        Raises:
          BadInput: A key is missing, has another length than the tokens, or names an id beyond.
        """
        tokens = _checked_array(metadata, "tokens", str)
        if not tokens:
            raise BadInput("tokenizer.ggml.tokens: no vocabulary in the file; a model needs one")
        # A token without text cannot be in a text; llama.cpp gives it this name.
        if "" in tokens:
            tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        kinds = _checked_array(metadata, "token_type", int, len(tokens)) or [NORMAL] * len(tokens)
        model = str(metadata.get("tokenizer.ggml.model", ""))
        bos, eos, unknown = _DEFAULT_IDS.get(model, (None, None, None))
        ids = {
            key: _special_id(metadata, f"{key}_token_id", default, len(tokens))
            for key, default in (("bos", bos), ("eos", eos), ("unknown", unknown))
        }
        return cls(
            model=model,
            pre=str(metadata.get("tokenizer.ggml.pre", "")),
            name=str(metadata.get("general.name", "")).lower(),
            tokens=tokens,
            kinds=kinds,
            scores=_checked_array(metadata, "scores", float, len(tokens)),
            merges=_checked_array(metadata, "merges", str),
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            unknown_id=ids["unknown"],
            end_ids=_end_ids(metadata, tokens, ids["eos"]),
            suppressed=frozenset(_checked_array(metadata, "suppress_tokens", int))
            & {*range(len(tokens))},
            lowercase=_normalizer_flag(metadata, "lowercase"),
            strip_accents=_normalizer_flag(metadata, "strip_accents"),
        )


def _checked_array(
    metadata: Mapping[str, Any], key: str, kind: type, length: int | None = None
) -> list[Any]:
    """Return an array of the tokenizer's keys, empty if absent; `length` is what it must have."""
    values = metadata.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(values, list):
        raise BadInput(f"tokenizer.ggml.{key}: {type(values).__name__}, an array is needed")
    if values and not isinstance(values[0], kind):  # all of an array have one type
        found, needed = type(values[0]).__name__, kind.__name__
        raise BadInput(f"tokenizer.ggml.{key}: an array of {found}, one of {needed} is needed")
    if values and length is not None and len(values) != length:
        raise BadInput(f"tokenizer.ggml.{key}: {len(values)} values for {length} tokens")
    return values


def _normalizer_flag(metadata: Mapping[str, Any], key: str) -> bool | None:
    value = metadata.get(f"tokenizer.ggml.normalizer.{key}")
    if value is None or isinstance(value, bool):
        return value
    raise BadInput(f"tokenizer.ggml.normalizer.{key}: {value!r}, true or false is needed")


def _special_id(
    metadata: Mapping[str, Any], key: str, default: int | None, count: int
) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise BadInput(f"tokenizer.ggml.{key}: {value}, an id from 0 to {count - 1} is needed")
    return value


def _end_ids(metadata: Mapping[str, Any], tokens: Sequence[str], eos: int | None) -> frozenset[int]:
    """Return the ids that end an answer: those of the file's keys and those known by their text."""
    there = _KNOWN_TEXTS.intersection(tokens)
    known = [(token, i) for i, token in enumerate(tokens) if token in there]
    ends = {i for token, i in known if token in _END_TEXTS}
    ends |= set() if eos is None else {eos}
    for key in ("eot_token_id", "eom_token_id"):
        found = _special_id(metadata, key, None, len(tokens))
        ends |= set() if found is None else {found}
    for key, texts in _FIM_ENDS:
        found = _special_id(metadata, key, None, len(tokens))
        if found is None:
            found = next((i for token, i in known if token in texts), None)
        ends |= set() if found is None else {found}
    present = {tokens[i] for i in ends}
    # Harmony (gpt-oss) and Solar end a message, not the answer, with <|end|>; in Gemma 4 and PLaMo
    # </s> is a word like any other.
    harmony = "<|return|>" in present and present & {"<|call|>", "<|calls|>"}
    solar = "<|flush|>" in present and present & {"<|call|>", "<|calls|>"}
    no_ends = {"<|end|>"} if harmony or solar else set()
    no_ends |= {"</s>"} if present & {"<|tool_response>", "<|plamo:eos|>"} else set()
    return frozenset(i for i in ends if tokens[i] not in no_ends)
