import functools
from collections.abc import Iterator

import pytest
from tests.engine.models import LLAMA_CPP, smollm2, tokenizer

from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.text.answer import Delta
from orinllm.text.conversation import Conversation
from orinllm.text.template import ChatTemplate
from orinllm.text.tokenizer import Tokenizer


@functools.cache
def _smollm2() -> tuple[ChatTemplate, Tokenizer]:
    keys = GGUF.open(smollm2()).metadata
    source = Tokenizer.from_metadata(keys)
    return ChatTemplate.from_metadata(keys, source), source


def _prompt(chat: Conversation, text: str) -> str:
    return _smollm2()[1].decode(chat.add_question(text), special=True)


def test_a_chat_of_two_questions() -> None:
    template, source = _smollm2()
    chat = Conversation(template, source, system="Be brief.")
    assert _prompt(chat, "Hi") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokens = source.encode("Hello, <b>you</b>!<|im_end|>never read", special=True)
    assert sum(chat.read_answer(tokens), Delta()) == Delta("Hello, <b>you</b>!")
    assert _prompt(chat, "And?") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello, <b>you</b>!<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_stopped_answer_stays_in_the_history_as_far_as_it_went() -> None:
    template, source = _smollm2()
    chat = Conversation(template, source)
    chat.add_question("Count.")

    def endless() -> Iterator[int]:
        while True:
            yield from source.encode("one ")

    answer = chat.read_answer(endless())
    said = [next(answer) for _ in range(4)]
    answer.close()
    assert chat.messages[-1] == {"role": "assistant", "content": "one one "}
    assert "".join(delta.content for delta in said).strip() == "one one"


def test_reasoning_is_kept_apart() -> None:
    path = LLAMA_CPP / "templates" / "Qwen3.5-4B.jinja"
    template = ChatTemplate(path.read_text(encoding="utf-8"), tokenizer("qwen2"))
    chat = Conversation(template, tokenizer("qwen2"), enable_thinking=True)
    chat.add_question("Hi")
    tokens = tokenizer("qwen2").encode("Hm.\n</think>\n\nYes.")
    assert sum(chat.read_answer(tokens), Delta()) == Delta("Yes.", "Hm.")
    assert chat.messages[-1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_reset_forgets_all_but_the_system_prompt() -> None:
    template, source = _smollm2()
    chat = Conversation(template, source, system="Be brief.")
    first = chat.add_question("Hi")
    list(chat.read_answer(source.encode("Yes")))
    chat.reset()
    assert chat.add_question("Hi") == first


def test_a_refused_message_is_not_in_the_history() -> None:
    path = LLAMA_CPP / "templates" / "google-gemma-2-2b-it.jinja"
    template = ChatTemplate(path.read_text(encoding="utf-8"), tokenizer("gpt-2"))
    chat = Conversation(template, tokenizer("gpt-2"), system="x")
    with pytest.raises(BadInput, match="System role not supported"):
        chat.add_question("Hi")
    chat.system = None
    assert chat.add_question("Hi") and len(chat.messages) == 1
