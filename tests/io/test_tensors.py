"""Reading and writing checkpoints: exact bits, and every damage named."""

import json
import pathlib
import shutil
import stat

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl import logging
from safetensors.numpy import save_file

from dflash_jax.config import parse_draft_config, parse_target_config
from dflash_jax.io.names import tensor_table
from dflash_jax.io.tensors import (
    CheckpointError,
    checkpoint_files,
    read_params,
    stream_tensors,
    write_params,
)

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
BF16 = ml_dtypes.bfloat16
INDEX = "model.safetensors.index.json"
TARGET, TIED, DRAFT, DRAFT2 = "dense_text", "dense_text_tied", "mid_dense_v1", "mid_dense_v2"


def config_of(folder):
    parse = parse_target_config if folder.startswith("dense_text") else parse_draft_config
    return parse(FIXTURES / folder)


def tensors_of(folder):
    return dict(stream_tensors(FIXTURES / folder / "model.safetensors"))


def flatten(params):
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_bits(left, right):
    left, right = flatten(left), flatten(right)
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        assert array.tobytes() == right[name].tobytes(), name


def put(directory, tensors):
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def put_shards(directory, shards, weight_map=None):
    directory.mkdir(exist_ok=True)
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    if weight_map is None:
        weight_map = {name: shard for shard, held in shards.items() for name in held}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


# --- exact bits ---


def test_stream_keeps_dtype_and_bits(tmp_path):
    written = {
        "bf16": np.array([0x3F80, 0x7FC0, 0xFF81, 0x0001], np.uint16).view(BF16),
        "fp16": np.array([1.5, -0.0, np.inf, 6e-8], np.float16),
        "fp32": np.array([[1e-45, np.nan]], np.float32),
        "int64": np.array([2**40, -1]),
        "uint8": np.arange(3, dtype=np.uint8),
        "scalar": np.array(2.5, BF16),
        "no_rows": np.zeros((0, 4), np.float32),
    }
    save_file(written, tmp_path / "mixed.safetensors")
    read = dict(stream_tensors(tmp_path / "mixed.safetensors"))
    assert read.keys() == written.keys()
    for name, array in written.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        assert read[name].tobytes() == array.tobytes()
    assert float(jnp.asarray(read["bf16"])[0]) == 1.0
    assert bool(jnp.isnan(jnp.asarray(read["bf16"])[1]))


@pytest.mark.parametrize("folder", [TARGET, TIED, DRAFT, DRAFT2])
def test_reads_what_the_reference_packages_wrote(folder):
    params = flatten(read_params(FIXTURES / folder, config_of(folder), "float32"))
    tensors = tensors_of(folder)
    assert len(params) == len(tensors)
    for name, array in tensors.items():
        place = name.replace("_codebook.weight", "_codebook")
        place = place.replace("layers.", "layers_").replace(".", "/")
        np.testing.assert_array_equal(params[place], array)


def test_tree_is_the_agreed_one():
    params = read_params(FIXTURES / TARGET, config_of(TARGET), "float32")
    assert params["model"]["layers_0"]["linear_attn"]["conv1d"]["weight"].shape == (192, 1, 4)
    assert params["model"]["layers_0"]["linear_attn"]["A_log"].shape == (4,)
    assert params["lm_head"]["weight"].shape == (512, 64)
    assert "lm_head" not in read_params(FIXTURES / TIED, config_of(TIED))
    draft = read_params(FIXTURES / DRAFT2, config_of(DRAFT2), "float32")
    assert draft["candidate_selector"]["predecessor_codebook"].shape == (512, 8)
    assert draft["layers_3"]["attention_conv"]["base_kernel"].shape == (2, 3, 64)
    assert isinstance(draft["fc"]["weight"], jax.Array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts_round_to_nearest_and_spare_the_decay(dtype):
    exact = flatten(read_params(FIXTURES / TARGET, config_of(TARGET), "float32"))
    cast = flatten(read_params(FIXTURES / TARGET, config_of(TARGET), jnp.dtype(dtype)))
    for name, array in cast.items():
        if name.endswith(("A_log", "dt_bias")):
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, exact[name])
        else:
            assert array.dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(array, exact[name].astype(dtype))


def test_dtype_none_keeps_the_file(tmp_path):
    halves = {name: array.astype(BF16) for name, array in tensors_of(TARGET).items()}
    params = flatten(read_params(put(tmp_path / "c", halves), config_of(TARGET)))
    assert params["model/norm/weight"].dtype == BF16
    assert params["model/layers_0/linear_attn/A_log"].dtype == np.float32
    widened = flatten(read_params(tmp_path / "c", config_of(TARGET), "float32"))
    for name, array in widened.items():
        np.testing.assert_array_equal(array, params[name].astype(np.float32))


