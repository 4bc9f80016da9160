"""The check for real GPUs, with interpreted kernels at tiny shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from experiments import device_figures, device_plan, device_round, round_programs
from pallas_kernels import cuda_compile, registry
from pallas_kernels.context_kv_materialize import context_kv_materialize
from pallas_kernels.shapes import Case


def rings(key):
    keys = jax.random.split(key, 4)
    ring = (2, 1, 8, 1, 16)
    return (
        *(jax.random.normal(k, (2, 1, 3, 1, 16)) for k in keys[:2]),
        jnp.ones((2, 16)),
        *(jax.random.normal(k, ring) for k in keys[2:]),
        jnp.full(1, 6, jnp.int32),
        jnp.full(1, 3, jnp.int32),
    )


RINGS = Case(
    op="context_kv_materialize",
    shape="tiny B=1",
    run=functools.partial(context_kv_materialize, eps=1e-6, theta=1e4, rotary_dim=16),
    operands=rings,
    minimum_bytes=2 * 2 * 3 * 16 * 8,
    moved_bytes=2 * 2 * 3 * 16 * 12,
    flops=1,
    in_place=(3, 4),
)


def scaled(factor, *, dtype=jnp.float32):
    """A case whose kernel multiplies the reference's result."""

    def run(x, *, implementation):
        return x if implementation == "reference" else (x * factor).astype(dtype)

    operands = functools.partial(jax.random.normal, shape=(64,), dtype=dtype)
    return Case("scaled", "tiny B=1", run, lambda key: (operands(key),), 64, 64, 64)


# --- one kernel ---


def test_a_right_kernel_passes():
    result = device_figures.measure(RINGS, "pallas_interpret", most_calls=3)
    assert result.failures == () and len(result.errors) == 2 and max(result.errors) < 1e-5
    assert result.seconds > 0
    assert result.bandwidth == pytest.approx(RINGS.minimum_bytes / result.seconds)


def test_a_wrong_kernel_is_seen():
    (text,) = device_figures.measure(scaled(1.01), "pallas_interpret").failures
    assert "scaled tiny B=1 (pallas_interpret): output 0: error" in text
    assert device_figures.measure(scaled(1.0), "pallas_interpret").failures == ()
    assert device_figures.measure(scaled(float("nan")), "pallas_interpret").failures


@pytest.mark.parametrize(
    "got, expected, wrong",
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], "1 of 2 integers differ"),
        ([1.0, 0.0], [1.001, 0.0], None),
        ([1.0, 0.0], [1.01, 0.0], "error"),
        # Beside entries of size one an error of 1e-4 at a zero is rounding.
        ([1.0, 1e-4], [1.0, 0.0], None),
        ([1.0, np.nan], [1.0, np.nan], "nan"),
        ([np.inf, 1.0], [1.0, 1.0], "inf"),
    ],
)
def test_comparison(got, expected, wrong):
    dtype = np.float32 if isinstance(got[0], float) else np.int32
    _, failures = device_figures.compare([np.asarray(got, dtype)], [np.asarray(expected, dtype)])
    assert (not failures) if wrong is None else wrong in failures[0]


def test_comparison_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"output 0: got int32\(2,\), the reference has int32\(3,"):
        device_figures.compare([np.zeros(2, np.int32)], [np.zeros(3, np.int32)])


