"""Text to tokens and back, as the vocabulary of a GGUF file has it.

The vocabulary becomes an object of the `tokenizers` library, which cuts and merges; this module
does what comes before and after: tokens that match in the text as a whole, the space that
SentencePiece puts before a text, and the bytes of each token. The ids are llama.cpp's, with two
exceptions that are meant: a text can never become a control token by merges, and a text is cut as
the model's own expressions say where llama.cpp cuts it in another way (`pretokenizers`).
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Library

from orinllm.errors import BadInput
from orinllm.text.library_tokenizers import build_bpe, build_sentencepiece, build_word_piece
from orinllm.text.pretokenizers import PreTokenizer, pre_tokenizer_by_name
from orinllm.text.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

# Stands in the middle of a control token's text that a user wrote, so that it does not match. It
# is a noncharacter: Unicode keeps it for a program's own use, and no text has it.
GUARD = "\ufdd0"
_SPACE = "\u2581"  # SentencePiece's sign for a space
_C_SPACES = " \t\n\v\f\r"  # what C's isspace strips


def _latin1_of_gpt2_letters() -> dict[int, str]:
    """Return GPT-2's letters for bytes as those of Latin-1; no other character is one of these.

    Printable bytes are themselves.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return (
        {byte: chr(byte) for byte in printable}
        | dict.fromkeys(others, "Ā")
        | {0x100 + i: chr(byte) for i, byte in enumerate(others)}
    )


_LATIN = _latin1_of_gpt2_letters()


