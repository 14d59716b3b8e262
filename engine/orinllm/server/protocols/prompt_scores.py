"""Logarithms of a prompt's own tokens' probabilities: `echo` with `logprobs` of /v1/completions.

A prompt is an answer to its first token that is held to the others, so every path computes them,
a step a token. lm-eval's loglikelihood tasks ask for nothing else.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from orinllm.batching.sequence import ScheduledSequence
from orinllm.choose.sampling import Logprobs, Sampling, Words
from orinllm.server.choices import ChoiceEvent, EventBridge, TokenlessSink
from orinllm.server.engine import ServedModel
from orinllm.server.errors import sequence_failed_error
from orinllm.server.protocols.requests import CommonFields
from orinllm.server.request_jobs import RequestJob, submit_job


class PromptScorer:
    """Computes one request's, of all its prompts at once. `run`: what to cancel."""

    def __init__(
        self,
        engine: ServedModel,
        common: CommonFields,
        prompts: Sequence[Sequence[int]],
        post: EventBridge,
    ) -> None:
        self._engine, self._prompts = engine, prompts
        self.run = RequestJob([])
        self._sinks = [_LogprobsSink(post, self.run.events) for _ in prompts]
        for ids, sink in zip(prompts, self._sinks, strict=True):
            if len(ids) > 1:
                self.run.sequences.append(
                    ScheduledSequence(
                        [ids[0]],
                        Sampling(temperature=0),
                        len(ids) - 1,
                        frozenset(),
                        sink,
                        ForcedTokensConstraint(ids[1:], engine.vocab_size),
                        common.top,
                        common.reuse,
                        common.client,
                    )
                )

    async def wait_for_scores(self) -> list[list[Logprobs]]:
        """Return those of each prompt but for its first token's; raises ApiError on failure."""
        if self.run.sequences:
            submit_job(self._engine, self.run)
        for _ in self.run.sequences:
            event = await self.run.events.get()
            if event.error is not None:
                raise sequence_failed_error(event.error)
        return [sink.found for sink in self._sinks]


class ForcedTokensConstraint:
    """A constraint that allows one text, token by token."""

    def __init__(self, tokens: Sequence[int], size: int) -> None:
        self._tokens, self._size, self._at = tokens, size, 0

    @property
    def is_complete(self) -> bool:
        """Say whether the answer ends behind the tokens that were taken."""
        return self._at == len(self._tokens)

    def allowed_mask(self) -> Words:
        """Return a bit for each token that is allowed now."""
        words: Words = np.zeros((self._size + 31) // 32, np.uint32)
        token = self._tokens[self._at]
        words[token // 32] = 1 << token % 32
        return words

    def take_token(self, token: int) -> None:
        """Go on behind a token of the answer, which may complete it."""
        self._at += 1


class _LogprobsSink(TokenlessSink):
    """Keeps what comes."""

    def __init__(self, post: EventBridge, events: "asyncio.Queue[ChoiceEvent]") -> None:
        super().__init__(post, events)
        self.found: list[Logprobs] = []

    def take_token_and_check_done(self, token: int, logprobs: Logprobs | None) -> bool:
        """See `TokenSink`."""
        assert logprobs is not None
        self.found.append(logprobs)
        return False
