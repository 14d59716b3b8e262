"""Marks that families of models put around their reasoning."""

from typing import NamedTuple


class ReasoningTag(NamedTuple):
    """Texts that begin and end a stretch of reasoning."""

    open: str
    close: str


TAGS = (
    ReasoningTag("<think>", "</think>"),  # Qwen, DeepSeek, GLM, SmolLM3, Nemotron, MiniMax
    ReasoningTag("[THINK]", "[/THINK]"),  # Mistral: Magistral, Ministral 3
    ReasoningTag("<|channel>thought", "<channel|>"),  # Gemma 4
    ReasoningTag("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningTag("<mm:think>", "</mm:think>"),  # MiniMax M3
    ReasoningTag("<|START_THINKING|>", "<|END_THINKING|>"),  # Command R7B, Command A
    ReasoningTag("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ReasoningTag("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    ReasoningTag("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
    ReasoningTag("<|think|>", "<|end|><|begin|>assistant"),  # Solar
    ReasoningTag(" to=self<|message|>", "<|eom|><|start|>assistant"),  # Glimmer
)
