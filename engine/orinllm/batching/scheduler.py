"""Continuous batching: one thread that owns a model and shares it among all who ask.

A turn takes the tokens of the step in flight, computes a piece of the prompts that wait, starts the
next step of all that run, and only then, while the device works, hands the tokens out. Where the
same sequences surely go on, it starts the next step first. So a long prompt delays others' tokens
by a piece of it, a sequence begins and ends at any step, and nobody who listens slowly holds the
device up. The end of a prompt that no step of others waits for is computed with the token behind
it; that token is handed out at once.

`orinllm serve`, `Model.generate` (so `run` and `chat`) and `orinbench llama-bench` are its clients.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from orinllm.batching.cache import PageStore
from orinllm.batching.runner import Runner, StepRow
from orinllm.batching.sequence import (
    FairQueue,
    PhaseStopwatch,
    ScheduledSequence,
    SchedulerObserver,
    log_and_describe_failure,
    tell_sink_of_failure,
)
from orinllm.choose.sampling import Logprobs
from orinllm.network.vision.pictures import end_between_pictures

#: Why an answer fails whose logits cannot be compared.
NO_NUMBERS = "the model's logits are no numbers"
#: The same, where the encoder's rows of a picture are none already.
NO_ROWS = "the rows of a picture are no numbers"
#: Why an answer fails whose form has no next token: its schema is to blame.
NO_TOKEN = "no token fits the response_format or the tool's schema any more"
# Prompts of which a turn computes something, at most: each costs a pass over the weights.
_PROMPTS = 4
# Seconds after which a thread without work says that it is alive.
_HEARTBEAT = 1.0


class QueueFullError(Exception):
    """Too many wait already. `seconds`: when it may be worth another try."""

    def __init__(self, waiting: int, seconds: int) -> None:
        super().__init__(f"{waiting} requests wait already")
        self.waiting, self.seconds = waiting, seconds


class SchedulerClosedError(Exception):
    """The scheduler takes no more."""


@dataclass(frozen=True)
class _StepInFlight:
    """A step in flight: who takes part. `begins`: it is the end of a prompt, of one sequence."""

    sequences: list[ScheduledSequence]
    begins: bool = False


class Scheduler:
    """Shares a runner and its memory.

    A sequence is in one of these states::

        submit                  _admit_waiting (a slot, and memory)
          |                         |
          v                         v       _fill_prompts, piece by piece
        waiting ----------------> filling -----------------------+
                                   ^   |                         |
          _admit_waiting, first    |   |  the prompt's end,      |  the prompt but
               +-------------------+   |  where nobody answers   |  for its last token
               |                       v                         v
           preempted               beginning -------------> answering <-+
               ^                        its first token       |  |  |   |  a token a step
               |                                              |  |  +---+
               +-- out of pages: the one that began last -----+  |
                                                                 v
        any state -- cancel, cut, error ----------------------> over      stop, length

    waiting: `_waiting`; preempted: `_again`; filling, beginning, answering: `_running`, with a
    lease, and `filled` below `len(ids) - 1`, or in a step that `begins`, or `is_ready_to_decode`.
    One that is over has no lease; its last token and its end reach its sink in the same turn
    (`_news`), those that were cancelled hear nothing more. A step in flight keeps who is over in
    its list until it is collected.

    queue: requests that may wait. `on_alive` is called from the thread while it gets on,
    `on_tokens_handed` after the tokens of a turn went to their sinks, `on_first_token` behind that
    before the step that follows a first token, `on_failure` with one line if the thread ends by an
    error, which is `failure`.
    """

    def __init__(
        self,
        runner: Runner,
        store: PageStore,
        watch: SchedulerObserver,
        queue: int,
        reserve: bool = False,
    ) -> None:
        self.runner, self.store = runner, store
        self.on_alive: Callable[[], None] = lambda: None
        self.on_tokens_handed: Callable[[], None] = lambda: None
        self.on_first_token: Callable[[], None] = lambda: None
        self.on_failure: Callable[[str], None] = lambda why: None
        self.failure: Exception | None = None
        self._watch, self._most_waiting, self._reserve = watch, queue, reserve
        self._stopwatch = PhaseStopwatch(watch)
        self._wake = threading.Condition()
        self._waiting, self._again = FairQueue(), deque[ScheduledSequence]()
        self._cancelled: list[ScheduledSequence] = []
        self._cutting = self._closed = False
        self._running: list[ScheduledSequence] = []  # the one that began last is last
        self._flight = deque[_StepInFlight]()  # the steps under way
        self._news: list[tuple[ScheduledSequence, int, Logprobs | None, str | None]] = []
        self._mean_seconds = 1.0  # of a request
        self._ended = False

    @property
    def n_running(self) -> int:
        """Sequences that have memory."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Sequences that have none."""
        return len(self._waiting) + len(self._again)

    @property
    def most_queued_and_running(self) -> int:
        """Sequences that an idle scheduler takes."""
        return self._most_waiting + self.runner.slots

    def submit(self, sequences: list[ScheduledSequence], goes_on: bool = False) -> None:
        """Queue sequences, all or none; raises QueueFullError or SchedulerClosedError.

        goes_on: of a request that was let in already; it is not turned away any more.
        """
        with self._wake:
            if self._closed:
                raise SchedulerClosedError
            free = self.runner.slots - len(self._running)
            room = self._most_waiting + max(0, free)
            if self.n_waiting + len(sequences) > room and not goes_on:
                rounds = 1 + self.n_waiting // self.runner.slots
                raise QueueFullError(self.n_waiting, max(1, round(rounds * self._mean_seconds)))
            for sequence in sequences:
                self._waiting.push(sequence)
            self._wake.notify()

    def cancel(self, sequences: list[ScheduledSequence]) -> None:
        """End sequences before the next step; their sinks hear nothing more."""
        with self._wake:
            self._cancelled += [sequence for sequence in sequences if not sequence.over]
            self._wake.notify()

    def stop_accepting(self) -> None:
        """Take no more requests; those that were taken go on."""
        with self._wake:
            self._closed = True

    def end_all(self) -> None:
        """End all that runs, with what it has, and all that waits."""
        with self._wake:
            self._closed = self._cutting = True
            self._wake.notify()

    def stop_when_idle(self) -> None:
        """Let `run` return, once all are over."""
        with self._wake:
            self._closed = self._ended = True
            self._wake.notify()

    def run(self) -> None:
        """Work until `stop_when_idle`: the one thread that touches the runner."""
        try:
            while not (self._ended and not self._has_work()):
                self.on_alive()
                with self._wake:
                    if not self._has_work():
                        if self._stopwatch.filled:
                            self._stopwatch.count_elapsed(stepped=False)
                        self._wake.wait(_HEARTBEAT)
                        self._stopwatch.restart()
                    cancelled, self._cancelled = self._cancelled, []
                    cutting, self._cutting = self._cutting, False
                    self._retire_cancelled(cancelled)
                    if cutting:
                        self._cut_off_all_sequences()
                    self._admit_waiting()
                self._run_turn()
        except Exception as error:
            with self._wake:
                self.failure, self._closed = error, True
                everyone = (
                    self._running + self._waiting.remove_where(lambda _: True) + list(self._again)
                )
            # Who has the last token already, and was not told yet.
            everyone += [s for s, _, _, reason in self._news if reason and not s.over]
            why = f"the engine failed: {type(error).__name__}: {error}"
            for sequence in everyone:
                tell_sink_of_failure(sequence, why)
            self.on_tokens_handed()
            self.on_failure(" ".join(why.split()))

    def _has_work(self) -> bool:
        return bool(self._running or self._cancelled or self._cutting or self.n_waiting)

    def _run_turn(self) -> None:
        followed, begun = self._try_submit_step_ahead(), any(step.begins for step in self._flight)
        step = self._flight.popleft() if self._flight else None
        if step is not None and not all(sequence.over for sequence in step.sequences):
            self._collect_step_tokens(step)
            self._stopwatch.count_elapsed(stepped=not begun)
        if begun:  # the next step's launches may have to be made: a first token waits for nothing
            self._hand_out_tokens()
            self.on_first_token()
        if not followed:
            self._restore_states()
            self._fill_prompts()
            self._submit_step()
        self._hand_out_tokens()

    def _retire_cancelled(self, cancelled: list[ScheduledSequence]) -> None:
        for sequence in cancelled:
            self._end_sequence(sequence, "cancelled")
        if cancelled:
            self._waiting.remove_where(lambda s: s.over)

    def _cut_off_all_sequences(self) -> None:
        waiting = self._waiting.remove_where(lambda _: True)
        again, self._again = list(self._again), deque()
        for sequence in [*self._running, *again, *waiting]:
            self._end_and_tell_sink(sequence, "cut")

    def _end_sequence(self, sequence: ScheduledSequence, reason: str) -> None:
        """Take what a sequence has and tell the observer; its sink hears nothing."""
        if not sequence.over:
            sequence.over = True
            self._release_slot_and_pages(sequence)
            self._watch.on_sequence_end(sequence, reason, time.monotonic() - sequence.asked)

    def _release_slot_and_pages(self, sequence: ScheduledSequence) -> None:
        """Take memory and slot from a sequence that needs no more steps."""
        if sequence.lease is not None:
            self.store.end_lease(sequence.lease)
            sequence.lease = None
            self._running.remove(sequence)
            self._mean_seconds += 0.1 * (time.monotonic() - sequence.asked - self._mean_seconds)
        elif sequence in self._again:
            self._again.remove(sequence)

    def _end_and_tell_sink(
        self, sequence: ScheduledSequence, reason: str, error: str | None = None
    ) -> None:
        self._end_sequence(sequence, reason)
        try:
            sequence.sink.on_end(reason, error)
        except Exception as bug:  # one answer that cannot be read is no reason to end the others
            tell_sink_of_failure(sequence, log_and_describe_failure(bug))

    def _admit_waiting(self) -> None:
        """Give slots and memory to who waits, who was preempted first."""
        while len(self._running) < self.runner.slots:
            again = bool(self._again)
            sequence = self._again[0] if again else self._waiting.peek()
            if sequence is None:
                return
            first = sequence.after
            if first is not None and not first.over and not first.is_ready_to_decode:
                return
            tokens = sequence.n_prompt + sequence.most if self._reserve else len(sequence.ids)
            lease = self.store.try_begin_lease(
                sequence.ids, tokens, sequence.reuse and not self._reserve
            )
            if lease is None:
                return
            # Who runs already gets the next page first.
            if not self._reserve and not self.store.has_page_for_each(len(self._running)):
                self.store.end_lease(lease)
                return
            if again:
                self._again.popleft()
            else:
                self._waiting.remove_next()
            sequence.lease, sequence.filled = lease, lease.cached
            self._running.append(sequence)
            if not sequence.began:
                sequence.began, sequence.n_cached = True, lease.cached
                self._watch.on_sequence_begin(sequence, time.monotonic() - sequence.asked)

    def _collect_step_tokens(self, step: _StepInFlight) -> None:
        """Wait for a step's tokens; who is over meanwhile, or gave its memory up, takes none."""
        for sequence, drawn in zip(step.sequences, self.runner.wait_for_tokens(), strict=True):
            if sequence.lease is not None:  # recurrent states are behind all that was right
                sequence.lease.started += len(drawn.more)
            self._append_token_or_end(sequence, drawn.token, drawn.logprobs)
            right = 0
            for token in drawn.more if sequence.lease is not None else ():
                self._append_token_or_end(sequence, token, None)
                right += 1
                if sequence.lease is None:  # the answer ended within the guess
                    break
            if drawn.guessed:
                sequence.n_guessed += drawn.guessed
                sequence.n_right += right
                self._watch.on_speculation(drawn.guessed, right)

    def _append_token_or_end(
        self, sequence: ScheduledSequence, token: int, logprobs: Logprobs | None
    ) -> None:
        """Note a sequence's new token; it is handed out once the next step is under way."""
        if sequence.over or sequence.lease is None:
            return
        sequence.filled = len(sequence.ids)
        self.store.commit_tokens(sequence.lease, sequence.ids, sequence.filled)
        if token < 0:
            held = sequence.constraint
            gave_up = held is not None and not held.allowed_mask().any()
            no_numbers = NO_NUMBERS if sequence.has_finite_pictures else NO_ROWS
            self._end_and_tell_sink(sequence, "error", NO_TOKEN if gave_up else no_numbers)
            return
        if sequence.constraint is not None:
            sequence.constraint.take_token(token)
        if token in sequence.end_ids:
            sequence.lease.last = token
            self._release_slot_and_pages(sequence)
            self._news.append((sequence, -1, None, "stop"))
            return
        now = time.monotonic()
        first = sequence.n_answer_tokens == 0
        self._watch.on_token(sequence, now - (sequence.asked if first else sequence.last), first)
        sequence.last = now
        sequence.ids.append(token)
        done = sequence.constraint is not None and sequence.constraint.is_complete
        reason = "stop" if done else "length" if sequence.n_answer_tokens >= sequence.most else None
        if reason:
            self._release_slot_and_pages(sequence)
        self._news.append((sequence, token, logprobs, reason))

    def _restore_states(self) -> None:
        """Copy the recurrent states with which sequences begin, once no step of others is left
        in their slots; one whose checkpoint is its whole prompt but the last token fills nothing.
        """
        for sequence in self._running:
            assert sequence.lease is not None
            if (checkpoint := self.store.pop_restore_checkpoint(sequence.lease)) is not None:
                self.runner.restore_states(sequence.lease.pages, checkpoint)

    def _fill_prompts(self) -> None:
        """Compute a piece of the prompts that wait for it; the one that began first is first.

        The piece is smaller while others wait for their next token. What is left of it goes to
        prompts whose rest fits: a part more would cost them a pass over the weights more. A prompt
        that ends, if no step is due beside, ends with its answer's first token. A picture is
        computed in one piece.
        """
        answering = any(sequence.is_ready_to_decode for sequence in self._running)
        left = self.runner.prompt_tokens_per_step if answering else self.runner.chunk
        pieces: list[tuple[ScheduledSequence, int]] = []
        for sequence in self._running:
            missing = self._fill_end_position(sequence) - sequence.filled
            fits = not pieces or missing <= left
            if sequence.is_ready_to_decode or not fits or len(pieces) == _PROMPTS:
                continue
            pieces.append((sequence, self._prompt_piece_length(sequence, min(left, missing))))
            left -= pieces[-1][1]
        ends = [
            s
            for s, n in pieces
            if s.hidden_states is None and s.filled + n == self._fill_end_position(s)
        ]
        for sequence, n in pieces:
            if not answering and ends == [sequence]:
                self.runner.prefill_and_submit_token(self._make_row(sequence), sequence.filled)
                self._flight.append(_StepInFlight(ends, begins=True))
            else:
                self._fill_until(sequence, sequence.filled + n)
        self._stopwatch.filled |= bool(pieces)

    def _prompt_piece_length(self, sequence: ScheduledSequence, most: int) -> int:
        """Return how many tokens of a prompt are computed next: up to where states are kept."""
        assert sequence.lease is not None
        start = sequence.filled
        end = self.store.prompt_piece_end(sequence.lease, start, start + most)
        if sequence.pictures:
            end = end_between_pictures(sequence.ids, start, end)
        return end - start

    @staticmethod
    def _fill_end_position(sequence: ScheduledSequence) -> int:
        """Return where a prompt ends; its last token is computed with its answer."""
        return len(sequence.ids) - (sequence.hidden_states is None)

    def _fill_until(self, sequence: ScheduledSequence, end: int) -> None:
        """Compute a prompt's tokens before `end`."""
        start, lease = sequence.filled, sequence.lease
        assert lease is not None
        lease.started = end
        if sequence.hidden_states is None:
            self.runner.fill_pages(lease.pages, sequence.ids, start, end)
        else:
            sequence.hidden_states(
                start, self.runner.prefill_for_hidden_states(lease.pages, sequence.ids, start, end)
            )
        sequence.filled = end
        self.store.commit_tokens(lease, sequence.ids, end)
        if (checkpoint := self.store.claim_save_checkpoint(lease)) is not None:
            self.runner.save_states(lease.pages, checkpoint)
        if sequence.hidden_states is not None and end == len(sequence.ids):
            self._release_slot_and_pages(sequence)
            self._news.append((sequence, -1, None, "stop"))

    def _submit_step(self) -> None:
        """Start the next token of all whose prompt is computed and whose answer goes on."""
        going = [sequence for sequence in self._running if sequence.is_ready_to_decode]
        for sequence in going:
            self._make_room_for(sequence)
        going = [sequence for sequence in going if sequence.lease is not None]
        if going:
            rows = map(self._make_row, going, map(self._reserve_speculation_room, going))
            self.runner.submit_step(list(rows))
            self._flight.append(_StepInFlight(going))

    def _try_submit_step_ahead(self) -> bool:
        """Start the step behind the one in flight before its tokens are known; False: it must wait.

        Whoever ends with a token of the one in flight takes part in vain.
        """
        going = list(self._running)
        if not self._flight or len(self._flight) >= self.runner.most_steps_in_flight:
            return False
        first = self._flight[0]
        if first.begins or first.sequences != going:
            return False
        if not all(map(self._try_reserve_room_ahead, going)):
            return False
        self.runner.submit_step([self._make_row(sequence, known=False) for sequence in going])
        self._flight.append(_StepInFlight(going))
        return True

    def _try_reserve_room_ahead(self, sequence: ScheduledSequence) -> bool:
        """Get room for two tokens, if a sequence wants both and the device draws; False if not."""
        assert sequence.lease is not None
        return (
            sequence.n_answer_tokens + 1 < sequence.most
            and sequence.draw.is_token_only
            and self.store.try_grow_lease(sequence.lease, len(sequence.ids) + 1)
        )

    def _make_room_for(self, sequence: ScheduledSequence) -> None:
        """Get a sequence the page for its next token, from the one that began last if need be."""
        while sequence.lease is not None and not self.store.try_grow_lease(
            sequence.lease, len(sequence.ids)
        ):
            newest = self._running.pop()
            assert newest.lease is not None
            self.store.end_lease(newest.lease)
            newest.lease, newest.filled = None, 0
            self._again.appendleft(newest)
            self._watch.on_preemption()

    def _reserve_speculation_room(self, sequence: ScheduledSequence) -> int:
        """Return how many tokens behind the next one a sequence alone may get, which have pages."""
        if len(self._running) > 1 or not self.runner.most_extra_tokens:
            return 0
        assert sequence.lease is not None
        room = min(self.runner.most_extra_tokens, sequence.most - sequence.n_answer_tokens - 1)
        fits = room > 0 and self.store.try_grow_lease(sequence.lease, len(sequence.ids) + room)
        return room if fits else 0

    @staticmethod
    def _make_row(sequence: ScheduledSequence, room: int = 0, known: bool = True) -> StepRow:
        """Return a sequence's part of a step that starts, behind its last token or one that is not
        `known`."""
        assert sequence.lease is not None
        ids = sequence.ids
        token, position = (ids[-1], len(ids) - 1) if known else (None, len(ids))
        sequence.lease.started = position + 1
        return StepRow(token, position, sequence.lease.pages, sequence.draw, room, sequence.behind)

    def _hand_out_tokens(self) -> None:
        """Give the tokens of the last step to their sinks, while the device computes the next."""
        news, self._news = self._news, []
        for sequence, token, logprobs, reason in news:
            if sequence.over:
                continue
            try:
                if token >= 0 and sequence.sink.take_token_and_check_done(token, logprobs):
                    reason = "stop"
            except Exception as bug:
                self._end_and_tell_sink(sequence, "error", log_and_describe_failure(bug))
                continue
            if reason:
                self._end_and_tell_sink(sequence, reason)
        self.on_tokens_handed()
