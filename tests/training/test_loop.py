"""The loop: interrupted runs continue as if nothing had happened; the optimiser's numbers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax.training import loop

STEPS = 6


def loss(params, batch):
    x, y = batch
    error = jnp.tanh(x @ params["w"].T) + params["b"] - y
    return jnp.mean(error**2), {"bias": params["b"][0]}


def batch_at(step):
    random = np.random.default_rng((7, step))
    x = random.normal(size=(8, 3)).astype(np.float32)
    return x, np.tanh(x[:, :2])


def fresh(optimiser):
    w = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    return loop.init_state({"w": jnp.asarray(w), "b": jnp.zeros(2)}, optimiser)


def train(directory, batches=batch_at, steps=STEPS, **options):
    optimiser = loop.adamw(1e-1, STEPS)
    step = loop.make_step(loss, optimiser)
    options = dict(save_every=2, log_every=1) | options
    return loop.run(step, fresh(optimiser), batches, steps, directory, **options)


def metrics(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert all(row.pop("seconds") >= 0 for row in rows)
    return rows


def interrupted_at(step):
    def batches(at):
        if at == step:
            raise KeyboardInterrupt
        return batch_at(at)

    return batches


def assert_same_state(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("at", [1, 4, 5])
def test_resumed_run_is_the_run_that_would_have_been(tmp_path, at):
    """Killed before the first save, right after one, and one step past one."""
    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", interrupted_at(at))
    log = tmp_path / "parts" / "metrics.jsonl"
    assert [row["step"] for row in metrics(tmp_path / "parts")] == list(range(1, at + 1))
    log.write_text(log.read_text() + '{"step": 99, "lo')  # a line torn by the kill
    assert_same_state(train(tmp_path / "parts"), whole)
    assert int(whole.step) == STEPS
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_a_finished_run_is_only_read(tmp_path):
    whole = train(tmp_path)

    def never(step):
        raise AssertionError(step)

    rows = metrics(tmp_path)
    assert_same_state(train(tmp_path, never), whole)
    assert metrics(tmp_path) == rows


def test_the_two_newest_saves_are_kept(tmp_path):
    train(tmp_path, save_every=1)
    assert loop.saved_steps(tmp_path) == [5, 6]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "step_0000005",
        "step_0000006",
    ]


def test_an_unfinished_save_does_not_count(tmp_path):
    whole = train(tmp_path)
    (tmp_path / "step_0000009.orbax-checkpoint-tmp-1").mkdir()
    assert loop.saved_steps(tmp_path) == [4, 6]
    assert_same_state(train(tmp_path), whole)


def test_a_save_of_another_model_is_refused(tmp_path):
    train(tmp_path)
    other = loop.init_state({"w": jnp.zeros((4, 3)), "b": jnp.zeros(2)}, loop.adamw(1e-1, STEPS))
    with pytest.raises(ValueError):
        loop.restore(tmp_path, other)


def test_a_run_goes_on_with_the_recipe_it_was_begun_with(tmp_path):
    recipe = {"steps": 6, "learning_rate": 0.1, "init": None}
    loop.keep_recipe(tmp_path / "run", recipe)
    loop.keep_recipe(tmp_path / "run", dict(recipe))
    for change, message in (
        ({"steps": 7}, "steps: got 7, but this run was begun with 6"),
        ({"init": "tiny"}, "init: got 'tiny', but this run was begun with None"),
        ({"gamma": 4.0}, "gamma: got 4.0, but this run was begun with None"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            loop.keep_recipe(tmp_path / "run", recipe | change)
        assert str(tmp_path / "run" / "recipe.json") in str(raised.value)
    loop.keep_recipe(tmp_path / "run", recipe)  # a refused one has changed nothing


def test_metrics_rows(tmp_path):
    """Logged every second step, evaluated at every save (every third) and at the end."""
    seen = []

    def evaluate(params):
        seen.append(np.asarray(params["b"]).copy())
        return {"held_out": float(len(seen))}

    state = train(tmp_path, steps=5, save_every=3, log_every=2, evaluate=evaluate)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [2, 3, 4, 5]
    assert [row.get("held_out") for row in rows] == [None, 1.0, None, 2.0]
    np.testing.assert_array_equal(seen[-1], state.params["b"])
    # A row has the loss before the step, of that step's batch.
    optimiser = loop.adamw(1e-1, STEPS)
    step, state = loop.make_step(loss, optimiser), fresh(optimiser)
    for at in range(5):
        params = jax.tree.map(np.array, state.params)
        gradient = jax.grad(lambda p, at=at: loss(p, batch_at(at))[0])(params)
        state, _ = step(state, batch_at(at))
        row = next((row for row in rows if row["step"] == at + 1), None)
        if row is None:
            continue
        norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(gradient)))
        np.testing.assert_allclose(row["loss"], loss(params, batch_at(at))[0], rtol=1e-5)
        np.testing.assert_allclose(row["gradient_norm"], norm, rtol=1e-5)
        np.testing.assert_allclose(row["bias"], params["b"][0], rtol=1e-5)


# --- the optimiser ---


def updates(gradients, params, **options):
    """Updates that `adamw` gives for a sequence of gradients, at fixed parameters."""
    optimiser = loop.adamw(1.0, len(gradients), **options)
    state, given = optimiser.init(params), []
    apply = jax.jit(optimiser.update)
    for gradient in gradients:
        update, state = apply(gradient, state, params)
        given.append(update)
    return given


def test_schedule_warms_up_and_ends_at_a_tenth():
    """A constant gradient makes Adam's step exactly the learning rate."""
    params = {"b": jnp.zeros(1)}
    rates = [-float(u["b"][0]) for u in updates([{"b": jnp.ones(1)}] * 101, params, warmup=0.05)]
    np.testing.assert_allclose(rates[:6], [0, 0.2, 0.4, 0.6, 0.8, 1.0], atol=2e-5)
    np.testing.assert_allclose(rates[53], 0.55, atol=1e-4)  # half way from 5 to 101
    cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * (29 - 5) / 96)) / 2
    np.testing.assert_allclose(rates[29], cosine, atol=1e-4)
    np.testing.assert_allclose(rates[100], 0.1, atol=1e-3)
    assert np.argmax(rates) == 5


