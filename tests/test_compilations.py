"""The suite keeps compiled programs on disk: that neither hides a compilation nor changes a bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

SETTINGS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


@pytest.fixture
def empty_cache(tmp_path):
    """A cache directory of this test's own, which keeps every program."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in (SETTINGS | {"jax_compilation_cache_dir": str(tmp_path)}).items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_program_read_back_counts_as_compiled_and_gives_the_same_bits(empty_cache):
    """Tests that count compilations listen to this event; two workers may share a directory."""
    durations, events = [], []

    def timed(event, _, **details):
        durations.append((event, details.get("fun_name")))

    def program():
        def mix(x, w):
            return jnp.cumsum(jax.nn.softmax(x @ w, axis=-1), axis=0) @ w.T

        return jax.jit(mix)

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(9, 33)).astype(np.float32), rng.normal(size=(33, 65)).astype(np.float32)
    jax.monitoring.register_event_duration_secs_listener(timed)
    jax.monitoring.register_event_listener(events.append)
    try:
        first = np.asarray(program()(x, w))
        assert list(empty_cache.iterdir())
        again = np.asarray(program()(x, w))
    finally:
        jax.monitoring.unregister_event_duration_listener(timed)
        jax.monitoring.unregister_event_listener(events.append)
    assert events.count("/jax/compilation_cache/cache_hits") == 1
    compiled = [name for event, name in durations if event.endswith("backend_compile_duration")]
    assert sum("mix" in name for name in compiled) == 2
    assert first.tobytes() == again.tobytes()
