"""XLA form: one fused elementwise expression over shifted copies."""

import jax.numpy as jnp

from pallas_kernels.elementary import represented, rms_norm


def prepare(x, base, delta, norm_weight=None, *, eps=None):
    """See `api.prepare`."""
    if norm_weight is not None:
        x = represented(rms_norm(x.astype(jnp.float32), norm_weight, eps), x.dtype)
    prepared = represented(_convolve(x, base[0], delta[:, :, 0]), x.dtype)
    return prepared, represented(delta[:, :, 1], x.dtype)


def finish(branch, residual, base, finish_delta):
    """See `api.finish`."""
    convolved = _convolve(branch, base[1], finish_delta)
    return (residual.astype(jnp.float32) + convolved).astype(residual.dtype)


def _convolve(x, base, delta):
    rows, columns, hidden = x.shape
    taps, groups = delta.shape[2:]
    grouped = (groups, hidden // groups)
    x = x.astype(jnp.float32).reshape(rows, columns, *grouped)
    base = base.astype(jnp.float32).reshape(taps, *grouped)
    delta = delta.astype(jnp.float32)[..., None]
    output = (base[0] + delta[:, :, 0]) * x
    for tap in range(1, min(taps, columns)):  # a further tap would reach before column 0 only
        shifted = jnp.pad(x[:, :-tap], ((0, 0), (tap, 0), (0, 0), (0, 0)))
        output = output + (base[tap] + delta[:, :, tap]) * shifted
    return output.reshape(rows, columns, hidden)
