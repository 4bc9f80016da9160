"""The tokenizer of a checkpoint directory, over the `tokenizers` library."""

import os
import pathlib
from collections.abc import Iterable

import tokenizers

from dflash_jax.config.reading import read_json


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded or was handed what it cannot encode or decode."""


class Tokenizer:
    """Text <-> token ids.

    vocab_size:    highest id + 1, added tokens included: every id below it may be looked up.
                   A model's embedding often has more rows, as padding.
    eos_token_ids: what `tokenizer_config.json` names as `eos_token`; empty without one.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_token_ids: tuple[int, ...] = ()):
        self._tokenizer = tokenizer
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_token_ids = eos_token_ids

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "Tokenizer":
        """Loads `tokenizer.json` and, for the EOS token, `tokenizer_config.json` if there.

        Raises:
          TokenizerError: no or a damaged `tokenizer.json`, or an `eos_token` it does not know.
        """
        path = pathlib.Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception, whatever is wrong
            raise TokenizerError(f"{path}: not a tokenizer ({error})") from error
        if not tokenizer.get_vocab_size(with_added_tokens=True):
            raise TokenizerError(f"{path}: the vocabulary is empty")
        return cls(tokenizer, _eos_token_ids(tokenizer, path.with_name("tokenizer_config.json")))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens written in the text count; none are added."""
        if not isinstance(text, str):
            raise TokenizerError(f"encode takes a string, got {type(text).__name__}")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `ids`; an incomplete UTF-8 sequence at the end shows as U+FFFD.

        Raises:
          TokenizerError: an id outside the vocabulary (the library would drop it unseen).
        """
        ids = [int(token) for token in ids]
        for position, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise TokenizerError(
                    f"token id {token} at position {position}, expected 0..{self.vocab_size - 1}"
                )
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def _eos_token_ids(tokenizer: tokenizers.Tokenizer, path: pathlib.Path) -> tuple[int, ...]:
    if not path.is_file():
        return ()
    token = read_json(path).get("eos_token")
    if isinstance(token, dict):  # a serialized AddedToken
        token = token.get("content")
    if token is None:
        return ()
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise TokenizerError(f"{path}: eos_token {token!r} is not in tokenizer.json")
    return (token_id,)
