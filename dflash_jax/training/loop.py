"""The training loop: compiled step, progress with an estimate of the end, metrics, resume.

The loop knows nothing of models: a step is a function `(state, batch) -> (state, metrics)` over
a pytree. It saves with Orbax every `save_every` steps and continues from the newest save, so an
interrupted run loses at most that many steps; batches are drawn by step number, so the resumed
run is the run that would have been.
"""

import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp
from rich import progress

from dflash_jax.typing import Params

_KEEP = 2


class TrainState(NamedTuple):
    """params, optimiser state and the number of steps done (int32)."""

    params: Params
    opt_state: Any
    step: jax.Array


def adamw(peak: float, steps: int, *, warmup: float = 0.04, clip: float = 1.0, decay: float = 0.01):
    """AdamW with linear warm-up and cosine decay to a tenth; matrices alone are decayed.

    Args:
      peak: largest learning rate.
      steps: length of the whole run.
      warmup: part of `steps` spent warming up.
    """
    rising = min(max(1, int(warmup * steps)), steps - 1)  # a run of one step has no warm-up
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, rising, steps, end_value=0.1 * peak)
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(
            rate,
            b1=0.9,
            b2=0.95,
            weight_decay=decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


def make_step(loss: Callable, optimiser: optax.GradientTransformation) -> Callable:
    """Compiled `(TrainState, batch) -> (TrainState, metrics)`; the state is donated.

    Args:
      loss: `(params, batch) -> (scalar, dict of scalars)`.
    """

    def step(state: TrainState, batch):
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, batch)
        updates, opt_state = optimiser.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "gradient_norm": optax.global_norm(gradient), **metrics}
        return TrainState(params, opt_state, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)


def init_state(params: Params, optimiser: optax.GradientTransformation) -> TrainState:
    return TrainState(params, optimiser.init(params), np.int32(0))


def keep_recipe(directory: pathlib.Path, recipe: dict[str, Any]) -> None:
    """Writes what a run was begun with, or checks that it is what it goes on with.

    Raises:
      ValueError: a value changed; the message names it, both values and the file.
    """
    path = pathlib.Path(directory) / "recipe.json"
    if path.is_file():
        begun = json.loads(path.read_text("utf-8"))
        for name in sorted(begun.keys() | recipe.keys()):
            was, now = begun.get(name), recipe.get(name)
            if was != now:
                raise ValueError(
                    f"{name}: got {now!r}, but this run was begun with {was!r} ({path}); "
                    "use the same value, or another --workdir"
                )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe, indent=2) + "\n", "utf-8")


def saved_steps(directory: pathlib.Path) -> list[int]:
    """Steps with a complete save, ascending. Orbax renames a save into place when it is whole."""
    found = directory.glob("step_*")
    return sorted(int(path.name[5:]) for path in found if path.name[5:].isdigit())


def restore(directory: pathlib.Path, template: TrainState) -> TrainState:
    """The newest save in `directory`, or `template` when there is none."""
    steps = saved_steps(directory)
    if not steps:
        return template
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), template)
    return ocp.load_pytree(directory / f"step_{steps[-1]:07d}", shapes)


def save(directory: pathlib.Path, state: TrainState) -> None:
    """Writes a save and drops all but the newest two."""
    ocp.save_pytree(directory / f"step_{int(state.step):07d}", state, overwrite=True)
    for old in saved_steps(directory)[:-_KEEP]:
        shutil.rmtree(directory / f"step_{old:07d}")


def _drop_rows_after(path: pathlib.Path, step: int) -> None:
    """Cuts metrics back to the save that the run continues from; a torn last line goes too."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text("utf-8").splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    part = path.with_suffix(".part")
    part.write_text("".join(kept), "utf-8")
    os.replace(part, path)


def run(
    step_fn: Callable,
    state: TrainState,
    batch_at: Callable[[int], Any],
    steps: int,
    directory: pathlib.Path,
    *,
    save_every: int = 500,
    log_every: int = 50,
    evaluate: Callable[[Params], dict[str, float]] | None = None,
) -> TrainState:
    """Trains up to step `steps`, resuming from `directory`; appends to its `metrics.jsonl`.

    Steps done again after an interruption replace their earlier rows there.

    Args:
      step_fn: from `make_step`.
      state: the start; replaced by the newest save, if any.
      batch_at: batch of a step number.
      steps: total length of the run.
      directory: saves and metrics; made when absent.
      evaluate: called at every save and at the end; its figures go to the metrics.
    """
    directory = pathlib.Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    state = restore(directory, state)
    columns = (
        *progress.Progress.get_default_columns()[:-1],
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[note]}"),
    )
    started, first = time.monotonic(), int(state.step)
    _drop_rows_after(directory / "metrics.jsonl", first)
    with (
        open(directory / "metrics.jsonl", "a", encoding="utf-8") as log,
        progress.Progress(*columns) as bar,
    ):
        task = bar.add_task("train", total=steps, completed=first, note="")
        for at in range(first, steps):
            state, metrics = step_fn(state, batch_at(at))
            done = at + 1
            last = done == steps
            saving = done % save_every == 0 or last
            if done % log_every == 0 or saving:
                row = {name: float(value) for name, value in metrics.items()}
                row["seconds"] = round(time.monotonic() - started, 1)
                if evaluate and saving:
                    row |= evaluate(state.params)
                print(json.dumps({"step": done} | row), file=log, flush=True)
                note = " ".join(f"{k} {v:.3f}" for k, v in row.items() if "loss" in k)
                bar.update(task, note=note)
            if saving:
                save(directory, state)
            bar.update(task, completed=done)
    return state
