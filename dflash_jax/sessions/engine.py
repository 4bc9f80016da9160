"""The batch engine: requests join and leave between rounds, text streams out.

Its requests can be forked, checkpointed, restored, and started from what earlier ones left behind.
"""

import os
from collections.abc import Callable, Iterator, Sequence

import jax
from absl import logging
from jax.experimental.compilation_cache import compilation_cache as xla_cache

from dflash_jax.decoding.distribution import Sampling
from dflash_jax.decoding.generate import MAX_ROWS, plan, prompt_tokens
from dflash_jax.decoding.loop import PREFILL_CHUNK
from dflash_jax.io.fingerprint import fingerprint
from dflash_jax.io.pair import Pair
from dflash_jax.sessions.batch import Batch
from dflash_jax.sessions.checkpoint import Checkpoint
from dflash_jax.sessions.contexts import COPIED, ContextBudget, Contexts
from dflash_jax.sessions.memory import device_limit, memory_plan
from dflash_jax.sessions.programs import Report
from dflash_jax.sessions.request import Request
from dflash_jax.sessions.schedule import Schedule
from dflash_jax.state.sequence import PAGE_SIZE


class Engine:
    """Serves requests in up to `max_rows` rows of one batch.

    A request gives the same tokens alone and beside any others. Not for several threads at once.

    Args:
      pair: from `load_pair`.
      max_rows: B, 1..8: requests that run at the same time; others wait in order of submission.
      draft_tokens: K, 0..15; 0 is plain decoding. None is the trained block less its anchor.
      max_context: tokens of prompt and output that a row holds.
      prefill_chunk: prompt tokens per step.
      max_stop_ids: EOS ids that a request may have.
      page_size: positions of a page. pool_tokens: positions of all pages, which requests and
        checkpoints share; None is `max_rows * max_context`.
      checkpoint_turns: keeps a checkpoint of every request before its suffix and at its end.
      contexts: how much kept checkpoints may take; None is the default budget where
        `checkpoint_turns` asks for one, and else none are kept.
      memory_bytes: what the engine may take on the device (`memory.memory_plan`); None is what
        the device says it has, if it says so.
      compilation_cache: directory of JAX's persistent compilation cache, which is a setting of
        the whole process; later engines of the same shapes then start in a moment.
      report: `report(program, seconds, done, total)` after each compilation; the log by default.

    Raises:
      ValueError: an argument out of range; the message names it.
      OutOfMemoryError: it does not fit; the message says what takes how much.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        max_rows: int = 1,
        draft_tokens: int | None = None,
        max_context: int = 4096,
        prefill_chunk: int = PREFILL_CHUNK,
        max_stop_ids: int = 8,
        page_size: int = PAGE_SIZE,
        pool_tokens: int | None = None,
        checkpoint_turns: bool = False,
        contexts: ContextBudget | None = None,
        memory_bytes: int | None = None,
        compilation_cache: str | os.PathLike[str] | None = None,
        report: Report | None = None,
    ):
        for name, value, low, high in (
            ("max_rows", max_rows, 1, MAX_ROWS),
            ("max_context", max_context, 2, pair.target.max_position_embeddings),
            ("prefill_chunk", prefill_chunk, 1, max_context),
            ("max_stop_ids", max_stop_ids, len(pair.eos_token_ids), pair.target.vocab_size),
            ("page_size", page_size, 1, 2**16),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name}: got {value}, expected {low}..{high}")
        if compilation_cache is not None:
            jax.config.update("jax_compilation_cache_dir", os.fspath(compilation_cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            xla_cache.reset_cache()  # JAX stays with the first directory it has used
        self.pair = pair
        self.spec, self.weights = plan(pair, draft_tokens)
        self.max_rows, self.max_context = max_rows, max_context
        per_row = -(-max_context // page_size)
        pages = max_rows * per_row if pool_tokens is None else pool_tokens // page_size
        if pages < per_row:
            raise ValueError(
                f"pool_tokens: got {pool_tokens}, expected {per_row * page_size} at least "
                f"(max_context {max_context} in pages of {page_size})"
            )
        self.memory = memory_plan(
            self.spec,
            self.weights,
            rows=max_rows,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            page_size=page_size,
            pages=pages,
        )
        self.memory.check(device_limit() if memory_bytes is None else memory_bytes)
        self._stop_columns = max_stop_ids
        logging.info("engine: %s", self.describe())
        self.batch = Batch(
            self.spec,
            self.weights,
            max_rows,
            max_context,
            prefill_chunk,
            max_stop_ids,
            page_size,
            pages,
            report or _log,
        )
        if checkpoint_turns and contexts is None:
            contexts = ContextBudget()
        self.contexts = Contexts(
            self.batch,
            lambda: fingerprint(pair, self.spec.draft is not None),
            contexts,
            lambda: self.schedule.origins(),
        )
        self.schedule = Schedule(
            self.batch, self.contexts, pair.tokenizer, max_context, checkpoint_turns
        )

    def describe(self) -> str:
        """One line: what drafts, effective widths, which causality rule."""
        return (
            f"{self.pair.describe()}; {self.max_rows} rows of {self.max_context} tokens, "
            f"{self.spec.draft_tokens} draft tokens"
        )

    @property
    def idle(self) -> bool:
        """Nothing is waiting or running."""
        return self.schedule.idle

    @property
    def waiting(self) -> int:
        """Requests without a row, or whose prompt is not processed yet."""
        return self.schedule.waiting

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_new_tokens: int = 128,
        min_new_tokens: int = 0,
        stop: str | Sequence[str] = (),
        eos_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        draft_tokens: int | None = None,
        suffix_tokens: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> Request:
        """Queues a request; it starts when a row is free. Nothing is computed here.

        Args:
          prompt: text or token ids.
          eos_ids: None is the pair's own stop ids.
          draft_tokens: proposals verified per round, at most the engine's K, which None is.
          others: see `Request`.

        Raises:
          ValueError: an argument out of range, or a prompt and budget that no row can hold.
        """
        request = self._request(
            prompt_tokens(self.pair, prompt),
            sampling=Sampling() if sampling is None else sampling,
            seed=seed,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            stop=stop,
            eos_ids=self.pair.eos_token_ids if eos_ids is None else eos_ids,
            ignore_eos=ignore_eos,
            draft_tokens=draft_tokens,
            suffix_tokens=suffix_tokens,
            on_text=on_text,
        )
        self.schedule.enqueue(request)
        return request

    # --- checkpoints ---

    def checkpoint(self, request: Request, turn: bool = False) -> Checkpoint:
        """The state of a running request, or of one that its budget ended, as it is now.

        Args:
          turn: instead the last turn checkpoint, which `checkpoint_turns` keeps: at the end of a
            request, or before the suffix of its prompt while it runs.

        Raises:
          ValueError: the request has no state: it waits, has ended or has no turn checkpoint.
          RuntimeError: called from inside a step.
        """
        if turn:
            found = None if request.turn is None else request.turn()
            if found is None:
                raise ValueError(f"checkpoint: no turn of {request!r} is kept")
            return found
        if self.schedule.stepping:
            raise RuntimeError("checkpoint: called from inside a step, for example by an on_text")
        seat = self.schedule.seat_of(request) or self.schedule.resting_seat(request)
        if seat is None or not seat.frontier:
            raise ValueError(f"checkpoint: {request!r} has no state: it waits or has ended")
        return self.contexts.capture(seat.row, seat.frontier, request)

    def fork(self, request: Request, **controls) -> Request:
        """Another request that goes on from where this one is; see `checkpoint`, `restore`."""
        return self.restore(self.checkpoint(request), **controls)

    def restore(
        self, checkpoint: Checkpoint, *, suffix: str | Sequence[int] = (), **controls
    ) -> Request:
        """Queues a request that goes on from a checkpoint: the same tokens as without it.

        Args:
          suffix: text or tokens that follow the checkpoint's own. With it a new turn begins: the
            prompt is all tokens so far and the suffix, nothing is published yet, and the budget
            is the new turn's. Without it the request goes on with what it has published.
          controls: arguments of `submit` that take the place of the checkpoint's.

        Raises:
          RestoreError: it does not belong to this engine; the message names the part.
          StoreError: it lies on disk and cannot be read.
          ValueError: a control out of range, or a budget that is used up.
        """
        self.contexts.check(checkpoint)
        record = checkpoint.record
        options = {name: getattr(record, name) for name in COPIED}
        options["draft_tokens"] = min(record.draft_tokens, self.spec.draft_tokens)
        prompt, tokens = [*record.prompt], [*record.tokens]
        if isinstance(suffix, str) and suffix:
            suffix = prompt_tokens(self.pair, suffix, "suffix")
        if len(suffix):
            known = prompt + tokens if tokens else prompt[: record.frontier]
            prompt, tokens = known + [*suffix], []
        request = self._request(prompt, **(options | controls))
        if len(tokens) >= request.max_new_tokens:
            raise ValueError(
                f"max_new_tokens: {request.max_new_tokens}, but the checkpoint has published "
                f"{len(tokens)} tokens"
            )
        request.origin, request.tokens = checkpoint, tokens
        if tokens:
            request.rounds = [*record.rounds]
        self.contexts.touch(checkpoint)
        self.schedule.enqueue(request)
        return request

    def promote(self, checkpoint: Checkpoint) -> None:
        """Moves a checkpoint to the device, so that restoring it copies no page.

        Raises:
          RestoreError, StoreError: it does not fit this engine.
          OutOfPagesError: requests and pinned checkpoints hold too many pages.
        """
        self.contexts.promote(checkpoint, self.schedule.make_room)

    def step(self) -> list[Request]:
        """One chunk of a prompt and one round, as far as there are any.

        Returns:
          The requests that ended since the previous step returned, in order.
        """
        return self.schedule.step()

    def run(self) -> list[Request]:
        """Steps until nothing is left; returns the requests that ended, in order."""
        ended = []
        while not self.idle:
            ended += self.step()
        return ended

    def stream(self, request: Request) -> Iterator[str]:
        """Yields a request's text from its beginning, stepping the engine while there is none.

        Other requests go on as well; several streams may be read in turn.

        Raises:
          ValueError: without a tokenizer there is no text.
          Exception: what ended the request, where its reason is "error".
        """
        if request.text is None:
            raise ValueError("stream: the target has no tokenizer.json, so there is no text")
        shown = 0
        while True:
            if len(request.text) > shown:
                piece = request.text[shown:]
                shown += len(piece)
                yield piece
            elif request.finished:
                break
            else:
                self._check_ours(request)
                self.step()
        if request.error is not None:
            raise request.error

    def cancel(self, request: Request) -> None:
        """Ends a request with what it has published; one that has ended stays as it is.

        Possible at any moment, from a callback inside a step too: a round that is under way
        commits nothing of that row.
        """
        if not request.finished:
            self._check_ours(request)
            self.schedule.cancel(request)

    def extend(self, request: Request, more: int) -> None:
        """Lets a request that its budget ended go on for up to `more` tokens.

        It goes on from its state, which waits in its row until another request moves in. Greedy
        text is that of one larger budget from the start; so is sampled text in plain decoding.
        Text that came out only because there was to be no more (half a character, the beginning
        of a stop string) is taken back, and comes again whole.

        Raises:
          ValueError: the request did not end by its budget, or its row was given away, or cannot
            hold so many tokens.
        """
        if not isinstance(more, int) or more < 1:
            raise ValueError(f"more: got {more!r}, expected a whole number >= 1")
        seat = self.schedule.resting_seat(request)
        if seat is None:
            raise ValueError(
                f"extend: {request!r}, expected one that ended by its budget and whose row no "
                "other request has taken"
            )
        self._check_growth(request.prompt, request.max_new_tokens + more)
        self.schedule.extend(seat, more, self.checkpoint(request))

    def _request(self, prompt: list[int], *, draft_tokens: int | None, **options) -> Request:
        """A request that this engine can serve."""
        request = Request(prompt, **options)
        self._check_growth(request.prompt, request.max_new_tokens)
        if len(request.eos_ids) > self._stop_columns:
            raise ValueError(
                f"eos_ids: got {len(request.eos_ids)}, but max_stop_ids is {self._stop_columns}"
            )
        if request.stop and self.pair.tokenizer is None:
            raise ValueError(f"stop: got {request.stop!r}, but the target has no tokenizer.json")
        for token in request.eos_ids:
            if token >= self.pair.target.vocab_size:
                raise ValueError(
                    f"eos_ids: got {token}, expected 0..{self.pair.target.vocab_size - 1}"
                )
        widest = self.spec.draft_tokens
        request.draft_tokens = widest if draft_tokens is None else draft_tokens
        if not 0 <= request.draft_tokens <= widest:
            raise ValueError(f"draft_tokens: got {draft_tokens}, expected 0..{widest} (engine)")
        if self.spec.draft is not None:
            request.block_attention = self.spec.draft.causality.value
        request.text = None if self.pair.tokenizer is None else ""
        return request

    def _check_growth(self, prompt: list[int], max_new_tokens: int) -> None:
        growth = len(prompt) + max_new_tokens
        if growth > self.max_context:
            raise ValueError(
                f"prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} need {growth} "
                f"positions, but max_context is {self.max_context}"
            )

    def _check_ours(self, request: Request) -> None:
        if not self.schedule.has(request):
            raise ValueError(f"{request!r} was not submitted to this engine")


def _log(program: str, seconds: float, done: int, total: int) -> None:
    logging.info("compiled %s in %.1f s (%d of %d)", program, seconds, done, total)
