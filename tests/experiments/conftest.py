"""A small pair with a tokenizer, and scripts run in this process through their command line."""

import dataclasses
import importlib
import sys

import numpy as np
import pytest
from absl import flags

from dflash_jax.config.draft import FULL, SLIDING
from dflash_jax.io.tensors import write_params
from dflash_jax.training import corpus, draft, target
from experiments.configs import tiny

TEXTS = [
    "def add(a, b):\n    return a + b\n\n\ndef main():\n    print(add(1, 2))\n",
    "class Ring:\n    def __init__(self, slots):\n        self.slots = slots\n",
]
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


@pytest.fixture(scope="session")
def small_configs() -> dict:
    """The embedded pair's configurations, shrunk; vocabulary 290 plus padding."""
    shrunk = dataclasses.replace(
        tiny.TARGET,
        vocab_size=300,
        num_hidden_layers=2,
        layer_types=tiny.PERIOD[-2:],
        mrope_section=(2, 1, 1),
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        **SIZES,
    )
    drafts = {
        name: dataclasses.replace(
            config,
            vocab_size=300,
            num_hidden_layers=1,
            layer_types=(kind,),
            sliding_window=16 if kind == SLIDING else None,
            target_layer_ids=(1, 0),
            num_target_layers=2,
            **SIZES,
        )
        for name, config, kind in (
            ("dflash", tiny.DFLASH, FULL),
            ("dflash2", tiny.DFLASH2, SLIDING),
        )
    }
    return {"target": shrunk, **drafts}


@pytest.fixture(scope="session")
def pair_flags(tmp_path_factory, small_configs) -> dict[str, str]:
    """Directories of a small target with a tokenizer and of two drafts, untrained.

    One coordinate of the embedding favours some tokens whatever came before, for target and
    drafts alike, so that a part of the proposals is accepted.
    """
    directory = tmp_path_factory.mktemp("pair")
    random = np.random.default_rng(0)
    params = target.init_params(small_configs["target"], 0)
    table = 0.2 * random.normal(size=(300, 32)).astype(np.float32)
    table[:, 0] = 1.0 + np.abs(random.normal(size=300))
    table[0, 0] = 0.0  # end of text
    params["model"]["embed_tokens"]["weight"] = table
    tokenizer = corpus.train_tokenizer(iter(TEXTS * 20), vocab_size=290)
    files = corpus.tokenizer_files(tokenizer, 4096)
    write_params(directory / "target", small_configs["target"], params, files)
    for name in ("dflash", "dflash2"):
        config = small_configs[name]
        write_params(directory / name, config, draft.init_params(config, 1))
    return {name: str(directory / name) for name in ("target", "dflash", "dflash2")}


@pytest.fixture
def script(monkeypatch):
    """`name -> (*arguments -> exit code)`: a script's command line, run in this process.

    Scripts define flags of the same names, so only one may be loaded at a time.
    """
    loaded = []

    def unload():
        for module in loaded:
            for flag in list(flags.FLAGS.flags_by_module_dict().get(module, ())):
                delattr(flags.FLAGS, flag.name)
            del sys.modules[module]
        loaded.clear()

    def load(name):
        unload()
        from experiments import cli

        module = importlib.import_module(f"experiments.{name}")
        loaded.append(module.__name__)

        def run(*arguments):
            monkeypatch.setattr(sys, "argv", [f"experiments/{name}.py", *map(str, arguments)])
            with pytest.raises(SystemExit) as exit:
                cli.run(module.main)
            return exit.value.code or 0

        run.module = module
        return run

    yield load
    unload()
