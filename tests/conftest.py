"""Shared by the tests: where the fixtures lie, checkpoints loaded from them, random numbers.

`pytest --fixtures-dir DIR` runs every parity test against another directory made by
`tests/parity/make_fixtures.py`; no test knows a shape of the files.
"""

import functools
import gc
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from dflash_jax.config import Causality, parse_draft_config, parse_target_config
from dflash_jax.io.tensors import read_params, stream_tensors

TESTS = pathlib.Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption(
        "--fixtures-dir",
        type=pathlib.Path,
        default=TESTS / "fixtures",
        help="directory of parity fixtures (default: the committed ones)",
    )
    parser.addoption(
        "--all-prompts",
        action="store_true",
        help="greedy equality over all prompts, widths and batch sizes (default: a selection)",
    )


def pytest_configure(config):
    """One core per worker; XLA programs are kept between runs, beside pytest's own cache.

    Two workers whose thread pools both span both cores wait for each other inside every matrix
    product, which makes small ones many times slower.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    # Tracing leaves many objects that live on; collections that walk them all take a fifth of it.
    gc.set_threshold(100_000, 50, 100)
    if config.pluginmanager.hasplugin("cacheprovider"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


# Where rounding is the subject, or programs run for long, they are compiled as a user's are.
# Everywhere else LLVM does without its optimisations: that takes a third off most files.
_AS_USERS_RUN = (
    "acceptance",
    "decoding/test_acceptance.py",
    "decoding/test_generate.py",
    "draft",
    "pallas_kernels/test_gated_delta_rule.py",
    "sessions/test_engine.py",
    "state",
    "target",
)
# Coverage is asked of these packages and taken in their own tests; it slows tracing by a third.
_COVERED = ("decoding", "draft", "sessions", "state", "target")


def _is_under(path: pathlib.Path, parts: tuple[str, ...]) -> bool:
    return any(path.relative_to(TESTS).is_relative_to(part) for part in parts)


@pytest.fixture(autouse=True, scope="module")
def compiler_effort(request):
    quick = not _is_under(request.path, _AS_USERS_RUN)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))  # for tests' own processes
    if jax.config.read("jax_disable_most_optimizations") != quick:
        # Programs in memory do not say how they were compiled; those on disk do.
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", quick)


def pytest_collection_modifyitems(config, items):
    if config.pluginmanager.hasplugin("_cov"):
        for item in items:
            if not _is_under(item.path, _COVERED):
                item.add_marker("no_cover")


# Linux lets a process have 65,530 memory maps; every compiled kernel takes some, and a worker that
# has run out aborts inside the compiler.
_MANY_MAPS = 25_000


@pytest.fixture(autouse=True)
def compiled_programs_fit():
    """Drops compiled programs after a test when they have become too many for one process."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.is_file() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()


class Checkpoint(NamedTuple):
    """A fixture folder: parsed config, params tree, and the reference's inputs and outputs."""

    config: Any
    params: Any
    oracle: dict[str, np.ndarray]


@pytest.fixture(scope="session")
def fixtures_dir(pytestconfig) -> pathlib.Path:
    return pytestconfig.getoption("--fixtures-dir")


@pytest.fixture(scope="session")
def geometries() -> pathlib.Path:
    """Configs of published checkpoints."""
    return TESTS / "geometries"


@pytest.fixture(scope="session")
def kernel_oracle(fixtures_dir) -> dict[str, np.ndarray]:
    """Outputs of single functions of the reference."""
    return dict(stream_tensors(fixtures_dir / "kernels.safetensors"))


@pytest.fixture(scope="session")
def load_target(fixtures_dir):
    """`name -> Checkpoint` of a target folder, each read once."""

    @functools.cache
    def load(name: str) -> Checkpoint:
        folder = fixtures_dir / name
        config = parse_target_config(folder)
        oracle = dict(stream_tensors(folder / "oracle.safetensors"))
        return Checkpoint(config, read_params(folder, config), oracle)

    return load


@pytest.fixture(scope="session")
def load_draft(fixtures_dir):
    """`name -> Checkpoint` of a draft folder, under the rule its outputs were made with."""

    @functools.cache
    def load(name: str) -> Checkpoint:
        folder = fixtures_dir / name
        # The reference makes sliding layers causal when the key is absent; here that is an
        # explicit choice.
        config = parse_draft_config(folder, absent_causality=Causality.SLIDING_CAUSAL)
        oracle = dict(stream_tensors(folder / "oracle.safetensors"))
        return Checkpoint(config, read_params(folder, config), oracle)

    return load


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