@pytest.mark.parametrize("dtype", ["int8", "float64"])
def test_other_load_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"dtype is {dtype}, expected float32"):
        read_params(FIXTURES / DRAFT, config_of(DRAFT), dtype)


# --- names ---


def test_multimodal_names_and_skipped_parts_give_the_same_tree(tmp_path, caplog):
    tensors = {n.replace("model.", "model.language_model.", 1): a
               for n, a in tensors_of(TARGET).items()}  # fmt: skip
    tensors["model.visual.pos_embed.weight"] = np.zeros((4, 2), np.float32)
    tensors["mtp.layers.0.mlp.up_proj.weight"] = np.ones((2, 2), np.int8)
    logging.set_verbosity(logging.INFO)
    with caplog.at_level("INFO", logger="absl"):
        params = read_params(put(tmp_path / "c", tensors), config_of(TARGET))
    assert_same_bits(params, read_params(FIXTURES / TARGET, config_of(TARGET)))
    lines = [line for line in caplog.messages if "skipped" in line]
    assert len(lines) == 1
    assert "skipped 2 tensors" in lines[0]
    assert "model.visual.pos_embed.weight" in lines[0] and "mtp.layers.0" in lines[0]


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_both_codebook_spellings_load(tmp_path, suffix):
    tensors = {n.removesuffix(".weight") + suffix if "_codebook" in n else n: a
               for n, a in tensors_of(DRAFT2).items()}  # fmt: skip
    params = read_params(put(tmp_path / "c", tensors), config_of(DRAFT2))
    assert_same_bits(params, read_params(FIXTURES / DRAFT2, config_of(DRAFT2)))


def test_both_codebook_spellings_at_once(tmp_path):
    tensors = tensors_of(DRAFT2)
    name = "candidate_selector.successor_codebook"
    book = tensors.pop(name, None)
    book = tensors.pop(f"{name}.weight") if book is None else book
    same = tensors | {name: book, f"{name}.weight": book}
    params = read_params(put(tmp_path / "same", same), config_of(DRAFT2))
    assert_same_bits(params, read_params(FIXTURES / DRAFT2, config_of(DRAFT2)))

    other = book.copy()
    other[3, 2] += 1
    put(tmp_path / "other", tensors | {name: book, f"{name}.weight": other})
    with pytest.raises(CheckpointError, match=rf"{name}\.weight and {name} .* values differ"):
        read_params(tmp_path / "other", config_of(DRAFT2))

    put(tmp_path / "neither", tensors)
    with pytest.raises(CheckpointError, match=rf"1 missing tensors: {name} \[512, 8\]"):
        read_params(tmp_path / "neither", config_of(DRAFT2))


def test_head_in_a_tied_checkpoint(tmp_path):
    tensors = tensors_of(TIED)
    embedding = tensors["model.embed_tokens.weight"]
    params = read_params(
        put(tmp_path / "same", tensors | {"lm_head.weight": embedding}), config_of(TIED)
    )
    assert_same_bits(params, read_params(FIXTURES / TIED, config_of(TIED)))
    put(tmp_path / "other", tensors | {"lm_head.weight": embedding + 1})
    with pytest.raises(CheckpointError, match="lm_head.weight .* values differ"):
        read_params(tmp_path / "other", config_of(TIED))


def test_untied_checkpoint_without_a_head(tmp_path):
    tensors = tensors_of(TARGET)
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head.weight \[512, 64\]"):
        read_params(put(tmp_path / "c", tensors), config_of(TARGET))


def test_missing_extra_and_misshapen(tmp_path):
    tensors = tensors_of(DRAFT)
    fc = tensors.pop("fc.weight")
    with pytest.raises(CheckpointError, match=r"1 missing tensors: fc.weight \[64, 192\]"):
        read_params(put(tmp_path / "c", tensors), config_of(DRAFT))
    put(tmp_path / "c", tensors | {"fc.weight": fc.T.copy()})
    message = r"model.safetensors: fc.weight has shape \[192, 64\], expected \[64, 192\]"
    with pytest.raises(CheckpointError, match=message):
        read_params(tmp_path / "c", config_of(DRAFT))
    put(tmp_path / "c", tensors | {"fc.weight": fc, "fc.bias": fc[0].copy()})
    with pytest.raises(CheckpointError, match=r"1 tensors that this model does not have: fc.bias$"):
        read_params(tmp_path / "c", config_of(DRAFT))


