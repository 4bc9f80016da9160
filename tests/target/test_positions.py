"""Rotary tables of the target: theta, partial rotation, interleaved axes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import parse_target_config
from dflash_jax.target.positions import mrope_tables
from pallas_kernels.elementary import apply_rotary

# Angles reach 90 radians; float32 holds the angle to 4e-6 and the reference rounds its inverse
# frequencies once more.
TABLE = dict(rtol=0, atol=1e-5)


def tables(config, positions):
    """Float64 cosines and sines `[B, T, half]` of positions `[3, B, T]`, frequency by frequency."""
    half = config.rotary_dim // 2
    angles = np.zeros((*positions.shape[1:], half))
    for i in range(half):
        axis = 0
        for candidate in (1, 2):
            if i % 3 == candidate and i < 3 * config.mrope_section[candidate]:
                axis = candidate
        angles[..., i] = positions[axis] * config.rope_theta ** (-2 * i / config.rotary_dim)
    return np.cos(angles), np.sin(angles)


@pytest.fixture(scope="module")
def config(load_target):
    return load_target("dense_text").config


@pytest.fixture(scope="module")
def published(geometries):
    """Head dim 256, a quarter rotated, sections 11, 11, 10."""
    return parse_target_config(geometries / "qwen3.5-27b.json")


def test_axes_of_the_reference(config, kernel_oracle):
    positions = kernel_oracle["rope.pos"]
    got = mrope_tables(config, jnp.asarray(positions))
    half = config.rotary_dim // 2
    for name, table, exact in zip(("cos", "sin"), got, tables(config, positions), strict=True):
        wanted = kernel_oracle[f"rope.{name}"]
        assert table.shape == (*positions.shape[1:], half)
        # The reference repeats the half.
        np.testing.assert_allclose(table, wanted[..., :half], **TABLE)
        np.testing.assert_allclose(table, wanted[..., half:], **TABLE)
        np.testing.assert_allclose(table, exact, **TABLE)
    frequency = config.rope_theta ** (-2 * np.arange(half) / config.rotary_dim)
    np.testing.assert_allclose(kernel_oracle["rope.inv_freq"], frequency, rtol=1e-6)


def test_published_geometry(published, kernel_oracle):
    assert (published.rotary_dim, published.mrope_section) == (64, (11, 11, 10))
    positions = kernel_oracle["rope.pos"]
    got = mrope_tables(published, jnp.asarray(positions))
    for name, table, exact in zip(("cos", "sin"), got, tables(published, positions), strict=True):
        np.testing.assert_allclose(table, kernel_oracle[f"rope_real.{name}"][..., :32], **TABLE)
        np.testing.assert_allclose(table, exact, **TABLE)


def test_text_is_three_equal_axes(published):
    positions = jnp.array([[0, 1, 17, 260], [5, 6, 7, 8]])
    text = mrope_tables(published, positions)
    image = mrope_tables(published, jnp.stack([positions] * 3))
    for got, wanted in zip(text, image, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_each_axis_moves_its_own_frequencies(published):
    base = np.full((3, 1, 1), 7)
    still = np.asarray(mrope_tables(published, jnp.asarray(base))[1])[0, 0]
    counts = []
    for axis in range(3):
        moved = base.copy()
        moved[axis] += 1
        changed = np.asarray(mrope_tables(published, jnp.asarray(moved))[1])[0, 0] != still
        counts.append(changed)
    # Every frequency belongs to exactly one axis, in the numbers of the sections.
    np.testing.assert_array_equal(np.sum(counts, axis=0), np.ones(32))
    assert tuple(np.sum(counts, axis=1)) == published.mrope_section
    # Interleaved, height at 1, 4, ..., width at 2, 5, ...
    np.testing.assert_array_equal(np.flatnonzero(counts[1]), np.arange(1, 33, 3))
    np.testing.assert_array_equal(np.flatnonzero(counts[2]), np.arange(2, 30, 3))


def test_theta_comes_from_the_config(published):
    other = dataclasses.replace(published, rope_theta=1e4)
    positions = np.full((3, 1, 1), 50)
    got = mrope_tables(other, jnp.asarray(positions))
    np.testing.assert_allclose(got[1], tables(other, positions)[1], **TABLE)
    assert np.abs(np.asarray(got[1]) - tables(published, positions)[1]).max() > 0.5


def test_rotated_heads_of_the_reference(config, kernel_oracle):
    cos, sin = mrope_tables(config, jnp.asarray(kernel_oracle["rope.pos"]))
    for name in ("q", "k"):
        # Stored with heads before tokens.
        heads = kernel_oracle[f"rope.{name}"].swapaxes(1, 2)
        wanted = kernel_oracle[f"rope.{name}_out"].swapaxes(1, 2)
        got = np.asarray(apply_rotary(jnp.asarray(heads), cos, sin))
        # Two products of entries up to 4 with the table's error.
        np.testing.assert_allclose(got, wanted, rtol=0, atol=4e-5)
        passed = slice(config.rotary_dim, None)
        np.testing.assert_array_equal(got[..., passed], heads[..., passed])
