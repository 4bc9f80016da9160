"""A context role in another dtype changes what is proposed, never what is emitted."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from dflash_jax import Engine, generate
from dflash_jax.draft.context import CONTEXT_ROLE
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


@functools.cache
def plain():
    return generate(low_context(tiny.DFLASH2), PROMPTS, draft_tokens=0, **OPTIONS)


def test_generated_text_is_the_plain_one():
    drafted = generate(low_context(tiny.DFLASH), PROMPTS, draft_tokens=5, **OPTIONS)
    assert [result.tokens for result in drafted] == [result.tokens for result in plain()]
    assert all(len(result.rounds) > 5 for result in drafted)


def test_the_engine_keeps_the_roles_dtypes():
    engine = Engine(low_context(tiny.DFLASH2), max_rows=2, draft_tokens=5, max_context=128)
    assert "float32 with bfloat16 context K/V" in engine.describe()
    requests = [engine.submit(prompt, **OPTIONS) for prompt in PROMPTS]
    engine.run()
    for request, result in zip(requests, plain(), strict=True):
        assert request.tokens == result.tokens
    ring = engine.batch.state.draft.ring
    assert (ring.key.dtype, ring.value.dtype) == (jnp.bfloat16, jnp.float16)
    assert np.abs(np.float32(ring.key)).max() > 0
