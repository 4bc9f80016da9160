"""The house: who may import whom, what importing costs, and the public list."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

import dflash_jax

ROOT = pathlib.Path(__file__).parents[1]

# Bottom to top; a module belongs to the longest prefix that fits it.
FLOORS = {
    "pallas_kernels": 0,
    "dflash_jax.config": 1,
    "dflash_jax.typing": 1,
    "dflash_jax.precision": 1,
    "dflash_jax.state": 2,
    "dflash_jax.layers": 3,
    "dflash_jax.target": 4,
    "dflash_jax.draft": 4,
    "dflash_jax.io": 5,
    "dflash_jax.decoding": 6,
    "dflash_jax.sessions": 7,
    "dflash_jax": 8,  # the public face: what `import dflash_jax` gives
    "dflash_jax.training": 9,
    "experiments": 10,
}


def modules() -> dict[str, pathlib.Path]:
    """Dotted name -> file of every module of the three packages."""
    found = {}
    for package in ("pallas_kernels", "dflash_jax", "experiments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def floor(module: str) -> int | None:
    """Floor of one of our modules; None for anybody else's."""
    fitting = [name for name in FLOORS if module == name or module.startswith(f"{name}.")]
    if not fitting:
        return None
    name = max(fitting, key=len)
    if name == "dflash_jax" and module != "dflash_jax":
        raise AssertionError(f"{module} belongs to no floor")
    return FLOORS[name]


def imports(module: str, source: str | None = None) -> set[str]:
    """Modules of ours that `module` imports, anywhere in its text."""
    path = MODULES[module]
    tree = ast.parse(path.read_text("utf-8") if source is None else source)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.add(name if name in MODULES else base)
    return {name for name in found if floor(name) is not None} - {module}


def test_the_checker_sees_imports():
    seen = imports(
        "dflash_jax.state.ring",
        "import dflash_jax.training.loop\n"
        "from dflash_jax.decoding import round as phases\n"
        "from . import paged\n"
        "from ..io.pair import load_pair\n"
        "import numpy as np\n"
        "def f():\n    from experiments import cli\n",
    )
    assert seen == {
        "dflash_jax.training.loop",
        "dflash_jax.decoding.round",
        "dflash_jax.state.paged",
        "dflash_jax.io.pair",
        "experiments.cli",
    }
    assert [floor(name) for name in sorted(seen)] == [6, 5, 2, 9, 10]
    assert len(MODULES) > 60 and {floor(name) for name in MODULES} == set(range(11))


@pytest.mark.parametrize("module", MODULES)
def test_no_module_reaches_up(module):
    higher = {name for name in imports(module) if floor(name) > floor(module)}
    assert not higher


def test_kernels_know_nothing_of_the_package():
    for module in MODULES:
        if floor(module) == 0:
            assert {name.split(".")[0] for name in imports(module)} <= {"pallas_kernels"}, module


@pytest.mark.parametrize(("module", "neighbour"), [("target", "draft"), ("draft", "target")])
def test_target_and_draft_do_not_know_each_other(module, neighbour):
    for name in MODULES:
        if name.startswith(f"dflash_jax.{module}"):
            assert not [i for i in imports(name) if i.startswith(f"dflash_jax.{neighbour}")], name


def test_no_circles():
    graph = {module: imports(module) & MODULES.keys() for module in MODULES}
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path, module])
        if module in done:
            return
        for name in sorted(graph[module]):
            visit(name, [*path, module])
        done.add(module)

    for module in graph:
        visit(module, [])
    assert done == MODULES.keys()


def test_modules_stay_small():
    lines = {name: len(path.read_text("utf-8").splitlines()) for name, path in MODULES.items()}
    assert not {name: count for name, count in lines.items() if count > 400}


# --- importing ---

HEAVY = ("torch", "transformers", "triton", "jax_triton", "optax", "orbax", "matplotlib")


@pytest.mark.smoke
def test_importing_the_package_pulls_in_nothing_heavy():
    """Only what inference needs; a notebook without the training extra must import it too."""
    code = (
        "import sys, dflash_jax\n"
        f"print(sorted(name for name in {HEAVY!r} if name in sys.modules))\n"
        "print([m for m in sys.modules if m.startswith(('dflash_jax.training', 'experiments'))])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]"]


# --- the public list ---


def test_public_list():
    """Closed: a new name is a decision, made here as well."""
    assert dflash_jax.__all__ == [
        "Causality",
        "Checkpoint",
        "ConfigError",
        "ContextBudget",
        "Engine",
        "Generation",
        "Origin",
        "Pair",
        "Request",
        "Round",
        "Sampling",
        "generate",
        "load_pair",
    ]
    for name in dflash_jax.__all__:
        thing = getattr(dflash_jax, name)
        assert thing.__doc__, name
        assert thing.__module__.startswith("dflash_jax."), name


def test_everything_else_in_the_package_is_a_module():
    public = {name for name in vars(dflash_jax) if not name.startswith("_")}
    packages = {name.split(".")[1] for name in MODULES if name.startswith("dflash_jax.")}
    assert public - set(dflash_jax.__all__) <= packages


def test_readme_uses_public_names():
    text = (ROOT / "README.md").read_text("utf-8")
    used = re.findall(r"^from dflash_jax import (.+)$", text, re.MULTILINE)
    names = {name.strip() for line in used for name in line.split(",")}
    assert names and names <= set(dflash_jax.__all__)
    result = {"text", "acceptance_length", "finish_reason", "rounds", "origins"}
    assert set(re.findall(r"result\.(\w+)", text)) <= result
    fields = dflash_jax.Generation.__dataclass_fields__.keys()
    assert all(name in fields or hasattr(dflash_jax.Generation, name) for name in result)


def test_readme_layout_names_every_room():
    text = (ROOT / "README.md").read_text("utf-8")
    for path in sorted((ROOT / "dflash_jax").iterdir()):
        if path.is_dir() and any(path.glob("*.py")) and path.name != "config":
            assert f"dflash_jax/{path.name}/" in text, path.name
