"""bfloat16 end to end: where drafted greedy text leaves plain text, neither run had a reason.

The two runs compute a logit in different shapes (one column, or W), so that nearly equal logits
may rank otherwise. The regret gate: at the first differing token, each run's own logits rate the
other run's choice within rounding of its own. Differences are counted, printed and bounded.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import generate, load_pair
from dflash_jax.decoding import round as phases
from dflash_jax.decoding.acceptance import point_mass
from dflash_jax.decoding.generate import prepare
from experiments.prompts import held_out_prompts

PROMPTS, TOKENS, NEW, K = 8, 96, 96, 7
# Logits here are up to some 20, where bfloat16 hidden states (8 bits) leave them uncertain by a
# few times 20 / 256; a wrong column or state is off by several whole units.
REGRET = 0.5

pytestmark = pytest.mark.slow

_verify = jax.jit(phases.verify, static_argnums=0)
_commit = jax.jit(phases.commit)


@functools.cache
def runs():
    """Plain and drafted results of every prompt, and the pairs that gave them."""
    plain = load_pair("tiny", None, "bfloat16")
    drafted = load_pair("tiny", "tiny-dflash2", "bfloat16")
    prompts = held_out_prompts(plain.tokenizer, PROMPTS, TOKENS)
    kwargs = dict(max_new_tokens=NEW, ignore_eos=True)
    texts = [
        generate(plain, prompts, draft_tokens=0, **kwargs),
        generate(drafted, prompts, draft_tokens=K, **kwargs),
    ]
    return prompts, (plain, drafted), texts


def logits_before(pair, draft_tokens, prompts, results, ends):
    """Logits that chose token `ends[b]` of each row, from the rounds that led there, repeated.

    Rejected columns cannot reach the columns before them: any proposal stands in for them.
    """
    job = prepare(pair, prompts, draft_tokens=draft_tokens, max_new_tokens=NEW, ignore_eos=True)
    state = job.prefill()._replace(anchor=jnp.asarray([r.tokens[0] for r in results], jnp.int32))
    found = np.zeros((len(prompts), pair.target.vocab_size), np.float32)
    done = np.ones(len(prompts), int)  # tokens of each row so far
    for index in range(max(len(result.rounds) for result in results)):
        count = np.zeros(len(prompts), np.int32)
        committed = np.zeros_like(count)
        licensed = np.zeros((len(prompts), draft_tokens + 1), np.int32)
        for row, result in enumerate(results):
            if index < len(result.rounds):
                counts = result.rounds[index]
                count[row], committed[row] = counts.verified, counts.committed
                licensed[row, : counts.committed] = result.tokens[done[row] :][: counts.committed]
        proposal = point_mass(jnp.asarray(licensed[:, :draft_tokens]), jnp.asarray(count))
        verified = _verify(job.spec, job.weights, state, proposal)
        logits = np.asarray(verified.logits)
        for row, end in enumerate(ends):
            if done[row] <= end < done[row] + committed[row]:
                found[row] = logits[row, end - done[row]]
        accepted = phases.Accepted(jnp.asarray(licensed), jnp.maximum(committed - 1, 0))
        state = _commit(state, verified, accepted, jnp.asarray(committed))
        done += committed
    return found


def test_differences_from_plain_text_pass_the_regret_gate():
    prompts, pairs, (plain, drafted) = runs()
    assert np.mean([r.accepted for result in drafted for r in result.rounds]) > 0.3
    ends = []
    for one, other in zip(plain, drafted, strict=True):
        differing = np.flatnonzero(np.array(one.tokens) != np.array(other.tokens))
        # Without a difference the last token is looked at: both regrets are then zero.
        ends.append(int(differing[0]) if differing.size else NEW - 1)
    own = logits_before(pairs[0], 0, prompts, plain, ends)
    theirs = logits_before(pairs[1], K, prompts, drafted, ends)
    count = 0
    for row, end in enumerate(ends):
        a, b = plain[row].tokens[end], drafted[row].tokens[end]
        # The repeated rounds are the rounds that were run, up to a rounding of their logits: each
        # run chose its best token.
        assert own[row, a] >= own[row].max() - REGRET / 2
        assert theirs[row, b] >= theirs[row].max() - REGRET / 2
        if a == b:
            continue
        count += 1
        regrets = own[row, a] - own[row, b], theirs[row, b] - theirs[row, a]
        print(f"prompt {row}, token {end}: {b} for {a}, regrets {regrets[0]:.3f} {regrets[1]:.3f}")
        assert max(regrets) <= REGRET
    print(f"{count} of {len(prompts)} texts differ somewhere")
