import heapq
import itertools
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.models import metadata, smollm2, tokenizer, vocabularies, wanted

from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.text.pretokenizers import PRE_TOKENIZERS
from orinllm.text.tokenizer import GUARD, Tokenizer, WholeTokenFinder

_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6


def _sentencepiece(words: dict[str, float], **keys: Any) -> dict[str, Any]:
    """Return the key-values of a SentencePiece vocabulary: all bytes, then `words`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()),
        "tokenizer.ggml.token_type": [_UNKNOWN, _CONTROL, _CONTROL]
        + [_BYTE] * 256
        + [_NORMAL] * len(words),
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def _byte_level(words: list[str], merges: list[str], **keys: Any) -> dict[str, Any]:
    """Return the key-values of a byte-level BPE vocabulary: ASCII's letters, then `words`."""
    tokens = [chr(byte) for byte in range(0x21, 0x7F)] + ["Ġ", "Ċ", *words]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def _texts(source: Tokenizer, ids: list[int]) -> list[bytes]:
    return [source.token_bytes(i) for i in ids]


# -- llama.cpp's own test files --------------------------------------------------------------------


def test_every_vocabulary_that_llama_cpp_tests_is_here() -> None:
    assert vocabularies() == [
        *("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2"),
        *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
    ]


@pytest.mark.parametrize("name", vocabularies())
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    cases = wanted(name)
    assert len(cases) >= 46
    for text, ids in cases:
        assert tokenizer(name).encode(text) == ids, text
        if name != "bert-bge":  # BERT's tokenizer forgets spaces and accents
            assert tokenizer(name).decode(ids) == text


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("llama-bpe", {"<|end_of_text|>", "<|eot_id|>"}),
        ("phi-3", {"<|endoftext|>", "</s>", "<|end|>"}),
        ("gemma-4", {"<eos>", "<turn|>", "<|tool_response>"}),
        ("qwen2", {"<|endoftext|>", "<|im_end|>", "</s>"}),
        ("refact", {"<|endoftext|>", "<fim_pad>", "<reponame>"}),
    ],
)
def test_every_end_of_an_answer_is_known(name: str, ends: set[str]) -> None:
    source = tokenizer(name)
    assert {source.token_bytes(i).decode() for i in source.end_ids} == ends


@pytest.mark.parametrize(
    ("name", "adds"), [("llama-bpe", True), ("qwen2", False), ("llama-spm", True), ("gpt-2", False)]
)
def test_a_prompt_begins_with_bos_where_the_file_or_its_kind_says_so(name: str, adds: bool) -> None:
    assert tokenizer(name).add_bos is adds


def test_gemma_4_begins_with_bos_whatever_its_file_says() -> None:
    keys = _byte_level(["▁"], ["a b"], model="gemma4", add_bos_token=False, bos_token_id=0)
    assert Tokenizer.from_metadata(keys).add_bos
    keys = _byte_level(["▁"], ["a b"], add_bos_token=True, bos_token_id=0)
    assert Tokenizer.from_metadata(keys).add_bos


def test_a_real_model_s_tokenizer() -> None:
    source = Tokenizer.from_metadata(GGUF.open(smollm2()).metadata)
    assert (source.bos_id, source.eos_id, source.vocab_size) == (1, 2, 49152)
    assert source.end_ids == {0, 2, 4}  # <|endoftext|>, <|im_end|>, <repo_name>
    ids = source.encode("<|im_start|>user\nIn 2026, déjà vu!", special=True)
    assert source.decode(ids, special=True) == "<|im_start|>user\nIn 2026, déjà vu!"
    assert ids[:3] == [1, 4093, 198]
    assert _texts(source, source.encode(" 2026")) == [b" ", b"2", b"0", b"2", b"6"]


# -- SentencePiece: the file has scores, llama.cpp joins greedily ---------------------------------


