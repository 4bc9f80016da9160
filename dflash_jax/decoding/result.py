"""What a generation says about itself."""

import dataclasses
import enum


class Origin(enum.Enum):
    """Where a published token came from."""

    PROMPT = "prompt"  # the target's choice after the prompt, before any round
    DRAFT = "draft"  # an accepted proposal
    CORRECTION = "correction"  # the target's choice after a rejection
    BONUS = "bonus"  # the target's choice after every proposal was accepted
    PLAIN = "plain"  # the target's choice in a round without proposals


@dataclasses.dataclass(frozen=True)
class Round:
    """Counts of one round.

    proposed: columns the draft computed; verified: P, those the target checked;
    accepted: A; committed: N <= A + 1, less when a stop came first.
    """

    proposed: int
    verified: int
    accepted: int
    committed: int


@dataclasses.dataclass(frozen=True)
class Generation:
    """One row's result.

    tokens: generated ids, a stop id included.
    text: decoded, the stop id left out; None without a tokenizer.
    finish_reason: "stop" or "length".
    rounds: counts in order; the first token is chosen by the prefill and belongs to no round.
    draft_tokens: effective K; block_attention: the causality rule in force, None without a draft.
    """

    tokens: list[int]
    text: str | None
    finish_reason: str
    rounds: list[Round]
    draft_tokens: int
    block_attention: str | None

    @property
    def acceptance_length(self) -> float:
        """tau: mean of accepted + 1 over rounds that verified proposals; nan without any."""
        return acceptance_length(self.rounds)

    @property
    def origins(self) -> list[Origin]:
        """Origin of each token."""
        origins = [Origin.PROMPT]
        for r in self.rounds:
            own = Origin.BONUS if r.accepted == r.verified else Origin.CORRECTION
            own = own if r.verified else Origin.PLAIN
            origins += ([Origin.DRAFT] * r.accepted + [own])[: r.committed]
        return origins


def acceptance_length(rounds: list[Round]) -> float:
    """tau: mean of accepted + 1 over rounds that verified proposals; nan without any."""
    taken = [r.accepted + 1 for r in rounds if r.verified]
    return sum(taken) / len(taken) if taken else float("nan")


def accepted_per_position(rounds: list[Round], draft_tokens: int) -> list[float]:
    """For i = 1..K: share of the rounds that verified i proposals which accepted i of them."""
    shares = []
    for position in range(1, draft_tokens + 1):
        reached = [r for r in rounds if r.verified >= position]
        hits = sum(r.accepted >= position for r in reached)
        shares.append(hits / len(reached) if reached else float("nan"))
    return shares
