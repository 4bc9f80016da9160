"""Reference outputs of the drafts: `draft_*/oracle.safetensors`."""

import torch
from dflash.model import DFlash2DraftModel, _crop_to, _make_cache

from tests.parity.target_outputs import ResidualTaps

TEMPERATURE = 0.8  # of the sampled walk


@torch.no_grad()
def tap_features(target, ids: torch.Tensor, layer_ids) -> torch.Tensor:
    """[B, T, taps * H]: residual outputs of the listed blocks, the last block's before the norm."""
    with ResidualTaps(target) as taps:
        target(ids)
    return taps.features(layer_ids)


def draft_inputs(target, context_ids, layer_ids, appended, width, last_width, mask_id):
    """Rounds: context features appended since the last one, then a masked block.

    Args:
      context_ids: [1, T]; T exceeds `sum(appended)`: the anchors are context tokens.
      appended: context columns appended before each round's block.
    """
    features = tap_features(target, context_ids, layer_ids)
    embed = target.get_input_embeddings()
    x = {
        "context_ids": context_ids,
        "target_embed": embed.weight.detach(),
        "target_lm_head": target.lm_head.weight.detach(),
    }
    begin = 0
    for r, count in enumerate(appended):
        frontier = begin + count
        columns = last_width if r == len(appended) - 1 else width
        ids = torch.full((1, columns), mask_id)
        ids[:, 0] = context_ids[:, frontier]
        x[f"r{r}.target_hidden"] = features[:, begin:frontier]
        x[f"r{r}.block_ids"] = ids
        x[f"r{r}.noise_embedding"] = embed(ids).detach()
        x[f"r{r}.position_ids"] = torch.arange(begin, frontier + columns)[None]
        begin = frontier
    return x


@torch.no_grad()
def draft_oracle(draft, head, x: dict[str, torch.Tensor], cached: bool = True):
    """Outputs for `draft_inputs`, each round on one cache that a block leaves unchanged.

    Args:
      draft: DFlashDraftModel or DFlash2DraftModel.
      head: the target's output head, a module.
      cached: False recomputes the whole context every round instead; the same values, a check.
    """
    out = dict(x)
    rounds = sum(name.endswith(".block_ids") for name in x)
    cache = _make_cache(draft.config) if cached else None
    seen: dict = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, __, kwargs, y, i=i: seen.update({i: y, "context": kwargs["target_hidden"]}),
            with_kwargs=True,
        )
        for i, layer in enumerate(draft.layers)
    ]
    context = x["r0.target_hidden"][:, :0]
    for r in range(rounds):
        new, positions = x[f"r{r}.target_hidden"], x[f"r{r}.position_ids"]
        context = torch.cat([context, new], dim=1)
        hidden = draft(
            target_hidden=new if cached else context,
            noise_embedding=x[f"r{r}.noise_embedding"],
            position_ids=positions if cached else torch.arange(positions[0, -1] + 1)[None],
            past_key_values=cache,
            use_cache=cached,
        )
        if cached:
            _crop_to(cache, context.shape[1])
        logits = draft.compute_logits(hidden[:, 1:], head)
        out[f"r{r}.hidden"], out[f"r{r}.logits"] = hidden, logits
        if r == 0:
            out["layers.fused_context"] = seen["context"]
            for i in range(len(draft.layers)):
                out[f"layers.hidden{i}"] = seen[i]
        if isinstance(draft, DFlash2DraftModel):
            args = (hidden[:, 1:], x[f"r{r}.block_ids"][:, 0], head)
            out[f"r{r}.path"], out[f"r{r}.candidates"], _ = draft.propose(*args, 0.0)
            (
                out[f"r{r}.sampled_path"],
                out[f"r{r}.sampled_candidates"],
                out[f"r{r}.sampled_q"],
            ) = draft.propose(*args, TEMPERATURE)
        else:
            out[f"r{r}.argmax"] = logits.argmax(-1)
    for hook in hooks:
        hook.remove()
    return out


@torch.no_grad()
def walk_energies(draft, hidden, logits, candidates, anchor, path):
    """E [1, K, C] over given candidates, each column's predecessor taken from a given path [1, K].

    The package's `propose` returns neither energies nor q for a path of one's own.
    """
    selector = draft.candidate_selector
    gate = selector.hidden_projection(hidden)
    predecessor, rows = anchor, []
    for i in range(path.shape[1]):
        successor = selector.successor_codebook(candidates[:, i])
        pair = selector.predecessor_codebook(predecessor) * gate[:, i]
        unary = logits[:, i].gather(-1, candidates[:, i])
        rows.append(unary + torch.einsum("br,bcr->bc", pair, successor))
        predecessor = path[:, i]
    return torch.stack(rows, dim=1)


def smallest_gap(scores: torch.Tensor) -> float:
    """Smallest difference between the best and the second best score [..., n] of any row."""
    top = scores.topk(2, dim=-1).values
    return (top[..., 0] - top[..., 1]).min().item()


def oracle_gap(draft, oracle: dict[str, torch.Tensor]) -> float:
    """Smallest margin of a greedy proposal in a draft oracle."""
    gaps = []
    for r in range(sum(name.endswith(".block_ids") for name in oracle)):
        scores = oracle[f"r{r}.logits"]
        if isinstance(draft, DFlash2DraftModel):
            scores = walk_energies(
                draft, oracle[f"r{r}.hidden"][:, 1:], scores, oracle[f"r{r}.candidates"],
                oracle[f"r{r}.block_ids"][:, 0], oracle[f"r{r}.path"],
            )  # fmt: skip
        gaps.append(smallest_gap(scores))
    return min(gaps)
