"""DFlash2's candidate selector: a left-to-right conditional walk over top-k shortlists."""

from jaxtyping import Array, Float, Int

from pallas_kernels.candidate_selector import pallas, reference, triton, xla
from pallas_kernels.dispatch import check_shape, choose
from pallas_kernels.triton_call import with_xla_gradient

_IMPLEMENTATIONS = {
    "reference": reference.candidate_selector,
    "xla": xla.candidate_selector,
    "pallas": with_xla_gradient(pallas.candidate_selector, xla.candidate_selector),
    "triton": triton.candidate_selector,
}


def candidate_selector(
    scores: Float[Array, "B K C"],
    candidates: Int[Array, "B K C"],
    projected: Float[Array, "B K R"],
    predecessor: Float[Array, "V R"],
    successor: Float[Array, "V R"],
    anchor: Int[Array, "B"],
    temperature: Float[Array, "B"],
    uniforms: Float[Array, "B K"],
    *,
    implementation: str | None = None,
) -> tuple[Int[Array, "B K"], Int[Array, "B K"], Float[Array, "B K C"]]:
    """Draws a path through the shortlists, each step given the token really chosen before it.

    With predecessor token p (the anchor at i = 0) candidate c of mask column i has energy
    `E[c] = scores[i, c] + sum_r predecessor[p, r] * projected[i, r] * successor[C_i[c], r]`.
    Temperature <= 0 takes the lowest-ranked argmax and q is one-hot; otherwise
    q = softmax(E / temperature) and the choice is the smallest j whose cumulative q exceeds the
    uniform. A candidate of zero mass is never chosen, however close the uniform is to 1.

    Args:
      scores: unary scores, by rank (see `elementary.stable_top_k`).
      candidates: global token ids of the shortlists.
      projected: hidden columns through the hidden projection.
      predecessor: codebook gathered by the token before.
      successor: codebook gathered by the candidate.
      anchor: token before the first mask column.
      temperature: per row.
      uniforms: in [0, 1), one per row and column.
      implementation: None (best available), "pallas", "pallas_interpret", "triton" (needs
        jax-triton; has no gradient), "xla" or "reference".

    Returns:
      `(tokens, choices, q)`: int32 token ids, int32 ranks, and the float32 law each choice was
      really drawn from.

    Raises:
      ValueError: a shape does not fit, or the implementation is unknown or unavailable.

    References:
      Specification of DFlash, DFlash2 conditional path.
    """
    function = choose("candidate_selector", _IMPLEMENTATIONS, implementation)
    rows, draft_tokens, _ = check_shape("scores", scores, (None, None, None))
    check_shape("candidates", candidates, scores.shape)
    *_, rank = check_shape("projected", projected, (rows, draft_tokens, None))
    check_shape("predecessor", predecessor, (None, rank))
    check_shape("successor", successor, predecessor.shape)
    check_shape("anchor", anchor, (rows,))
    check_shape("temperature", temperature, (rows,))
    check_shape("uniforms", uniforms, (rows, draft_tokens))
    return function(
        scores, candidates, projected, predecessor, successor, anchor, temperature, uniforms
    )