def test_long_lists_are_cut_and_counted(tmp_path):
    tensors = {"fc.weight": tensors_of(DRAFT)["fc.weight"]}
    with pytest.raises(CheckpointError, match="46 missing tensors: .* and 38 more"):
        read_params(put(tmp_path / "c", tensors), config_of(DRAFT))


@pytest.mark.parametrize("name", ["lm_head.weight", "d2t"])
def test_draft_with_its_own_head_is_refused(tmp_path, name):
    tensors = tensors_of(DRAFT) | {name: np.zeros((5, 64), np.float32)}
    with pytest.raises(CheckpointError, match=f"{name} .a draft with its own embedding, head or"):
        read_params(put(tmp_path / "c", tensors), config_of(DRAFT))


def test_quantized_weights_are_refused(tmp_path):
    tensors = tensors_of(DRAFT)
    tensors["fc.weight"] = tensors["fc.weight"].astype(np.int8)
    with pytest.raises(CheckpointError, match="fc.weight has dtype I8, expected one of F32, F16"):
        read_params(put(tmp_path / "c", tensors), config_of(DRAFT))


# --- shards ---


def halves_of(folder):
    items = list(tensors_of(folder).items())
    return dict(items[::2]), dict(items[1::2])


def test_shards_of_any_name(tmp_path):
    first, second = halves_of(DRAFT2)
    for names in (("model-1-of-2.safetensors", "x.safetensors"), ("model.safetensors", "b.bin")):
        directory = put_shards(tmp_path / names[0], dict(zip(names, (first, second), strict=True)))
        params = read_params(directory, config_of(DRAFT2))
        assert_same_bits(params, read_params(FIXTURES / DRAFT2, config_of(DRAFT2)))


def test_index_that_names_a_missing_shard(tmp_path):
    first, second = halves_of(DRAFT)
    put_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second})
    (tmp_path / "b.safetensors").unlink()
    some = sorted(second)[0]
    with pytest.raises(CheckpointError, match=f"shard b.safetensors, which .* exist .for {some}"):
        checkpoint_files(tmp_path)


def test_shard_that_lacks_a_tensor(tmp_path):
    first, second = halves_of(DRAFT)
    weight_map = {name: "a.safetensors" for name in first} | {n: "b.safetensors" for n in second}
    moved = sorted(second)[0]
    first[moved] = second.pop(moved)
    put_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second}, weight_map)
    with pytest.raises(CheckpointError, match=f"a.safetensors holds .* another shard .* {moved}"):
        checkpoint_files(tmp_path)
    del first[moved]
    put_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second}, weight_map)
    with pytest.raises(CheckpointError, match=f"b.safetensors lacks what .* there: {moved}"):
        checkpoint_files(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    first, second = halves_of(DRAFT)
    twice = sorted(second)[0]
    first[twice] = second[twice]
    put_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second})
    with pytest.raises(CheckpointError, match=f"a.safetensors holds .* another shard .*: {twice}"):
        checkpoint_files(tmp_path)


def test_shard_with_a_tensor_that_the_index_does_not_name(tmp_path):
    first, second = halves_of(DRAFT)
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    stray = sorted(second)[0]
    del weight_map[stray]
    put_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second}, weight_map)
    with pytest.raises(CheckpointError, match=f"b.safetensors holds .* does not name .*: {stray}"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "'weight_map' is missing"),
        ('{"weight_map": {}}', "'weight_map' is missing"),
        ('{"weight_map": {"fc.weight": "../a.safetensors"}}', "not a file name"),
        ('{"weight_map": {"fc.weight": 1}}', "not a file name"),
    ],
)
def test_damaged_index(tmp_path, text, message):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint_files(tmp_path)
    assert INDEX in str(error.value)


def test_both_forms_at_once(tmp_path):
    first, _ = halves_of(DRAFT)
    put_shards(tmp_path, {"a.safetensors": first})
    put(tmp_path, first)
    with pytest.raises(CheckpointError, match="both model.safetensors and an"):
        checkpoint_files(tmp_path)


def test_no_weights(tmp_path):
    with pytest.raises(CheckpointError, match="neither .* it holds nothing"):
        checkpoint_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="it holds pytorch_model.bin"):
        read_params(tmp_path, config_of(DRAFT))


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_truncated_file_is_named(tmp_path, kept):
    whole = (FIXTURES / DRAFT / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match="truncated or damaged") as error:
        read_params(tmp_path, config_of(DRAFT))
    assert str(path) in str(error.value)