def test_a_run_of_one_step_learns():
    params = {"b": jnp.zeros(1)}
    (update,) = updates([{"b": jnp.ones(1)}], params)
    np.testing.assert_allclose(update["b"], -1.0, rtol=1e-5)


def test_matrices_alone_are_decayed():
    params = {"matrix": jnp.full((2, 2), 3.0), "gain": jnp.full(2, 3.0)}
    nothing = jax.tree.map(jnp.zeros_like, params)
    (_, update) = updates([nothing] * 2, params, warmup=0.5, decay=0.01)  # rates 0 and 1
    np.testing.assert_allclose(update["matrix"], -0.03, rtol=1e-6)
    np.testing.assert_array_equal(update["gain"], 0.0)


def test_gradients_are_clipped_to_norm_one():
    params = {"b": jnp.zeros(2)}
    unit = jnp.asarray([0.6, 0.8])

    def after(first):
        return updates([{"b": first * unit}, {"b": 0.5 * unit}], params, warmup=0.5)[1]["b"]

    np.testing.assert_array_equal(after(1000.0), after(2.0))
    assert np.abs(after(1000.0) - after(0.5)).max() > 0.05


def test_step_descends_and_counts():
    optimiser = optax.sgd(0.5)
    state = fresh(optimiser)
    before = jax.tree.map(np.array, state.params)
    gradient = jax.grad(lambda p: loss(p, batch_at(0))[0])(before)
    after, figures = loop.make_step(loss, optimiser)(state, batch_at(0))
    assert int(after.step) == 1 and set(figures) == {"loss", "gradient_norm", "bias"}
    for name in before:
        np.testing.assert_allclose(
            after.params[name], before[name] - 0.5 * gradient[name], rtol=1e-5, atol=1e-7
        )