class Tokenizer:
    """The tokenizer of a model.

    Attributes:
      add_eos: Whether a text that is whole, and not to be continued, ends with `eos_id`.
      add_bos: Whether a prompt begins with `bos_id`; `encode` does not put it there.
      bos_id, eos_id: Ids that begin and end a text; None if the vocabulary has none.
      end_ids: Every token that ends an answer.
      suppressed: Tokens that no answer has.
      vocab_size: Count of tokens.
      control_texts: Texts of the tokens that only a template may write, longest first.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.end_ids, self.suppressed = vocabulary.end_ids, vocabulary.suppressed
        self.vocab_size = len(vocabulary.tokens)
        self._pre: PreTokenizer | None = None
        self._library, adds_bos, prefix = self._library_and_defaults()
        self.add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
        if vocabulary.model == "gemma4":  # files of the first days say no, and answer nonsense
            self.add_bos = True
        if self.add_bos and self.bos_id is None:
            raise BadInput(
                "tokenizer.ggml.bos_token_id: missing, but prompts of this model begin with it"
            )
        self.add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
        self._space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", prefix))
        self._whole, self._user_defined = self._whole_and_user_tokens()
        controls = (t for t in self._whole if t not in self._user_defined)
        self.control_texts = sorted(controls, key=len, reverse=True)
        self._control_ids = frozenset(self._whole[text] for text in self.control_texts)
        self._control_pattern = _any_of_pattern(self.control_texts)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer from a GGUF file's key-values (lists for arrays).

        Raises:
          BadInput: The vocabulary is incomplete, or of a kind or pre-tokenizer not known here.
        """
        return cls(Vocabulary.from_metadata(metadata), metadata)

    def _library_and_defaults(self) -> tuple[Library, bool, bool]:
        """Return what splits text, and the kind's defaults: begin with bos, prefix a space."""
        vocabulary = self._vocabulary
        if vocabulary.model == "llama":
            return build_sentencepiece(vocabulary), True, True
        if vocabulary.model == "bert":
            return build_word_piece(vocabulary), True, False
        if vocabulary.model in ("gpt2", "gemma4", "whitespace"):
            one = vocabulary.model != "gpt2"
            name = vocabulary.model if one else vocabulary.pre or "default"
            self._pre = pre_tokenizer_by_name(name)
            return build_bpe(vocabulary, self._pre), self._pre.adds_bos, False
        raise BadInput(
            f"tokenizer.ggml.model: '{vocabulary.model}' is not supported; supported are gpt2"
            " (byte-level BPE), llama (SentencePiece), gemma4, whitespace and bert"
        )

    def _whole_and_user_tokens(self) -> tuple[dict[str, int], frozenset[str]]:
        """Return the tokens that match in a text as a whole, and which of them always do."""
        tokens, kinds = self._vocabulary.tokens, self._vocabulary.kinds
        whole_kinds = (CONTROL, UNKNOWN, USER_DEFINED)
        special = {i for i in self._vocabulary.unusual_ids if kinds[i] in whole_kinds}
        whole = {tokens[i]: i for i in sorted(special | self.end_ids)}
        always = {tokens[i] for i in special - self.end_ids if kinds[i] == USER_DEFINED}
        return whole, frozenset(always)

    @functools.cached_property
    def _whole_finder_by_special(self) -> dict[bool, WholeTokenFinder]:
        return {
            special: WholeTokenFinder(t for t in self._whole if special or t in self._user_defined)
            for special in (False, True)
        }

    def encode_with_ends(self, text: str) -> list[int]:
        """Return the ids of a text with what begins it, and ends it, in this model.

        Raises BadInput as `encode` does.
        """
        first = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        last = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        return first + self.encode(text) + last

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text, without a token that begins it.

        Args:
          text: Any text; what a user wrote is encoded with `special` False.
          special: Control tokens match too; `guard_control_tokens` protects what a user wrote.

        Raises:
          BadInput: The text holds half of a surrogate pair, which no encoding can carry.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInput(
                f"text: half of a surrogate pair at character {error.start}; it is no Unicode text"
            ) from None
        ids: list[int] = []
        for piece, token in self._whole_finder_by_special[special].split_at_tokens(
            text, self._right_stripping_tokens
        ):
            if token:
                ids.append(self._whole[piece])
            else:
                words = piece.replace(GUARD, "") if special else piece
                # A text is the first part, or behind a token.
                words = " " + words if self._space_prefix else words
                ids += self._library.encode(words, add_special_tokens=False).ids
        return ids

    def guard_control_tokens(self, text: str) -> str:
        """Return a text in which no control token matches, for `encode` with `special`.

        A template's result is one text of the template's control tokens and of words that users
        wrote. What users wrote goes through here first; `encode` takes the guards out again.
        """
        return self._control_pattern.sub(lambda found: found[0][0] + GUARD + found[0][1:], text)

    @functools.cached_property
    def _right_stripping_tokens(self) -> frozenset[str]:
        """Tokens that swallow the white space after them.

        Phi-3's control tokens do; no key of the file says so (llama.cpp, src/llama-vocab.cpp,
        "set attributes by model/tokenizer/architecture name").
        """
        if not re.search(r"phi-?3", self._vocabulary.name):
            return frozenset()
        return frozenset(self._whole) - {"<unk>", "<s>", "<|endoftext|>"}

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; a control token's are its text."""
        if not 0 <= token < self.vocab_size:
            raise BadInput(f"token {token}: an id from 0 to {self.vocab_size - 1} is needed")
        text, kind = self._vocabulary.tokens[token], self._vocabulary.kinds[token]
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        if text in self._whole:
            return text.encode(errors="surrogateescape")
        if self._pre and self._pre.byte_level:
            try:
                return text.translate(_LATIN).encode("latin-1")
            except UnicodeEncodeError:  # some files spell a word out instead of in such letters
                return text.encode(errors="surrogateescape")
        return text.replace(_SPACE, " ").encode(errors="surrogateescape")

    @functools.cached_property
    def longest_token_byte_count(self) -> int:
        """Bytes of the longest token: a text has at least its bytes divided by them tokens."""
        return max(len(self.token_bytes(token)) for token in range(self.vocab_size))

    def is_control(self, token: int) -> bool:
        """Say if a token is one that only templates write and that no reader of an answer sees."""
        return token in self._control_ids

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Return the text of tokens that stand at the beginning of a text.

        Args:
          tokens: The ids.
          special: Control tokens appear with their text; else they are left out.
        """
        stream = self.new_stream(special=special)
        text = "".join([stream.push(token) for token in tokens]) + stream.flush()
        return text.removeprefix(" ") if self._space_prefix else text

    def new_stream(self, *, special: bool = False) -> TokenStream:
        """Return a decoder for tokens that come one by one; `special` is as in `decode`.

        For the answers of a chat see `orinllm.text.answer`: in some families control tokens mark
        reasoning and calls of tools.
        """
        return TokenStream(self, special)


class TokenStream:
    """Decodes an answer while it grows, and never gives half a character.

    Bytes that are no UTF-8 become U+FFFD, as soon as it is clear that no token can mend them.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Take the next token; return the characters that are now complete, perhaps none."""
        if not self._special and self._tokenizer.is_control(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """End the text; return what is left of an incomplete character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WholeTokenFinder:
    """Finds tokens that match as a whole: the longest first, then the leftmost, as llama.cpp."""

    _KEY = 3  # characters of a token that are looked up before the token itself is searched

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted(
            texts, key=lambda text: (-len(text.encode(errors="surrogateescape")), text)
        )
        self._lengths = sorted({min(len(text), self._KEY) for text in ordered})
        self._by_key: dict[str, list[tuple[int, str]]] = {}
        for rank, text in enumerate(ordered):
            self._by_key.setdefault(text[: self._KEY], []).append((rank, text))

    def _candidates(self, text: str) -> list[str]:
        """Return the tokens that may be in the text, in the order in which they match."""
        found: list[tuple[int, str]] = []
        for length in self._lengths:
            grams = {text[i : i + length] for i in range(len(text) - length + 1)}
            for key in grams & self._by_key.keys():
                found += self._by_key[key]
        return [token for _, token in sorted(found) if token in text]

    def split_at_tokens(
        self, text: str, strips_right: frozenset[str]
    ) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a text in order, each with True if it is a token, False if text."""
        parts = [(text, False)] if text else []
        for token in self._candidates(text):
            parts = [
                new
                for part, whole in parts
                for new in (
                    [(part, whole)] if whole else _cut_around(part, token, token in strips_right)
                )
            ]
        yield from parts


def _cut_around(text: str, token: str, strips_right: bool) -> list[tuple[str, bool]]:
    """Cut a text at each occurrence of a token."""
    first, *rest = text.split(token)
    parts = [(first, False)]
    for after in rest:
        parts += [(token, True), (after.lstrip(_C_SPACES) if strips_right else after, False)]
    return [(part, whole) for part, whole in parts if part]


def _any_of_pattern(texts: Sequence[str]) -> re.Pattern[str]:
    """Return an expression that matches any of the texts; none matches if there are none."""
    return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")
