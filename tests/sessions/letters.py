"""A tokenizer of 64 hand-made tokens: letters, pairs of letters, pieces of longer characters."""

LETTERS = [bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz .,\n"]
PAIRS = [b"ab", b"ba", b"ca", b"de", b"th", b"he", b"in", b"er", b"on", b". "]
# Whole, in halves, and with text around the halves: two, three and four bytes long.
CHARACTERS = [
    "é".encode(), b"\xc3", b"\xa9", b"e\xc3", b"\xa9a",
    "€".encode(), b"\xe2", b"\x82", b"\xac", b"\xe2\x82", b"\x82\xac", b"\xacb\xe2",
    "😀".encode(), b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xf0\x9f", b"\x98\x80", b"\x9f\x98",
    b"\x80c\xf0", "\ufffd".encode(), b"!", b"?",
]  # fmt: skip
TABLE = LETTERS + PAIRS + CHARACTERS


class Letters:
    """Decodes as byte-level tokenizers do: what is not UTF-8 shows as U+FFFD."""

    vocab_size = len(TABLE)

    def __init__(self, eos_token_ids=()):
        self.eos_token_ids = tuple(eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Byte by byte, of the letters and halves that are there."""
        return [TABLE.index(bytes([byte])) for byte in text.encode()]

    def decode(self, ids) -> str:
        return b"".join(TABLE[token] for token in ids).decode(errors="replace")