def test_calls_in_turn_are_separate_calls():
    """Each on its own operands, those updated in place among the results."""
    operands = [RINGS.operands(jax.random.key(seed)) for seed in range(3)]
    program = jax.jit(device_figures.calls_in_turn(RINGS, "xla"))
    moving, outputs = program([o[3:5] for o in operands], [(*o[:3], *o[5:]) for o in operands])
    assert outputs == [(), (), ()]
    for own, args in zip(moving, operands, strict=True):
        for one, other in zip(own, RINGS.run(*args, implementation="xla"), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_every_kernel_is_in_the_plan():
    """One geometry an op, one row and eight, and the 27B pair wherever it has the op."""
    cases = list(device_figures.real_cases())
    everything = [case for cases in registry.CASES.values() for case in cases()]
    assert {case.op for case in cases} == {case.op for case in everything}
    for op in {case.op for case in cases}:
        shapes = [case.shape for case in cases if case.op == op]
        geometry = "35b-a3b-dflash" if op == "paged_attention.draft" else "27b-dflash2"
        assert shapes == [f"{geometry} B=1", f"{geometry} B=8"]


def test_operands_in_place_are_the_first_outputs():
    everything = [case for cases in registry.CASES.values() for case in cases()]
    for case in (case for case in everything if case.in_place):
        operands = case.abstract_operands()
        outputs = jax.tree.leaves(jax.eval_shape(case.run, *operands))
        for index, output in zip(case.in_place, outputs, strict=False):
            assert (operands[index].shape, operands[index].dtype) == (output.shape, output.dtype)


# --- the round ---


@pytest.fixture(scope="module")
def spec(small_configs):
    # Rows of the selector's shortlist, and a window that the state has long passed.
    draft = dataclasses.replace(small_configs["dflash2"], selector_top_k=4, selector_rank=8)
    return round_programs.make_spec(small_configs["target"], draft, "float32")


def test_random_state_is_full(spec):
    state = device_round.random_state(spec, 2, 128, jax.random.key(0))
    np.testing.assert_array_equal(state.frontier, [120, 120])
    np.testing.assert_array_equal(state.frontier - state.context_frontier, [4, 4])
    # Every row has pages of its own.
    pages = np.asarray(state.target.kv.block_table)
    assert sorted(pages.ravel()) == list(range(pages.size))
    assert float(jnp.std(state.target.kv.key)) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_the_round_agrees_and_is_timed(spec):
    times, differences, failures = device_round.measure(spec, 2, 128, "pallas_interpret")
    assert list(times) == ["pallas_interpret", "xla"] and failures == []
    assert all(t.draft > 0 and t.verify > 0 and t.compiling > 0 for t in times.values())
    assert differences["equal proposals"] == 1 and differences["logit error"] < 1e-4


def test_rounds_that_differ_are_seen():
    tokens = {"pallas": np.asarray([[1, 2]]), "xla": np.asarray([[1, 3]])}
    logits = {"pallas": np.asarray([[[3.0, 4.0]]]), "xla": np.asarray([[[3.0, 5.0]]])}
    differences, (text,) = device_round.compare(tokens, logits, "pallas", 0.1)
    assert differences["equal proposals"] == 0.5 and differences["equal best tokens"] == 1
    assert differences["logit error"] == pytest.approx((1 / 34) ** 0.5)
    assert "differ by 0.17 of their size, at most 0.1" in text
    assert device_round.compare(tokens, logits, "pallas", 0.2)[1] == []
    logits["pallas"][0, 0, 0] = np.nan
    assert device_round.compare(tokens, logits, "pallas", 0.2)[1]


# --- the whole ---


def plan(spec, *cases):
    return device_plan.Plan(device_plan.PARTS, "pallas_interpret", cases, spec, 1, 64, 1, 2)


def test_a_step_that_fails_does_not_stop_the_others(spec, monkeypatch):
    monkeypatch.setattr(device_round, "memory_limit", lambda: 1000)
    broken = dataclasses.replace(RINGS, op="broken", in_place=(0,))  # of another shape
    lines = []
    failures = device_plan.run(plan(spec, broken, scaled(1.01), RINGS), lines.append, 600)
    assert [line.split()[0] for line in lines] == ["copy", "scaled", "context_kv_materialize"]
    assert lines[1].endswith("FAILED")
    assert failures[0].startswith("broken tiny B=1: ") and "scaled" in failures[1]
    assert "round: left out, it needs 2 GB" in failures[2] and len(failures) == 3


def test_what_does_not_begin_in_time_is_named(spec):
    lines = []
    late = dataclasses.replace(RINGS, shape="tiny B=8")
    failures = device_plan.run(plan(spec, late, RINGS), lines.append, 0)
    names = ("context_kv_materialize tiny B=1", "round", "context_kv_materialize tiny B=8")
    assert failures == [f"{name}: left out, the limit of 0 s is over" for name in names]


def test_parts_are_chosen(spec):
    lines = []
    only = dataclasses.replace(plan(spec, scaled(1.0)), parts=("kernels",))
    assert device_plan.run(only, lines.append, 600) == []
    assert [line.split()[0] for line in lines] == ["copy", "scaled"]
    with pytest.raises(ValueError, match="--parts: got .'speed'., expected some of kernels, round"):
        device_plan.interpreted_plan(["speed"])


def test_an_old_gpu_is_refused():
    old = dataclasses.replace(cuda_compile.A100, compute_capability="7.5")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=old)):
        with pytest.raises(ValueError, match="8.0 or more.* is compute capability 7.5"):
            device_plan.device_plan()


def test_the_script_refuses_a_machine_without_a_gpu(script, capsys):
    assert script("device_check")() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "NVIDIA GPU" in error and "--interpret" in error


def test_the_script_ends_with_what_failed(script, capsys, monkeypatch, spec):
    check = script("device_check")
    monkeypatch.setattr(device_plan, "interpreted_plan", lambda _: plan(spec, scaled(1.01)))
    monkeypatch.setattr(device_round, "measure", lambda *_: ({}, {}, []))
    assert check("--interpret") == 1
    printed = capsys.readouterr()
    assert "everything was checked" not in printed.out
    assert printed.err.startswith("failed: scaled tiny B=1")
    monkeypatch.setattr(device_plan, "interpreted_plan", lambda _: plan(spec, scaled(1.0)))
    assert check("--interpret") == 0
    assert capsys.readouterr().out.endswith("everything was checked\n")
