"""Greedy speculative decoding with the official packages, and with a rollback that is right.

`dflash.model.dflash_generate` crops the target's cache after a rejection. On a Qwen3.5 target that
rolls back keys, values and the convolution but not the recurrent state, so its text is silently
wrong from the first rejection on. Here the cache from before the verify block is restored and
the committed inputs are replayed.
"""

import copy
import dataclasses

import torch
from dflash.model import DFlash2DraftModel, _crop_to, _draft_value, _make_cache
from transformers import DynamicCache

from tests.parity.draft_outputs import smallest_gap, walk_energies
from tests.parity.target_outputs import ResidualTaps


@dataclasses.dataclass
class Trace:
    """One generation.

    ids: [1, T + new] prompt and output.
    blocks: per round the verify input: anchor and proposals.
    accepted: per round the proposals accepted, A.
    published: per round the tokens published, min(A + 1, remaining budget).
    gaps: per output token the target's top logit minus its second.
    draft_gaps: per round with proposals, the smallest margin of a proposal: best minus second best
      logit (DFlash) or energy (DFlash2).
    """

    ids: torch.Tensor
    blocks: list[torch.Tensor] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    published: list[int] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    draft_gaps: list[float] = dataclasses.field(default_factory=list)

    def padded_blocks(self, width: int) -> torch.Tensor:
        """The blocks as one array [rounds, width], -1 where a block is narrower."""
        rows = torch.full((len(self.blocks), width), -1)
        for row, block in zip(rows, self.blocks, strict=True):
            row[: len(block)] = block
        return rows


def _gap(logits: torch.Tensor) -> torch.Tensor:
    top = logits.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


def _propose(draft, target, hidden, anchor):
    """Proposals [1, K] and the smallest margin of a choice."""
    logits = draft.compute_logits(hidden, target.lm_head)
    if not isinstance(draft, DFlash2DraftModel):
        return logits.argmax(-1), smallest_gap(logits)
    path, candidates, _ = draft.propose(hidden, anchor, target.lm_head, 0.0)
    return path, smallest_gap(walk_energies(draft, hidden, logits, candidates, anchor, path))


@torch.inference_mode()
def generate(
    target,
    draft,
    prompt: torch.Tensor,
    new_tokens: int,
    draft_tokens: int | None = None,
    tail: str = "package",
) -> Trace:
    """Greedy speculative generation of exactly `new_tokens` tokens; no stop token.

    Args:
      prompt: [1, T].
      draft_tokens: K; default: the draft's trained block width - 1.
      tail: the extents when R tokens remain and R is small.
        "package": P = min(K, R) proposals are verified, the block has P + 1 columns.
        "specification": P = min(K, R - 1), because the target's own token fills the last place;
        a DFlash block has P + 1 columns, a DFlash2 block all K + 1 of which P are verified. With
        P = 0 the anchor alone is verified.
    """
    if tail not in ("package", "specification"):
        raise ValueError(f"tail: {tail!r}, expected 'package' or 'specification'")
    width = draft.block_size if draft_tokens is None else draft_tokens + 1
    scale = float(_draft_value(draft.config, "input_embedding_scale", 1.0))
    embed = target.get_input_embeddings()
    target_cache = DynamicCache(config=target.config)
    draft_cache = _make_cache(draft.config)

    with ResidualTaps(target) as taps:

        def run_target(ids):
            logits = target(ids, past_key_values=target_cache, use_cache=True).logits
            return logits, taps.features(draft.target_layer_ids)

        logits, pending = run_target(prompt)
        trace = Trace(ids=prompt, gaps=[_gap(logits[0, -1]).item()])
        anchor = logits[:, -1].argmax(-1, keepdim=True)
        trace.ids = torch.cat([prompt, anchor], dim=1)
        frontier = prompt.shape[1]  # positions the target has consumed
        while (remaining := prompt.shape[1] + new_tokens - trace.ids.shape[1]) > 0:
            proposals = min(width - 1, remaining if tail == "package" else remaining - 1)
            columns = proposals + 1
            if tail == "specification" and isinstance(draft, DFlash2DraftModel):
                columns = width
            block = torch.full((1, columns), draft.mask_token_id)
            block[:, :1] = anchor
            if proposals:
                begin = frontier - pending.shape[1]
                hidden = draft(
                    target_hidden=pending,
                    noise_embedding=embed(block) * scale,
                    position_ids=torch.arange(begin, frontier + columns)[None],
                    past_key_values=draft_cache,
                    use_cache=True,
                )
                _crop_to(draft_cache, frontier)
                block[:, 1:], gap = _propose(draft, target, hidden[:, 1:], block[:, 0])
                trace.draft_gaps.append(gap)
                block = block[:, : proposals + 1]
            before = copy.deepcopy(target_cache)
            logits, features = run_target(block)
            choice = logits.argmax(-1)
            accepted = int((block[:, 1:] == choice[:, :-1]).int().cumprod(1).sum())
            published = min(accepted + 1, remaining)
            trace.gaps += _gap(logits[0, :published]).tolist()
            if published < block.shape[1]:  # undo, then replay what is committed
                target_cache = before
                _, features = run_target(block[:, :published])
            pending = features if proposals else torch.cat([pending, features], dim=1)
            frontier += published
            anchor = choice[:, published - 1 : published]
            trace.ids = torch.cat([trace.ids, choice[:, :published]], dim=1)
            trace.blocks.append(block[0])
            trace.accepted.append(accepted)
            trace.published.append(published)
    return trace
