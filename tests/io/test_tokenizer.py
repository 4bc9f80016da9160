"""The tokenizer wrapper on a byte-level vocabulary made here."""

import json

import pytest
import tokenizers

from dflash_jax.io.tokenizer import Tokenizer, TokenizerError


def byte_tokenizer():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|pad|>"])
    return tokenizer


@pytest.fixture
def directory(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_round_trip(directory):
    tokenizer = Tokenizer.load(directory)
    text = "Grüße, 世界!\n  x = 1"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and all(type(token) is int for token in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_vocabulary_includes_added_tokens(directory):
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.vocab_size == 258
    assert tokenizer.encode("a<|end|>b")[1] == 256
    assert tokenizer.decode([256, *tokenizer.encode("b")]) == "<|end|>b"
    assert tokenizer.decode([256, *tokenizer.encode("b")], skip_special_tokens=True) == "b"


def test_half_a_character_shows_as_the_replacement_character(directory):
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


@pytest.mark.parametrize("token", ["<|end|>", {"content": "<|end|>", "special": True}])
def test_eos_token(directory, token):
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert Tokenizer.load(directory).eos_token_ids == (256,)


def test_no_eos_token(directory):
    assert Tokenizer.load(directory).eos_token_ids == ()
    (directory / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert Tokenizer.load(directory).eos_token_ids == ()


def test_unknown_eos_token(directory):
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(TokenizerError, match="tokenizer_config.json: eos_token '</s>' is not in"):
        Tokenizer.load(directory)


@pytest.mark.parametrize("bad", [258, -1])
def test_decode_refuses_ids_that_the_library_would_drop(directory, bad):
    with pytest.raises(TokenizerError, match=rf"token id {bad} at position 1, expected 0\.\.257"):
        Tokenizer.load(directory).decode([0, bad])


def test_encode_takes_a_string(directory):
    with pytest.raises(TokenizerError, match="encode takes a string, got list"):
        Tokenizer.load(directory).encode([1, 2])


def test_missing_or_damaged_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer.load(tmp_path)
    path.write_text("{")
    with pytest.raises(TokenizerError, match="not a tokenizer") as error:
        Tokenizer.load(tmp_path)
    assert str(path) in str(error.value)
    empty = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={}, merges=[]))
    empty.save(str(path))
    with pytest.raises(TokenizerError, match="the vocabulary is empty"):
        Tokenizer.load(tmp_path)