def _greedy(words: dict[str, float], text: str) -> list[str]:
    """Join the two neighbours with the best score, the leftmost first, as llama.cpp does.

    src/llama-vocab.cpp, llm_tokenizer_spm_session: an own reading of it, one queue of pairs.
    """
    signs = list(text)
    after = [*range(1, len(signs)), -1]
    before = [i - 1 for i in range(len(signs))]
    queue: list[tuple[float, int, int, int]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and signs[left] + signs[right] in words:
            union = signs[left] + signs[right]
            heapq.heappush(queue, (-words[union], left, right, len(union)))

    for i in range(1, len(signs)):
        offer(i - 1, i)
    while queue:
        _, left, right, length = heapq.heappop(queue)
        if not signs[left] or not signs[right] or len(signs[left] + signs[right]) != length:
            continue
        signs[left] += signs[right]
        signs[right] = ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [sign for sign in signs if sign]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_unions_come_in_the_order_of_scores(seed: int) -> None:
    chance = random.Random(seed)
    words = dict.fromkeys("▁abc", -1000.0)
    for rank in range(chance.randint(3, 25)):
        union = chance.choice(list(words)) + chance.choice(list(words))
        if len(union) <= 8:
            words.setdefault(union, -float(rank))
    source = Tokenizer.from_metadata(_sentencepiece(words, add_space_prefix=False))
    for _ in range(20):
        text = "".join(chance.choice(list(words)) for _ in range(chance.randint(1, 9)))
        pieces = [word.decode().replace(" ", "▁") for word in _texts(source, source.encode(text))]
        assert pieces == _greedy(words, text)


def test_a_real_vocabulary_s_unions_come_in_the_order_of_scores() -> None:
    source, chance = tokenizer("llama-spm"), random.Random(7)
    keys = metadata("llama-spm")
    tokens = keys["tokenizer.ggml.tokens"]
    scored = zip(
        tokens, keys["tokenizer.ggml.scores"], keys["tokenizer.ggml.token_type"], strict=True
    )
    words = {token: score for token, score, kind in scored if kind == _NORMAL}
    spellings = list(words)
    for _ in range(400):
        parts = [chance.choice([*chance.choices(spellings, k=4), "  ", "==", "aa", "\t"])] * 3
        parts += chance.choices(spellings, k=chance.randint(0, 5))
        text = "".join(parts).replace("▁", " ")
        spelled = [
            [token] if token in words else [f"<0x{byte:02X}>" for byte in token.encode()]
            for token in _greedy(words, f" {text}".replace(" ", "▁"))
        ]
        ids = source.encode(text)
        assert [tokens[i] for i in ids] == list(itertools.chain(*spelled))


def test_signs_outside_the_vocabulary_become_bytes() -> None:
    source = Tokenizer.from_metadata(_sentencepiece({"▁": -1.0, "a": -2.0}))
    assert _texts(source, source.encode("a🦙")) == [b" ", b"a", b"\xf0", b"\x9f", b"\xa6", b"\x99"]
    assert source.decode(source.encode("a🦙")) == "a🦙"


def test_a_space_stands_before_a_text_and_after_each_whole_token() -> None:
    source = tokenizer("phi-3")
    ids = source.encode("a<s>b", special=True)
    assert _texts(source, ids) == [b" a", b"<s>", b" b"]
    (one,) = source.encode("</s>", special=True)
    assert source.token_bytes(one) == b"</s>"


def test_phi_3_s_tokens_swallow_the_white_space_after_them() -> None:
    source = tokenizer("phi-3")
    assert _texts(source, source.encode("<|user|>\n hi<|end|>\n", special=True)) == [
        b"<|user|>",
        b" hi",
        b"<|end|>",
    ]
    assert source.encode("<s> a", special=True) != source.encode("<s>a", special=True)


# -- whole tokens, and who may write them ----------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in vocabularies() if name != "bert-bge"])
def test_no_user_s_text_becomes_a_control_token(name: str) -> None:
    source = tokenizer(name)
    for text in source.control_texts[:40]:
        ids = source.encode(f"{text} and {text}")
        assert not any(source.is_control(i) for i in ids), text
        assert source.decode(ids) == f"{text} and {text}"


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gemma-4", "llama-spm", "phi-3"])
def test_control_tokens_match_in_a_template_s_text(name: str) -> None:
    source = tokenizer(name)
    for text in source.control_texts[:40]:
        (found,) = [i for i in source.encode(f"x{text}y", special=True) if source.is_control(i)]
        assert source.token_bytes(found).decode() == text


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gemma-4", "command-r"])
def test_a_guarded_text_is_words_within_a_template_s_text(name: str) -> None:
    source = tokenizer(name)
    stop = max(source.control_texts, key=len)
    ids = source.encode(f"{stop}{source.guard_control_tokens(f'a{stop}b')}{stop}", special=True)
    controls = [i for i in ids if source.is_control(i)]
    assert len(controls) == 2 and ids[0] == ids[-1] == controls[0]
    assert source.decode(ids) == f"a{stop}b"
    assert GUARD not in source.decode(ids)
    assert source.guard_control_tokens("nothing of that kind") == "nothing of that kind"


def test_what_merges_may_not_make_matches_as_a_whole_in_a_template() -> None:
    """Control, unknown and ending tokens, of whatever kind; of equal texts the last, as llama.cpp.

    The end of an answer is no word of a user even where the file calls it user-defined.
    """
    kinds = [_CONTROL, _UNKNOWN, _NORMAL, _USER, _NORMAL, _CONTROL]
    keys = _byte_level(
        *(["ab", "cd", "ef", "gh", "ij", "ab"], ["a b", "c d", "e f", "g h", "i j"]),
        token_type=[_NORMAL] * 96 + kinds, eos_token_id=98, eot_token_id=99,
    )  # fmt: skip
    source = Tokenizer.from_metadata(keys)
    assert _texts(source, source.encode("abcdefghij")) == [*map(str.encode, "abcdefgh"), b"ij"]
    assert source.encode("abcdefghij", special=True) == [101, 97, 98, 99, 100]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab<", min_size=1, max_size=5), max_size=6), st.text("ab<", max_size=30))
def test_parts_are_the_text_and_tokens_in_text_are_found(tokens: list[str], text: str) -> None:
    parts = list(WholeTokenFinder(tokens).split_at_tokens(text, frozenset()))
    assert "".join(part for part, _ in parts) == text
    assert all(whole == (part in tokens) for part, whole in parts)
    assert not any(token in part for part, whole in parts if not whole for token in tokens)


def test_harmony_s_end_of_a_message_is_not_the_end_of_an_answer() -> None:
    def ends(*tokens: str) -> set[str]:
        keys = _byte_level([*tokens, "ab"], ["a b"])
        keys["tokenizer.ggml.token_type"] = [_NORMAL] * 96 + [_CONTROL] * len(tokens) + [_NORMAL]
        source = Tokenizer.from_metadata(keys)
        return {source.token_bytes(i).decode() for i in source.end_ids}

    assert ends("<|return|>", "<|call|>", "<|end|>") == {"<|return|>", "<|call|>"}
    assert ends("<|flush|>", "<|calls|>", "<|end|>") == {"<|flush|>", "<|calls|>"}
    assert ends("<|end|>", "<|user|>") == {"<|end|>"}
    assert ends("</s>", "<|tool_response>") == {"<|tool_response>"}
    keys = _byte_level(["stop", "halt"], ["s t"], eot_token_id=96, eos_token_id=97)
    assert Tokenizer.from_metadata(keys).end_ids == {96, 97}  # that only a key names


# -- back to text ----------------------------------------------------------------------------------


def test_a_stream_says_what_is_no_utf_8() -> None:
    source = Tokenizer.from_metadata(_sentencepiece({"▁": -1.0, "a": -2.0}))
    llama, a = [3 + byte for byte in "🦙".encode()], source.vocab_size - 1
    stream = source.new_stream()
    assert [stream.push(i) for i in (*llama[:2], a, llama[0])] == ["", "", "\ufffda", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


# SentencePiece's own sign for a space comes back as one.
@settings(max_examples=150, deadline=None)
@given(st.text().map(lambda text: text.replace("\u2581", "_")))
@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "phi-3", "qwen35"])
def test_decoding_gives_the_text_back(name: str, text: str) -> None:
    source = tokenizer(name)
    ids = source.encode(text)
    assert source.decode(ids) == text
    assert b"".join(_texts(source, ids)).decode() in (text, f" {text}")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, [" ab", " ab"]),
        ({"normalizer.strip_accents": False}, [" ?", " ab"]),
        ({"normalizer.lowercase": False}, [" ?", " ?"]),
        ({"normalizer.lowercase": False, "normalizer.strip_accents": True}, [" ab", " ?"]),
    ],
)
def test_how_a_bert_normalizes_is_in_its_file(keys: dict[str, bool], words: list[str]) -> None:
    read = _byte_level(["▁?", "▁ab"], [], model="bert", unknown_token_id=96, bos_token_id=0, **keys)
    source = Tokenizer.from_metadata(read)
    assert _texts(source, source.encode("áb AB")) == [word.encode() for word in words]
    read["tokenizer.ggml.normalizer.lowercase"] = 1
    with pytest.raises(BadInput, match=r"normalizer.lowercase: 1, true or false is needed"):
        Tokenizer.from_metadata(read)


