"""A context role in another dtype changes what is proposed, never what is emitted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import Engine, generate
from dflash_jax.draft.context import CONTEXT_ROLE
from dflash_jax.target.model import TargetModel
from dflash_jax.training.target import hidden_states
from tests.decoding import tiny


def low_context(config):
    """A float32 pair whose context role alone is bfloat16."""
    pair = tiny.pair(config, target=tiny.SMALL)
    role = {
        name: {
            "self_attn": {
                part: {"weight": layer["self_attn"][part]["weight"].astype(jnp.bfloat16)}
                for part in CONTEXT_ROLE
            }
        }
        for name, layer in pair.draft_params.items()
        if "self_attn" in layer
    }
    return dataclasses.replace(pair, context_dtype="bfloat16", context_role=role)


PROMPTS = tiny.prompts(2, longest=30)
OPTIONS = dict(max_new_tokens=40, ignore_eos=True)
TIE = 1e-5


@functools.cache
def forward():
    """Next-token logits of two padded texts by one forward: no draft and no cache."""
    pair = tiny.pair(tiny.DFLASH2, target=tiny.SMALL)

    @jax.jit
    def logits(tokens):
        params = {"params": pair.target_params}
        hidden = hidden_states(pair.target, pair.target_params, tokens).hidden
        return TargetModel(pair.target).apply(params, hidden, method="logits")

    return logits


def assert_plain_greedy(texts):
    padded = np.zeros((2, 72), np.int32)
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        padded[row, : len(prompt) + len(text)] = [*prompt, *text]
    logits = np.asarray(forward()(padded))
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        scores = logits[row, len(prompt) - 1 :][: len(text)]
        chosen = np.take_along_axis(scores, np.array(text)[:, None], axis=1)[:, 0]
        np.testing.assert_array_less(scores.max(axis=1) - chosen, TIE)


def test_generated_text_is_the_plain_one():
    drafted = generate(low_context(tiny.DFLASH), PROMPTS, draft_tokens=5, **OPTIONS)
    assert [len(result.tokens) for result in drafted] == [40, 40]
    assert_plain_greedy([result.tokens for result in drafted])


def test_the_engine_keeps_the_roles_dtypes():
    engine = Engine(low_context(tiny.DFLASH2), max_rows=2, draft_tokens=5, max_context=128)
    assert "float32 with bfloat16 context K/V" in engine.describe()
    requests = [engine.submit(prompt, **OPTIONS) for prompt in PROMPTS]
    engine.run()
    assert_plain_greedy([request.tokens for request in requests])
    ring = engine.batch.state.draft.ring
    assert (ring.key.dtype, ring.value.dtype) == (jnp.bfloat16, jnp.float16)
    assert np.abs(np.float32(ring.key)).max() > 0
