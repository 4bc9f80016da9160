"""The definition, one column at a time."""

import jax.numpy as jnp

from pallas_kernels.elementary import rms_norm


def prepare(x, base, delta, norm_weight=None, *, eps=None):
    """See `api.prepare`; plain float32."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    finish_delta = delta[:, :, 1].astype(x.dtype)
    return _convolve(x, base[0], delta[:, :, 0]).astype(x.dtype), finish_delta


def finish(branch, residual, base, finish_delta):
    """See `api.finish`; plain float32."""
    convolved = _convolve(branch, base[1], finish_delta)
    return (residual.astype(jnp.float32) + convolved).astype(residual.dtype)


def _convolve(x, base, delta):
    columns, hidden = x.shape[1:]
    taps, groups = delta.shape[2:]
    per_channel = delta.astype(jnp.float32).repeat(hidden // groups, axis=-1)  # [B, W, taps, H]
    coefficient = base.astype(jnp.float32) + per_channel
    outputs = []
    for column in range(columns):
        terms = [
            coefficient[:, column, tap] * x[:, column - tap].astype(jnp.float32)
            for tap in range(taps)
            if column - tap >= 0
        ]
        outputs.append(sum(terms))
    return jnp.stack(outputs, axis=1)