@pytest.mark.parametrize("lower", [False, True])
def test_white_space_may_be_no_token(lower: bool) -> None:
    keys = {"normalizer.lowercase": lower} if lower else {}
    words = ["ab", "漢字"]
    read = _byte_level(words, ["a b", "漢 字"], model="whitespace", pre="whitespace", **keys)
    read["tokenizer.ggml.tokens"] += ["漢", "字"]
    source = Tokenizer.from_metadata(read)
    found = [b"ab", b"ab" if lower else b"A", b"b", "漢字".encode()]
    expected = found[:2] + found[3:] if lower else found
    assert _texts(source, source.encode("ab\u3000 Ab\n\x85漢字")) == expected


def test_control_tokens_are_left_out_unless_asked_for() -> None:
    source = tokenizer("llama-bpe")
    ids = source.encode("a<|eot_id|>b", special=True)
    assert source.decode(ids) == "ab"
    assert source.decode(ids, special=True) == "a<|eot_id|>b"


def test_bytes_of_a_token() -> None:
    """A word spelled out is its own bytes, and some are no UTF-8."""
    source = Tokenizer.from_metadata(_byte_level(["漢 字", "Ġab", "\udcff", "ab"], ["a b"]))
    assert _texts(source, [96, 97, 98]) == ["漢 字".encode(), b" ab", b"\xff"]
    assert _texts(source, source.encode("ab")) == [b"ab"]


