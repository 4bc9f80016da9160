"""What the phases of a round share: the compiled configuration and the parameters."""

import dataclasses
from typing import NamedTuple

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.draft.context import overlaid
from dflash_jax.draft.proposal_head import ProposalHead
from dflash_jax.precision import compute_dtype
from dflash_jax.target.model import TargetModel
from dflash_jax.typing import Params

MAX_DRAFT_TOKENS = 15


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a compiled round depends on besides array shapes.

    draft: None is plain decoding, and then draft_tokens is 0.
    draft_tokens: K, proposals of a block; the block is W = K + 1 columns wide.
    public_vocab: token ids from here on are padding of embedding and head.
    dtype: name of the compute dtype.
    context_dtype: of the stored context K/V where that role is represented apart; None: `dtype`.
    """

    target: TargetConfig
    draft: DraftConfig | None
    draft_tokens: int
    public_vocab: int
    dtype: str = "float32"
    context_dtype: str | None = None

    def __post_init__(self):
        if self.draft is None and self.draft_tokens:
            raise ValueError(f"draft_tokens: got {self.draft_tokens} without a draft, expected 0")
        if self.draft is not None and not 1 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"draft_tokens: got {self.draft_tokens}, expected 1..{MAX_DRAFT_TOKENS} "
                "(0 is plain decoding)"
            )

    @property
    def width(self) -> int:
        return self.draft_tokens + 1

    def proposed(self, verified: int) -> int:
        """Columns the draft computes in a round whose target checks `verified` of them."""
        # DFlash2 computes its whole block even when only a prefix can be verified.
        whole = self.draft is not None and self.draft.dflash2
        return self.draft_tokens if whole else verified

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.target_layer_ids if self.draft else ()


class Weights(NamedTuple):
    """Parameter trees of the pair; draft is None for plain decoding.

    proposal_head: the rows that a draft proposes from; None is the target's whole head.
    context_role: K/V projections of the context role; None: the query block's serve both roles.
    """

    target: Params
    draft: Params | None
    proposal_head: ProposalHead | None = None
    context_role: Params | None = None

    @property
    def draft_context(self) -> Params | None:
        """The draft's parameters as its context uses them."""
        return overlaid(self.draft, self.context_role)


def apply_target(spec: Spec, weights: Weights, *args, **kwargs):
    """`TargetModel.apply` with this pair's parameters and dtype."""
    model = TargetModel(spec.target, compute_dtype(spec.dtype))
    return model.apply({"params": weights.target}, *args, **kwargs)
