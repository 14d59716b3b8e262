"""Vocabularies as objects of the `tokenizers` library: text without whole tokens in, ids out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE, WordPiece

from orinllm.errors import BadInput
from orinllm.text.pretokenizers import PreTokenizer
from orinllm.text.vocabulary import BYTE, CONTROL, UNKNOWN, Vocabulary

_SPACE = "\u2581"
# A token whose bytes in the file are no UTF-8; no text has it.
_SURROGATE = re.compile("[\ud800-\udfff]")


def _mergeable_words(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the entries that merges may make: no control token comes out of a user's text."""
    tokens, kinds = vocabulary.tokens, vocabulary.kinds
    left_out = {i for i in vocabulary.unusual_ids if kinds[i] in (CONTROL, UNKNOWN)}
    left_out |= {i for i in vocabulary.end_ids if kinds[i] != BYTE}
    if _SURROGATE.search("".join(tokens)):
        left_out |= {i for i, token in enumerate(tokens) if _SURROGATE.search(token)}
    words = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(words) < len(tokens):  # a text that stands twice: the last one that is a word
        return {token: i for i, token in enumerate(tokens) if i not in left_out}
    for i in left_out:
        del words[tokens[i]]
    return words


def _merge_pairs(merges: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Return the two parts of each merge; raises BadInput for a merge that has not two."""
    if set(map(str.count, merges, itertools.repeat(" "))) == {1}:
        parts = " ".join(merges).split(" ")
    else:
        parts = list(itertools.chain.from_iterable(map(_merge_halves, merges)))
    if not all(parts):
        i = parts.index("") // 2
        raise BadInput(
            f"tokenizer.ggml.merges: entry {i} is {merges[i]!r}; two parts with a space between "
            "them are needed"
        )
    return zip(parts[::2], parts[1::2], strict=True)


def _merge_halves(merge: str) -> tuple[str, str]:
    """Cut a merge at its space; a space may itself begin the left part."""
    at = merge.find(" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")


def build_bpe(vocabulary: Vocabulary, pre: PreTokenizer) -> Library:
    """Build BPE with the file's own merges.

    Raises:
      BadInput: The file has no merges, or one that is no pair.
    """
    if not vocabulary.merges:
        raise BadInput("tokenizer.ggml.merges: missing; a gpt2 or gemma4 vocabulary needs them")
    words = _mergeable_words(vocabulary)
    pairs = [
        (left, right)
        for left, right in _merge_pairs(vocabulary.merges)
        if left in words and right in words and left + right in words
    ]
    library = Library(
        BPE(words, pairs, byte_fallback=not pre.byte_level, ignore_merges=pre.whole_words)
    )
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits
    ]
    if pre.drops_spaces:
        steps.append(pre_tokenizers.WhitespaceSplit())
        if vocabulary.lowercase:
            library.normalizer = normalizers.Lowercase()
    elif pre.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    else:
        library.normalizer = normalizers.Replace(" ", _SPACE)
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return library


def build_sentencepiece(vocabulary: Vocabulary) -> Library:
    """Build SentencePiece's BPE: the file has scores, from which the merges follow.

    SentencePiece joins the two neighbours whose union has the best score, the leftmost first.

    Raises:
      BadInput: The file has no scores.
    """
    if not vocabulary.scores:
        raise BadInput("tokenizer.ggml.scores: missing; a llama vocabulary needs them")
    words = _mergeable_words(vocabulary)
    unknown = vocabulary.tokens[vocabulary.unknown_id or 0]
    merges = list(_merges_by_score(vocabulary, words))
    words.setdefault(unknown, vocabulary.unknown_id or 0)
    library = Library(BPE(words, merges, byte_fallback=True, unk_token=unknown, fuse_unk=False))
    library.normalizer = normalizers.Replace(" ", _SPACE)
    return library


def _merges_by_score(vocabulary: Vocabulary, words: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the pairs that make a token, best first.

    Of unions with one score the leftmost comes first, which ranks of pairs cannot say. Published
    vocabularies give one score to several tokens only for runs of spaces; there the longer first
    does the same: a run grows from its left end.
    """
    ranked = []
    for token, i in words.items():
        if vocabulary.kinds[i] == BYTE:
            continue
        for at in range(1, len(token)):
            if token[:at] in words and token[at:] in words:
                key = (-vocabulary.scores[i], -len(token), i)
                ranked.append((key, (token[:at], token[at:])))
    ranked.sort()
    return (pair for _, pair in ranked)


def build_word_piece(vocabulary: Vocabulary) -> Library:
    """Build WordPiece, the tokenizer of embedding models of the BERT kind.

    As BERT's own, of accents it strips nonspacing marks alone, and a word of more than 100
    characters is unknown. llama.cpp strips spacing marks, too, and vowels of Hangul.

    The file marks beginnings of words with U+2581, the library their continuations with ##.
    """
    words = {
        token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}": i
        for token, i in _mergeable_words(vocabulary).items()
    }
    unknown = vocabulary.tokens[vocabulary.unknown_id or 0]
    words[unknown] = vocabulary.unknown_id or 0
    library = Library(WordPiece(words, unk_token=unknown, max_input_chars_per_word=100))
    library.normalizer = normalizers.BertNormalizer(
        lowercase=vocabulary.lowercase is not False, strip_accents=vocabulary.strip_accents
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return library
