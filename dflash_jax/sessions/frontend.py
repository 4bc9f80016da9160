"""The front end of a request: which licensed tokens are published, and as what text.

Pure host code. `preview` looks at the tokens that the target licensed and chooses N before
anything is committed; `adopt` takes the preview over once the commit has been made. So a state
never goes past the token that ends its request.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

REPLACEMENT = "\ufffd"
# Tokens kept as context of the next piece: decoders may treat a first token in their own way.
_CONTEXT = 8

Decode = Callable[[Sequence[int]], str]


def live_width(draft_tokens: int, budget_left: int, context_left: int) -> int:
    """P: proposals worth verifying in the next round.

    Args:
      draft_tokens: K.
      budget_left: tokens that may still be published, at least 1. P proposals license up to
        P + 1 tokens.
      context_left: positions after the anchor's that the state can still hold.
    """
    return max(0, min(draft_tokens, budget_left - 1, context_left))


class Detokenizer(NamedTuple):
    """Text of a growing list of tokens, piece by piece, never half a character.

    decode: text of a list of ids; an incomplete character at its end shows as U+FFFD.
    window: the last tokens; those before it are settled.
    emitted: characters of the window's text that are out.
    """

    decode: Decode
    window: tuple[int, ...] = ()
    emitted: int = 0

    def push(self, token: int) -> tuple["Detokenizer", str]:
        """Takes a token in; returns the text that is now certain."""
        window = (*self.window, token)
        text = self.decode(window)
        # The bytes of an unfinished character, three at most, show as U+FFFD until the rest has
        # come. What stands before them is certain, a real U+FFFD included.
        unsettled = 0
        while unsettled < min(3, len(text)) and text[-1 - unsettled] == REPLACEMENT:
            unsettled += 1
        emitted = max(self.emitted, len(text) - unsettled)
        piece = text[self.emitted : emitted]
        if len(window) > 2 * _CONTEXT:
            tail = window[-_CONTEXT:]
            tail_text = self.decode(tail)
            dropped = len(text) - len(tail_text)
            if text.endswith(tail_text) and dropped <= emitted:
                window, emitted = tail, emitted - dropped
        return self._replace(window=window, emitted=emitted), piece

    def rest(self) -> str:
        """What is left when no token comes any more: an unfinished character shows as U+FFFD."""
        return self.decode(self.window)[self.emitted :] if self.window else ""


class StopScanner(NamedTuple):
    """Finds stop strings in text that arrives in pieces.

    held: text not yet given out, because it may be the beginning of a stop string.
    """

    stop: tuple[str, ...]
    held: str = ""

    def push(self, piece: str, may_stop: bool = True) -> tuple["StopScanner", str, bool]:
        """Takes a piece in.

        Args:
          may_stop: False passes over stop strings that this piece completes.

        Returns:
          The scanner, the text that may be given out, and whether a stop string was completed:
          then the text ends before it. The first one to be completed counts, the longest of
          those that end at the same place. So the borders of the pieces do not matter.
        """
        text = self.held + piece
        found = None
        for stop in self.stop if may_stop else ():
            # One that ended before this piece has had its chance.
            at = text.find(stop, max(0, len(self.held) - len(stop) + 1))
            if at >= 0 and (found is None or (at + len(stop), at) < found):
                found = at + len(stop), at
        if found is not None:
            return self._replace(held=""), text[: found[1]], True
        keep = max((_beginning(text, stop) for stop in self.stop), default=0)
        return self._replace(held=text[len(text) - keep :]), text[: len(text) - keep], False


def _beginning(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0


class Preview(NamedTuple):
    """What `FrontEnd.preview` would publish.

    count: N, of the licensed tokens. reason: why the request ends there, None while it goes on.
    text: the text that comes out with them; its last `flushed` characters only because nothing
      follows. detokenizer, scanner: the front end's state after.
    """

    count: int
    reason: str | None
    text: str
    flushed: int
    detokenizer: Detokenizer | None
    scanner: StopScanner


class FrontEnd:
    """Chooses what is published of one request.

    Args:
      decode: text of token ids; None publishes tokens only, and then there are no stop strings.
      max_new_tokens, min_new_tokens, stop, stop_ids: see `Request`.
    """

    def __init__(
        self,
        decode: Decode | None,
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        stop: tuple[str, ...] = (),
        stop_ids: tuple[int, ...] = (),
    ):
        if stop and decode is None:
            raise ValueError(f"stop: got {stop!r}, but without a tokenizer there is no text")
        self.max_new_tokens = max_new_tokens
        self.min_new_tokens = min_new_tokens
        self.stop_ids = frozenset(stop_ids)
        self.published = 0
        self.cancelled = False
        self._detokenizer = Detokenizer(decode) if decode is not None else None
        self._scanner = StopScanner(stop)

    @property
    def budget_left(self) -> int:
        return self.max_new_tokens - self.published

    def cancel(self) -> None:
        """From now on nothing is published."""
        self.cancelled = True

    def preview(self, licensed: Sequence[int]) -> Preview:
        """How many of the licensed tokens to commit; changes nothing.

        A stop id or the token that completes a stop string is the last one, and "stop" is the
        reason even where the budget ends there too. At the end of a request all held text comes
        out, except after a stop string.
        """
        detokenizer, scanner = self._detokenizer, self._scanner
        text, count, reason = "", 0, "cancelled" if self.cancelled else None
        cut = False
        for token in licensed:
            if reason is not None:
                break
            count += 1
            total = self.published + count
            may_stop = total > self.min_new_tokens
            if may_stop and token in self.stop_ids:
                reason = "stop"
                break
            if detokenizer is not None:
                detokenizer, piece = detokenizer.push(token)
                scanner, piece, cut = scanner.push(piece, may_stop)
                text += piece
            if cut:
                reason = "stop"
            elif total >= self.max_new_tokens:
                reason = "length"
        rest = ""
        if reason is not None and not cut:
            rest = scanner.held + (detokenizer.rest() if detokenizer is not None else "")
        return Preview(count, reason, text + rest, len(rest), detokenizer, scanner)

    def replay(self, tokens: Sequence[int]) -> str:
        """Takes in tokens that are published already; returns their text.

        Whatever they contain does not stop the request any more.
        """
        text = ""
        for token in tokens:
            if self._detokenizer is not None:
                self._detokenizer, piece = self._detokenizer.push(token)
                self._scanner, piece, _ = self._scanner.push(piece, may_stop=False)
                text += piece
        self.published += len(tokens)
        return text

    def extend(self, more: int) -> None:
        """Raises the budget of a request that its budget ended."""
        self.max_new_tokens += more

    def abandon(self) -> Preview:
        """The end of a request whose text cannot be made: nothing is published any more."""
        return Preview(0, "error", "", 0, self._detokenizer, self._scanner)

    def adopt(self, preview: Preview) -> None:
        """Takes over what was previewed, after its tokens have been committed."""
        self.published += preview.count
        self._detokenizer, self._scanner = preview.detokenizer, preview.scanner