def test_stream_of_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="gone.safetensors: no such file"):
        list(stream_tensors(tmp_path / "gone.safetensors"))


# --- writing ---


@pytest.mark.smoke
@pytest.mark.parametrize("folder", [TARGET, TIED, DRAFT, DRAFT2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_checkpoint_reads_back_bit_equal(tmp_path, folder, dtype):
    config = config_of(folder)
    params = read_params(FIXTURES / folder, config, dtype)
    out = tmp_path / "new" / "checkpoint"
    write_params(out, config, params, {"tokenizer.json": "{}", "blob.bin": b"\x00\xff"})
    assert_same_bits(read_params(out, config), params)
    parse = parse_target_config if folder.startswith("dense_text") else parse_draft_config
    assert parse(out) == config
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert (out / "blob.bin").read_bytes() == b"\x00\xff"
    held = {"config.json", "model.safetensors", "tokenizer.json", "blob.bin"}
    assert {path.name for path in out.iterdir()} == held
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
    assert len(modes) == 1


def test_written_names_are_the_official_ones(tmp_path):
    config = config_of(DRAFT2)
    write_params(tmp_path, config, read_params(FIXTURES / DRAFT2, config))
    written = dict(stream_tensors(tmp_path / "model.safetensors"))
    assert written.keys() == {spec.name for spec in tensor_table(config)}
    assert "candidate_selector.predecessor_codebook" in written
    header = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + size])["__metadata__"] == {"format": "pt"}


def test_a_transposed_array_is_written_as_it_reads(tmp_path):
    config = config_of(DRAFT)
    params = read_params(FIXTURES / DRAFT, config)
    params["fc"]["weight"] = np.asarray(params["fc"]["weight"]).T.copy().T  # Fortran order
    write_params(tmp_path, config, params)
    assert_same_bits(read_params(tmp_path, config), params)


def test_existing_checkpoint_needs_overwrite(tmp_path):
    config = config_of(DRAFT)
    params = read_params(FIXTURES / DRAFT, config)
    write_params(tmp_path, config, params)
    changed = jax.tree.map(lambda leaf: leaf + 1, params)
    with pytest.raises(CheckpointError, match="exists already"):
        write_params(tmp_path, config, changed)
    assert_same_bits(read_params(tmp_path, config), params)
    write_params(tmp_path, config, changed, overwrite=True)
    assert_same_bits(read_params(tmp_path, config), changed)


def test_params_that_do_not_match_leave_the_directory_alone(tmp_path):
    config = config_of(DRAFT)

    def refused(message, change):
        params = read_params(FIXTURES / DRAFT, config)
        change(params)
        with pytest.raises(CheckpointError, match=message):
            write_params(tmp_path / "c", config, params)
        assert not (tmp_path / "c").exists()

    refused("params lack fc/weight", lambda p: p.pop("fc"))
    refused("do not|does not have: extra", lambda p: p.update(extra=jnp.zeros(2)))
    refused(
        r"fc/weight has shape \[2\], expected \[64, 192\]",
        lambda p: p["fc"].update(weight=jnp.zeros(2)),
    )
    refused(
        "fc/weight has dtype int32",
        lambda p: p["fc"].update(weight=p["fc"]["weight"].astype(jnp.int32)),
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "../x", "a/b"])
def test_extra_files_cannot_take_our_names(tmp_path, name):
    config = config_of(DRAFT)
    params = read_params(FIXTURES / DRAFT, config)
    with pytest.raises(CheckpointError, match="not a free file name"):
        write_params(tmp_path, config, params, {name: "x"})


def test_a_sharded_checkpoint_is_not_written_over(tmp_path):
    first, second = halves_of(DRAFT)
    put_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second})
    config = config_of(DRAFT)
    with pytest.raises(CheckpointError, match="holds a sharded checkpoint"):
        write_params(tmp_path, config, read_params(tmp_path, config), overwrite=True)


def test_a_failed_write_leaves_the_old_checkpoint_and_no_rubbish(tmp_path, monkeypatch):
    config = config_of(DRAFT)
    out = tmp_path / "c"
    shutil.copytree(FIXTURES / DRAFT, out, ignore=shutil.ignore_patterns("trace*"))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    params = jax.tree.map(lambda leaf: leaf + 1, read_params(out, config))

    def fail(arrays, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("dflash_jax.io.tensors.safetensors.numpy.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        write_params(out, config, params, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
