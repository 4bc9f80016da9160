"""Checkpoints on disk: safetensors directories, read tensor by tensor and written whole."""

import collections
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from absl import logging

from dflash_jax.config import DraftConfig, TargetConfig, draft_to_json, target_to_json
from dflash_jax.config.reading import ConfigError, read_json
from dflash_jax.io.names import Config, TensorSpec, match_names, tensor_table
from dflash_jax.typing import DType, Params

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Weights in any other dtype are quantized or not weights. NumPy has no bfloat16 of its own:
# ml_dtypes registers the one that safetensors hands out.
_WEIGHT_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_SHOWN = 8


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: names the tensors and the file."""


def _listed(names: list[str] | tuple[str, ...]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


# --- files ---


def _open(path: pathlib.Path) -> Any:
    """Opens one file; the library maps it and checks that the header covers it exactly."""
    try:
        return safetensors.safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file, truncated or damaged ({error})"
        ) from error


def stream_tensors(path: str | os.PathLike[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of one safetensors file in the file's dtype, exact in every bit.

    Any dtype the format shares with NumPy and ml_dtypes, 0-d and empty tensors included;
    one tensor is in memory at a time.
    """
    with _open(pathlib.Path(path)) as file:
        for name in file.keys():
            yield name, file.get_tensor(name)


def checkpoint_files(directory: str | os.PathLike[str]) -> dict[str, pathlib.Path]:
    """Name of every tensor in a checkpoint -> the file that holds it.

    The directory holds `model.safetensors`, or `model.safetensors.index.json` and the shards
    it names, whatever they are called.

    Raises:
      CheckpointError: no weights, both forms at once, a shard that is missing, lacks a
        tensor the index places there, or holds one that the index places elsewhere.
    """
    directory = pathlib.Path(directory)
    single, index = directory / WEIGHTS, directory / INDEX
    if not index.is_file():
        if not single.is_file():
            present = sorted(path.name for path in directory.glob("*")) or ["nothing"]
            raise CheckpointError(
                f"{directory}: neither {WEIGHTS} nor {INDEX}; it holds {_listed(present)}"
            )
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    weight_map = _weight_map(index)
    if single.is_file() and single.name not in weight_map.values():
        raise CheckpointError(f"{directory}: both {WEIGHTS} and an {INDEX} that does not name it")
    by_shard = collections.defaultdict(set)
    for name, shard in weight_map.items():
        by_shard[shard].add(name)
    for shard, expected in sorted(by_shard.items()):
        path = directory / shard
        if not path.is_file():
            raise CheckpointError(
                f"{index} names the shard {shard}, which does not exist "
                f"(for {_listed(sorted(expected))})"
            )
        with _open(path) as file:
            held = set(file.keys())
        if lacking := sorted(expected - held):
            raise CheckpointError(f"{path} lacks what {INDEX} places there: {_listed(lacking)}")
        if surplus := sorted(held - expected):
            elsewhere = [name for name in surplus if name in weight_map]
            what = "also placed in another shard" if elsewhere else "that it does not name"
            raise CheckpointError(
                f"{path} holds tensors {what} by {INDEX}: {_listed(elsewhere or surplus)}"
            )
    return {name: directory / shard for name, shard in weight_map.items()}


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    try:
        weight_map = read_json(index).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' is missing or not an object with tensors")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or pathlib.PurePath(shard).name != shard:
            raise CheckpointError(f"{index}: {name} is placed in {shard!r}, not a file name")
    return weight_map


# --- reading ---


