"""The Qwen3.5 text stack in NumPy float64, token by token: how far is either float32 side off?

Written from the definitions; it shares no code with the model it judges.
"""

import dataclasses

import numpy as np

from dflash_jax.config.target import FULL


@dataclasses.dataclass
class Exact:
    """Of one prompt of T tokens; residual `[layers, T, H]` is before the final norm.

    keys, values: layer -> `[T, K, D]`, rotated. columns: layer -> `[T, C]`, before the convolution.
    states: (layer, tokens processed) -> `[Hv, Dk, Dv]`, for the lengths asked for.
    """

    residual: np.ndarray
    hidden: np.ndarray
    logits: np.ndarray
    keys: dict
    values: dict
    columns: dict
    states: dict


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def widened(params):
    if isinstance(params, dict):
        return {name: widened(value) for name, value in params.items()}
    return np.float64(np.asarray(params))


def forward(config, params, ids, lengths) -> Exact:
    """Runs `ids` from an empty cache; keeps the GDN states after each of `lengths` tokens."""
    params = widened(params)
    stack = params["model"]
    x = stack["embed_tokens"]["weight"][ids]
    found = Exact(None, None, None, {}, {}, {}, {})
    residual = []

    def norm(x, gain):
        return gain * x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)

    for index in range(config.num_hidden_layers):
        layer = stack[f"layers_{index}"]
        normed = norm(x, 1 + layer["input_layernorm"]["weight"])
        mix = _attention if config.layer_types[index] == FULL else _gated_delta_net
        x = x + mix(config, layer, index, normed, norm, lengths, found)
        normed = norm(x, 1 + layer["post_attention_layernorm"]["weight"])
        gate, up, down = (layer["mlp"][f"{n}_proj"]["weight"].T for n in ("gate", "up", "down"))
        x = x + (silu(normed @ gate) * (normed @ up)) @ down
        residual.append(x)
    found.residual = np.stack(residual)
    found.hidden = norm(x, 1 + stack["norm"]["weight"])
    head = stack["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    found.logits = found.hidden @ head["weight"].T
    return found


def _attention(config, layer, index, x, norm, lengths, found):
    tokens, weights = len(x), layer["self_attn"]
    heads, kv_heads, dim = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )  # fmt: skip
    half = config.rotary_dim // 2
    frequency = np.float64(config.rope_theta) ** (-2 * np.arange(half) / config.rotary_dim)
    angle = (np.arange(tokens)[:, None] * frequency)[:, None]

    def rotated(y):
        first, second = y[..., :half], y[..., half : 2 * half]
        turned = [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ]
        return np.concatenate([*turned, y[..., 2 * half :]], axis=-1)

    both = (x @ weights["q_proj"]["weight"].T).reshape(tokens, heads, 2 * dim)
    query, gate = both[..., :dim], both[..., dim:]
    key = (x @ weights["k_proj"]["weight"].T).reshape(tokens, kv_heads, dim)
    value = (x @ weights["v_proj"]["weight"].T).reshape(tokens, kv_heads, dim)
    query = rotated(norm(query, 1 + weights["q_norm"]["weight"]))
    key = rotated(norm(key, 1 + weights["k_norm"]["weight"]))
    found.keys[index], found.values[index] = key, value
    key, value = (np.repeat(y, heads // kv_heads, axis=1) for y in (key, value))
    scores = np.einsum("tnd,snd->nts", query, key) * dim**-0.5
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    mass = np.exp(scores - scores.max(-1, keepdims=True))
    mass /= mass.sum(-1, keepdims=True)
    mixed = np.einsum("nts,snd->tnd", mass, value) * sigmoid(gate)
    return mixed.reshape(tokens, -1) @ weights["o_proj"]["weight"].T


def _gated_delta_net(config, layer, index, x, norm, lengths, found):
    tokens, weights = len(x), layer["linear_attn"]
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    columns = x @ weights["in_proj_qkv"]["weight"].T
    found.columns[index] = columns
    taps = weights["conv1d"]["weight"][:, 0]
    width = taps.shape[1]
    joined = np.concatenate([np.zeros((width - 1, columns.shape[1])), columns])
    mixed = silu(sum(joined[tap : tap + tokens] * taps[:, tap] for tap in range(width)))
    query, key, value = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=-1)

    def unit(y):
        y = y.reshape(tokens, key_heads, key_dim)
        y = y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
        return np.repeat(y, value_heads // key_heads, axis=1)

    query, key = unit(query) * key_dim**-0.5, unit(key)
    value = value.reshape(tokens, value_heads, value_dim)
    step = np.logaddexp(0, x @ weights["in_proj_a"]["weight"].T + weights["dt_bias"])
    decay = np.exp(-np.exp(weights["A_log"]) * step)
    beta = sigmoid(x @ weights["in_proj_b"]["weight"].T)
    state, outputs = np.zeros((value_heads, key_dim, value_dim)), np.zeros_like(value)
    for t in range(tokens):
        state = decay[t][:, None, None] * state
        error = value[t] - np.einsum("hkd,hk->hd", state, key[t])
        state = state + key[t][:, :, None] * (beta[t][:, None] * error)[:, None, :]
        outputs[t] = np.einsum("hkd,hk->hd", state, query[t])
        if t + 1 in lengths:
            found.states[index, t + 1] = state
    z = (x @ weights["in_proj_z"]["weight"].T).reshape(outputs.shape)
    gated = norm(outputs, weights["norm"]["weight"]) * silu(z)
    return gated.reshape(tokens, -1) @ weights["out_proj"]["weight"].T
