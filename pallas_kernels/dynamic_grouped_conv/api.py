"""DFlash2's dynamic grouped convolution: `prepare` before a branch, `finish` after it."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import check_shape, choose
from pallas_kernels.dynamic_grouped_conv import pallas, reference, xla
from pallas_kernels.triton_call import with_xla_gradient

_PREPARE = {
    "reference": reference.prepare,
    "xla": xla.prepare,
    "pallas": with_xla_gradient(pallas.prepare, xla.prepare),
}
_FINISH = {
    "reference": reference.finish,
    "xla": xla.finish,
    "pallas": with_xla_gradient(pallas.finish, xla.finish),
}


def prepare(
    x: Float[Array, "B W H"],
    base: Float[Array, "2 taps H"],
    delta: Float[Array, "B W 2 taps G"],
    norm_weight: Float[Array, "H"] | None = None,
    *,
    eps: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B W H"], Float[Array, "B W taps G"]]:
    """Convolves the normalised input of a branch along the block.

    `prepared[b, i, c] = sum_t (base[0, t, c] + delta[b, i, 0, t, g]) * x[b, i - t, c]` with
    g = c // (H / G); columns before 0 do not exist: there is no history.

    Args:
      x: normalised branch input; with `norm_weight`, the branch input before its RMSNorm.
      base: static coefficients of both sides, any number of taps.
      delta: increments of both sides, projected from the normalised input.
      norm_weight: gain of a plain RMSNorm applied here, rounded to `x.dtype` as the input of the
        projection was; None if `x` is normalised already.
      eps: of that norm; given exactly if `norm_weight` is.
      implementation: None (best available), "pallas", "pallas_interpret", "xla" or "reference".

    Returns:
      `(prepared, finish_delta)`, both in `x.dtype` (sums in float32); `finish` consumes the
      represented `finish_delta`.

    Raises:
      ValueError: a shape does not fit, or the implementation is unknown or unavailable.
    """
    function = choose("dynamic_grouped_conv.prepare", _PREPARE, implementation)
    rows, columns, hidden = check_shape("x", x, (None, None, None))
    _, taps, _ = check_shape("base", base, (2, None, hidden))
    *_, groups = check_shape("delta", delta, (rows, columns, 2, taps, None))
    _check_groups("delta", groups, hidden)
    if (norm_weight is None) != (eps is None):
        raise ValueError(f"eps: got {eps}, expected a number exactly if norm_weight is given")
    if norm_weight is None:
        return function(x, base, delta)
    check_shape("norm_weight", norm_weight, (hidden,))
    return function(x, base, delta, norm_weight, eps=eps)


def finish(
    branch: Float[Array, "B W H"],
    residual: Float[Array, "B W H"],
    base: Float[Array, "2 taps H"],
    finish_delta: Float[Array, "B W taps G"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B W H"]:
    """Convolves the output of a branch with the second side and adds the residual.

    Args:
      branch: output of the branch (attention or MLP).
      residual: what the branch is added to.
      base: as in `prepare`; side 1 is used.
      finish_delta: from `prepare`.
      implementation: as in `prepare`.

    Returns:
      `residual + convolution`, summed in float32, in `residual.dtype`.

    Raises:
      ValueError: a shape does not fit, or the implementation is unknown or unavailable.
    """
    function = choose("dynamic_grouped_conv.finish", _FINISH, implementation)
    rows, columns, hidden = check_shape("branch", branch, (None, None, None))
    check_shape("residual", residual, (rows, columns, hidden))
    _, taps, _ = check_shape("base", base, (2, None, hidden))
    *_, groups = check_shape("finish_delta", finish_delta, (rows, columns, taps, None))
    _check_groups("finish_delta", groups, hidden)
    return function(branch, residual, base, finish_delta)


def _check_groups(name: str, groups: int, hidden: int) -> None:
    if groups == 0 or hidden % groups:
        raise ValueError(f"{name}: got {groups} groups, expected a divisor of hidden {hidden}")