def read_params(
    directory: str | os.PathLike[str],
    config: Config,
    dtype: DType | None = None,
    *,
    only: Collection[str] | None = None,
) -> Params:
    """Loads the weights of a target or draft as a params tree.

    Everything is checked against the headers before the first tensor is read; then tensors
    go to the default device one by one. Names in the tree are the checkpoint's, split at
    dots (`io/names.py`).

    Args:
      directory: a checkpoint in Hugging Face layout.
      config: its geometry; decides which tensors must be there and their shapes.
      dtype: float32, bfloat16 or float16; None keeps the file's. `A_log` and `dt_bias` are
        float32 in any case.
      only: names of modules; the tree then has their weights and no others, though all are
        checked.

    Returns:
      Nested dicts of `jax.Array`.

    Raises:
      CheckpointError: missing, extra, misshapen or misplaced tensors, two spellings of a
        tensor with different values, weights that are not floats, a damaged file.
    """
    directory = pathlib.Path(directory)
    if dtype is not None:
        dtype = np.dtype(dtype)
        if dtype not in _WEIGHT_DTYPES.values():
            raise ValueError(f"dtype is {dtype}, expected float32, bfloat16, float16 or None")
    files = checkpoint_files(directory)
    matched = match_names(config, list(files))
    if matched.missing:
        missing = [f"{spec.name} {list(spec.shape)}" for spec in matched.missing]
        raise CheckpointError(f"{directory}: {len(missing)} missing tensors: {_listed(missing)}")
    if matched.extra:
        raise CheckpointError(
            f"{directory}: {len(matched.extra)} tensors that this model does not have: "
            f"{_listed(matched.extra)}{_own_head_note(config, matched.extra)}"
        )
    if matched.skipped:
        logging.info(
            "%s: skipped %d tensors that are not used here (%s)",
            directory, len(matched.skipped), _listed(matched.skipped),
        )  # fmt: skip
    spec_of = {name: spec for spec, names in matched.found.items() for name in names}
    _check_headers(files, spec_of)

    params: dict[str, Any] = {}
    twins = {names for names in matched.found.values() if len(names) > 1}
    for names in sorted(twins):
        _check_equal(files, names)
    repeated = {name for names in twins for name in names[1:]}
    for path in sorted(set(files.values())):
        with _open(path) as file:
            for name in file.keys():
                if name in spec_of and name not in repeated:
                    spec = spec_of[name]
                    if only is not None and spec.path[-2] not in only:
                        continue
                    kept = np.dtype(np.float32) if spec.keep_float32 else dtype
                    _insert(params, spec, _to_jax(file.get_tensor(name), kept))
    return params


def _to_jax(array: np.ndarray, dtype: np.dtype | None) -> jax.Array:
    # Cast before the transfer: the device then never holds both.
    return jnp.asarray(array if dtype is None else array.astype(dtype, copy=False))


