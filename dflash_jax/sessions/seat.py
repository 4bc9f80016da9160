"""A request in a row of the batch: its prompt's progress, its front end, what it has been told."""

from collections.abc import Sequence

from absl import logging

from dflash_jax.decoding.result import Round
from dflash_jax.io.tokenizer import Tokenizer
from dflash_jax.sessions.frontend import FrontEnd, Preview, live_width
from dflash_jax.sessions.request import Request


class Seat:
    """Errors of the request's own code (tokenizer, callback) end here and become its result.

    prefilled: prompt tokens processed. anchored: has its first token and decodes.

    Args:
      frontier: F of the checkpoint that it starts from. The tokens that the request brings along
        are published already.
      turns: it stops at the end of the part of its prompt that later turns keep.
    """

    def __init__(
        self,
        row: int,
        request: Request,
        tokenizer: Tokenizer | None,
        frontier: int = 0,
        turns: bool = False,
    ):
        self.row, self.request = row, request
        self.front = FrontEnd(
            None if tokenizer is None else tokenizer.decode,
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=request.min_new_tokens,
            stop=request.stop,
            stop_ids=request.stop_ids,
        )
        self.prefilled = min(frontier, len(request.prompt))
        self.anchored = bool(request.tokens)
        text = self.front.replay(request.tokens)
        if request.text is not None:
            request.text = text
        self._turn = len(request.prompt) - request.suffix_tokens if turns else 0
        self._flushed = 0  # characters of the text that came out only because it ended
        self._told = len(text)  # characters of the text that on_text has had

    @property
    def frontier(self) -> int:
        """F: tokens that the row's state has processed."""
        if not self.anchored:
            return self.prefilled
        return len(self.request.prompt) + self.front.published - 1

    @property
    def at_turn(self) -> bool:
        """All of the prompt that later turns keep is processed, and no more."""
        return self.prefilled == self._turn

    def next_chunk(self, size: int) -> list[int]:
        """The next tokens of the prompt; the last ones where `prefilled` then is its length."""
        if self.prefilled < self._turn:
            size = min(size, self._turn - self.prefilled)
        part = self.request.prompt[self.prefilled : self.prefilled + size]
        self.prefilled += len(part)
        self.request.prefilled += len(part)
        return part

    def live_width(self, max_context: int) -> int:
        """P of the next round."""
        used = len(self.request.prompt) + self.front.published
        return live_width(self.request.draft_tokens, self.front.budget_left, max_context - used)

    def preview(self, licensed: Sequence[int]) -> Preview:
        """The front end's choice, before anything is committed."""
        try:
            return self.front.preview(licensed)
        except Exception as error:  # a tokenizer may raise anything; the other rows go on
            self._note(error)
            return self.front.abandon()

    def publish(self, licensed: Sequence[int], preview: Preview, counts: Round | None) -> None:
        """Hands over what is committed; runs no code of the request's."""
        self.front.adopt(preview)
        if preview.count and counts is not None:
            self.request.rounds.append(counts)
        self.request.tokens += licensed[: preview.count]
        if self.request.text is not None:
            self.request.text += preview.text
        self._flushed = preview.flushed

    def tell(self) -> bool:
        """Calls `on_text` with the text that it has not had yet; False where that raised."""
        request = self.request
        if request.on_text is None or request.text is None:
            return True
        piece = request.text[self._told :]
        self._told = len(request.text)
        try:
            if piece:
                request.on_text(piece)
        except Exception as error:  # the callback is not ours; the other requests go on
            self._note(error)
            return False
        return True

    def extend(self, more: int) -> None:
        """Opens a request that its budget ended; text that this end set free is taken back."""
        request = self.request
        self.front.extend(more)
        request.max_new_tokens += more
        request.finish_reason = None
        if self._flushed:
            request.text = request.text[: -self._flushed]
            self._told = min(self._told, len(request.text))

    def _note(self, error: Exception) -> None:
        logging.warning("%r ended by %r", self.request, error)
        self.request.error = error