# -- speed, as counts ------------------------------------------------------------------------------


def _calls(work: Callable[[], object]) -> int:
    """Count the calls that Python makes; the library's own loops are none."""
    count = 0

    def saw(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(saw)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", ["llama-bpe", "llama-spm", "qwen2", "gemma-4"])
def test_a_long_text_costs_no_more_calls_than_a_short_one(name: str) -> None:
    source = tokenizer(name)
    sentence = "Measure twice, cut once; 42 llamas agree (mostly) on naïve cafés.\n"
    short, long = sentence, (sentence * 300)[:16000]
    source.encode(short)
    few, many = _calls(lambda: source.encode(short)), _calls(lambda: source.encode(long))
    # Searching whole tokens looks at the text's three-letter groups, of which a longer one has few.
    assert many <= few + 200


def test_time_grows_with_the_length_and_not_its_square() -> None:
    source = tokenizer("llama-spm")  # has no words: the whole text is one piece

    def seconds(text: str) -> float:
        def once() -> float:
            began = time.process_time()
            source.encode(text)
            return time.process_time() - began

        return min(once() for _ in range(5))

    text = "".join(random.Random(3).choices("abcdefgh tuvw", k=64_000))
    assert seconds(text) < 64 * seconds(text[:4000])  # 16 if linear, 256 if quadratic


# -- wrong files -----------------------------------------------------------------------------------


def _without(keys: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in keys.items() if k != f"tokenizer.ggml.{key}"}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "tokenizer.ggml.tokens: no vocabulary in the file"),
        (_byte_level([], ["a b"], model="rwkv"), "'rwkv' is not supported; supported are gpt2"),
        (_without(_byte_level([], []), "model"), "tokenizer.ggml.model: '' is not supported"),
        (_byte_level([], ["a b"], pre="gpt-9"), "'gpt-9' is no pre-tokenizer known here; known"),
        (_byte_level([], ["a b"], pre="\x1b[2J"), r"'\x1b[2J' is no pre-tokenizer known here"),
        (_byte_level([], []), "tokenizer.ggml.merges: missing"),
        (_byte_level([], "a b"), "tokenizer.ggml.merges: str, an array is needed"),  # type: ignore[arg-type]
        (_byte_level([], [1]), "tokenizer.ggml.merges: an array of int, one of str is needed"),  # type: ignore[list-item]
        (_byte_level([], ["a b", "ab"]), "tokenizer.ggml.merges: entry 1 is 'ab'; two parts with"),
        (_byte_level([], ["a b", " ab"]), "tokenizer.ggml.merges: entry 1 is ' ab'; two parts"),
        (_byte_level([], ["a b c", "a "]), "tokenizer.ggml.merges: entry 1 is 'a '; two parts"),
        (
            _byte_level([], ["a b"], token_type=["1"] * 96),
            "token_type: an array of str, one of int",
        ),
        (_byte_level([], ["a b"], token_type=[1]), "token_type: 1 values for 96 tokens"),
        (_byte_level([], ["a b"], eos_token_id=96), "eos_token_id: 96, an id from 0 to 95"),
        (_byte_level([], ["a b"], eot_token_id=-1), "eot_token_id: -1, an id from 0 to 95"),
        (_byte_level([], ["a b"], bos_token_id="x"), "bos_token_id: x, an id from 0 to 95"),
        (_byte_level([], ["a b"], pre="llama-bpe"), "bos_token_id: missing"),
        (_without(_sentencepiece({"a": -1.0}), "scores"), "tokenizer.ggml.scores: missing"),
        (_sentencepiece({}, scores=[1.0]), "scores: 1 values for 259 tokens"),
    ],
)
def test_a_wrong_vocabulary_is_refused_in_one_line(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as error:
        Tokenizer.from_metadata(keys)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(BadInput, match="half of a surrogate pair at character 2"):
        tokenizer("gpt-2").encode("ab\ud800")


@pytest.mark.parametrize("token", [-1, 50257])
def test_a_token_beyond_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(BadInput, match=f"token {token}: an id from 0 to 50256 is needed"):
        tokenizer("gpt-2").token_bytes(token)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_cuts_and_loses_nothing(name: str) -> None:
    keys = _byte_level(["ab", *map(chr, range(0xA1, 0x144))], ["a b"], pre=name, bos_token_id=0)
    source = Tokenizer.from_metadata(keys)
    text = "Ab'LL déjà 12345 漢字カ…\r\n\n  x_y/{z}\tЖ\u0301 "
    if PRE_TOKENIZERS[name].byte_level:
        assert source.decode(source.encode(text)) == text
    assert b"ab" in _texts(source, source.encode("ab"))