def _own_head_note(config: Config, extra: tuple[str, ...]) -> str:
    own = {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
    if isinstance(config, DraftConfig) and own.intersection(extra):
        return " (a draft with its own embedding, head or vocabulary map is not supported)"
    return ""


def _check_headers(files: Mapping[str, pathlib.Path], spec_of: Mapping[str, TensorSpec]) -> None:
    """Shapes and dtypes of all tensors in use, from the headers alone."""
    wrong = []
    for path in sorted(set(files.values())):
        with _open(path) as file:
            for name in file.keys():
                if name not in spec_of:
                    continue
                header = file.get_slice(name)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                if shape != spec_of[name].shape:
                    expected = list(spec_of[name].shape)
                    wrong.append(f"{path}: {name} has shape {list(shape)}, expected {expected}")
                elif dtype not in _WEIGHT_DTYPES:
                    known = ", ".join(_WEIGHT_DTYPES)
                    wrong.append(f"{path}: {name} has dtype {dtype}, expected one of {known}")
    if wrong:
        raise CheckpointError(_listed(wrong))


def _check_equal(files: Mapping[str, pathlib.Path], names: tuple[str, ...]) -> None:
    """All spellings of one tensor must hold the same bits."""
    arrays = []
    for name in names:
        with _open(files[name]) as file:
            arrays.append(file.get_tensor(name))
    for name, array in zip(names[1:], arrays[1:], strict=True):
        if array.dtype != arrays[0].dtype or array.tobytes() != arrays[0].tobytes():
            raise CheckpointError(
                f"{files[name]}: {name} and {names[0]} are two spellings of one tensor, "
                "but their values differ"
            )


def _insert(params: dict[str, Any], spec: TensorSpec, value: jax.Array) -> None:
    node = params
    for key in spec.path[:-1]:
        node = node.setdefault(key, {})
    node[spec.path[-1]] = value


def abstract_params(config: Config, dtype: DType) -> Params:
    """Shapes and dtypes of what `read_params` gives, without a checkpoint."""
    params: dict[str, Any] = {}
    for spec in tensor_table(config):
        kept = np.float32 if spec.keep_float32 else dtype
        _insert(params, spec, jax.ShapeDtypeStruct(spec.shape, kept))
    return params


# --- writing ---


def write_params(
    directory: str | os.PathLike[str],
    config: Config,
    params: Params,
    extra_files: Mapping[str, str | bytes] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint in Hugging Face layout that reads back equal in every bit.

    Every file is written beside its place and renamed into it, the config last: a directory
    with a `config.json` is whole.

    Args:
      directory: made when absent.
      config: written as `config.json`.
      params: the tree of `read_params`.
      extra_files: further files by name, such as `tokenizer.json`.
      overwrite: replace a checkpoint that is there.

    Raises:
      CheckpointError: the tree does not match the config, a checkpoint is there already,
        or an extra file takes the name of one written here.
    """
    directory = pathlib.Path(directory)
    extra_files = dict(extra_files or {})
    arrays = _flatten(config, params)
    for name in extra_files:
        if name in (WEIGHTS, INDEX, "config.json") or pathlib.PurePath(name).name != name:
            raise CheckpointError(f"extra file {name!r}: not a free file name in a checkpoint")
    if (directory / INDEX).exists():
        raise CheckpointError(f"{directory}: holds a sharded checkpoint ({INDEX})")
    if (directory / WEIGHTS).exists() and not overwrite:
        raise CheckpointError(f"{directory / WEIGHTS}: exists already; pass overwrite=True")
    to_json = target_to_json if isinstance(config, TargetConfig) else draft_to_json
    dtype = arrays[tensor_table(config)[0].name].dtype.name
    config_text = json.dumps(to_json(config, dtype), indent=2) + "\n"

    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f".{WEIGHTS}.{os.getpid()}.part"
    try:
        part.touch()
        mode = part.stat().st_mode
        safetensors.numpy.save_file(arrays, part, metadata={"format": "pt"})
        part.chmod(mode)  # some versions of the library leave a file only its owner can read
        os.replace(part, directory / WEIGHTS)
    finally:
        part.unlink(missing_ok=True)
    for name, content in (*extra_files.items(), ("config.json", config_text)):
        _replace_file(directory / name, content)


def _replace_file(path: pathlib.Path, content: str | bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _flatten(config: Config, params: Params) -> dict[str, np.ndarray]:
    """Checkpoint name -> array, after a check of the tree against the table."""
    leaves = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    arrays = {}
    for spec in tensor_table(config):
        place = "/".join(spec.path)
        if spec.path not in leaves:
            raise CheckpointError(f"params lack {place} (tensor {spec.name})")
        # The library writes the buffer as it lies: a transposed view would be saved scrambled.
        array = np.asarray(leaves.pop(spec.path), order="C")
        if array.shape != spec.shape:
            raise CheckpointError(
                f"params {place} has shape {list(array.shape)}, expected {list(spec.shape)}"
            )
        if array.dtype not in _WEIGHT_DTYPES.values():
            raise CheckpointError(f"params {place} has dtype {array.dtype}, not a weight's")
        arrays[spec.name] = array
    if leaves:
        surplus = sorted("/".join(path) for path in leaves)
        raise CheckpointError(f"params hold what this model does not have: {_listed(surplus)}")
    return arrays
