"""A small pair with a tokenizer, and scripts run in this process through their command line."""

import importlib
import shutil
import sys

import pytest
from absl import flags

from dflash_jax.training import corpus

TEXTS = [
    "def add(a, b):\n    return a + b\n\n\ndef main():\n    print(add(1, 2))\n",
    "class Ring:\n    def __init__(self, slots):\n        self.slots = slots\n",
]


@pytest.fixture(scope="session")
def pair_flags(tmp_path_factory, fixtures_dir) -> dict[str, str]:
    """Directories of a fixture target, given a tokenizer, and of its two drafts."""
    target = tmp_path_factory.mktemp("pair") / "target"
    shutil.copytree(fixtures_dir / "dense_text", target, ignore=lambda *_: ["oracle.safetensors"])
    tokenizer = corpus.train_tokenizer(iter(TEXTS * 20), vocab_size=290)
    for name, content in corpus.tokenizer_files(tokenizer, 4096).items():
        (target / name).write_text(content, encoding="utf-8")
    return {
        "target": str(target),
        "dflash": str(fixtures_dir / "mid_dense_v1"),
        "dflash2": str(fixtures_dir / "mid_dense_v2"),
    }


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
