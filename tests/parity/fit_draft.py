"""A minute of training, so that a random target's draft is accepted to varying length."""

import torch
from dflash.model import DFlash2DraftModel
from torch.nn.functional import cross_entropy

from tests.parity.draft_outputs import tap_features


def fit(draft, target, texts, first_anchor, generator, steps=700, stop=1.2, rate=2e-3):
    """Fits the draft to the target's own text; stops once the smoothed loss is below `stop`.

    Each step draws one anchor position for all rows; the block sees the features before it.

    Args:
      texts: [N, T] greedy text of the target.
      first_anchor: smallest anchor position.
      stop: mean cross entropy per token, about the share of wrong proposals wanted.

    Returns:
      The last smoothed loss.
    """
    features = tap_features(target, texts, draft.target_layer_ids)
    embed, head = target.get_input_embeddings(), target.lm_head
    width, smooth = draft.block_size, None
    optimizer = torch.optim.Adam(draft.parameters(), lr=rate)
    draft.train()
    for step in range(steps):
        last = texts.shape[1] - width + 1
        p = int(torch.randint(first_anchor, last, (), generator=generator))
        block = torch.full((texts.shape[0], width), draft.mask_token_id)
        block[:, 0] = texts[:, p]
        hidden = draft(
            target_hidden=features[:, :p],
            noise_embedding=embed(block).detach(),
            position_ids=torch.arange(p + width)[None],
        )[:, 1:]
        gold = texts[:, p + 1 : p + width]
        logits = draft.compute_logits(hidden, head)
        loss = cross_entropy(logits.flatten(0, 1), gold.flatten())
        current = loss.item()
        if isinstance(draft, DFlash2DraftModel):  # energies of the whole vocabulary
            selector = draft.candidate_selector
            pair = selector.predecessor_codebook(texts[:, p : p + width - 1])
            pair = pair * selector.hidden_projection(hidden)
            energy = logits + pair @ selector.successor_codebook.weight.T
            second = cross_entropy(energy.flatten(0, 1), gold.flatten())
            loss, current = loss + second, second.item()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        smooth = current if smooth is None else 0.95 * smooth + 0.05 * current
        if step >= 50 and smooth < stop:
            break
    draft.eval()
    return smooth
