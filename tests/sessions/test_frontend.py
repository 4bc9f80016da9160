"""The front end alone: pieces of text, stop strings, and the choice of N, against whole texts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.io.pair import PRETRAINED
from dflash_jax.io.tokenizer import Tokenizer
from dflash_jax.sessions.frontend import Detokenizer, FrontEnd, StopScanner, live_width
from tests.sessions.letters import TABLE, Letters

LETTERS = Letters()
tokens_lists = st.lists(st.integers(0, len(TABLE) - 1), max_size=60)
few_letters = st.text("ab€", min_size=1, max_size=4)


def pieces_of(decode, tokens):
    """The detokeniser's pieces and what it holds at the end."""
    detokenizer, pieces = Detokenizer(decode), []
    for token in tokens:
        detokenizer, piece = detokenizer.push(token)
        pieces.append(piece)
    return pieces, detokenizer.rest()


# --- characters ------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(tokens_lists)
def test_pieces_add_up_and_nothing_is_taken_back(tokens):
    """At any point the text so far begins the text of everything, whatever bytes come."""
    pieces, rest = pieces_of(LETTERS.decode, tokens)
    whole = LETTERS.decode(tokens)
    assert "".join(pieces) + rest == whole
    so_far = ""
    for count, piece in enumerate(pieces, 1):
        so_far += piece
        assert whole.startswith(so_far)
        now = LETTERS.decode(tokens[:count])
        # Nor is more held back than could be the beginning of a character.
        assert so_far.rstrip("\ufffd") == now.rstrip("\ufffd")
        assert len(now) - len(so_far) <= 3


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.data())
def test_bytes_cut_anywhere_give_whole_characters(text, data):
    raw = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=40))
    cuts = [0, *sorted(cuts), len(raw)]
    parts = [raw[a:b] for a, b in zip(cuts, cuts[1:], strict=False) if a < b]

    def decode(ids):
        return b"".join(parts[i] for i in ids).decode(errors="replace")

    pieces, rest = pieces_of(decode, range(len(parts)))
    assert "".join(pieces) + rest == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces) and not rest


def test_four_bytes_in_four_tokens_come_out_as_one():
    tokens = [TABLE.index(bytes([byte])) for byte in "😀".encode()]
    pieces, rest = pieces_of(LETTERS.decode, [0, *tokens, 1])
    assert (pieces, rest) == (["a", "", "", "", "😀", "b"], "")


def test_an_endless_run_of_stray_bytes_comes_out_all_the_same():
    stray = TABLE.index(b"\x82")
    pieces, rest = pieces_of(LETTERS.decode, [stray] * 100)
    assert pieces[-1] == "\ufffd" and len("".join(pieces)) == 97 and rest == "\ufffd" * 3


def test_the_window_stays_short():
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return LETTERS.decode(ids)

    pieces_of(decode, [3, 50, 42, 7] * 200)
    assert max(seen) <= 20


def test_words_joined_by_spaces_keep_their_spaces():
    """A decoder that treats the first token in its own way."""
    pieces, rest = pieces_of(lambda ids: " ".join(map(str, ids)), range(40))
    assert "".join(pieces) + rest == " ".join(map(str, range(40)))


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40))
def test_the_embedded_tokenizer(text):
    tokenizer = Tokenizer.load(PRETRAINED / "tiny")
    tokens = tokenizer.encode(text)
    pieces, rest = pieces_of(tokenizer.decode, tokens)
    assert "".join(pieces) + rest == tokenizer.decode(tokens)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


# --- stop strings ----------------------------------------------------------------------------


def cut_at_stop(text, stops):
    """The definition, character by character: (text before the stop string, its end) or None."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], end
    return None


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("ab€", max_size=4), max_size=12),
    st.lists(few_letters, min_size=1, max_size=3).map(tuple),
)
def test_stop_strings_are_found_whatever_the_pieces(pieces, stops):
    scanner, given_out, text = StopScanner(stops), "", ""
    for piece in pieces:
        scanner, out, hit = scanner.push(piece)
        given_out, text = given_out + out, text + piece
        expected = cut_at_stop(text, stops)
        assert hit == (expected is not None)
        if hit:
            assert given_out == expected[0]
            return
        # What is held back begins a stop string, and no longer end of the text does.
        held = len(text) - len(given_out)
        endings = [
            n for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) for s in stops)
        ]
        assert held == max(endings, default=0)


def test_a_beginning_that_comes_to_nothing_is_given_out():
    scanner = StopScanner(("abc",))
    scanner, out, hit = scanner.push("xab")
    assert (out, hit) == ("x", False)
    scanner, out, hit = scanner.push("ab")
    assert (out, hit) == ("ab", False)
    scanner, out, hit = scanner.push("cd")
    assert (out, hit) == ("", True)


# --- N ---------------------------------------------------------------------------------------


def expected_end(tokens, stops, stop_ids, budget, least):
    """Count, reason and text of a whole stream, by decoding every beginning of it anew."""
    for count in range(1, len(tokens) + 1):
        if count > least and tokens[count - 1] in stop_ids:
            return count, "stop", LETTERS.decode(tokens[: count - 1])
        before, text = settled(tokens[: count - 1]), settled(tokens[:count])
        if count > least:
            # Stop strings that were complete before were passed over.
            for end in range(len(before) + 1, len(text) + 1):
                starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
                if starts:
                    return count, "stop", text[: min(starts)]
        if count >= budget:
            return count, "length", LETTERS.decode(tokens[:count])
    return len(tokens), None, None


def settled(tokens):
    text = LETTERS.decode(tokens)
    return text[: max(len(text.rstrip("\ufffd")), len(text) - 3)]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_preview_does_not_depend_on_the_blocks(data):
    tokens = data.draw(tokens_lists)
    stops = tuple(data.draw(st.lists(st.text("abcdehr€é", min_size=1, max_size=3), max_size=3)))
    stop_ids = tuple(data.draw(st.lists(st.integers(0, len(TABLE) - 1), max_size=2)))
    budget = data.draw(st.integers(1, 40))
    least = data.draw(st.integers(0, budget))
    front = FrontEnd(
        LETTERS.decode, max_new_tokens=budget, min_new_tokens=least, stop=stops, stop_ids=stop_ids
    )
    count, text, reason = 0, "", None
    while reason is None and count < len(tokens):
        licensed = tokens[count : count + data.draw(st.integers(1, 8))]
        preview = front.preview(licensed)
        assert front.preview(licensed) == preview  # it changes nothing
        assert 1 <= preview.count <= len(licensed)
        assert preview.reason is not None or preview.count == len(licensed)
        front.adopt(preview)
        count, text, reason = count + preview.count, text + preview.text, preview.reason
        assert front.budget_left == budget - count
    want_count, want_reason, want_text = expected_end(tokens, stops, stop_ids, budget, least)
    assert (count, reason) == (want_count, want_reason)
    if reason is not None:
        assert text == want_text


def front_end(**kwargs):
    return FrontEnd(lambda ids: "".join("abcdefgh"[i] for i in ids), **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "count", "reason", "text"),
    [
        (dict(max_new_tokens=9), 6, None, "abcdef"),
        (dict(max_new_tokens=5), 5, "length", "abcde"),
        (dict(max_new_tokens=5, stop_ids=(2,)), 3, "stop", "ab"),
        (dict(max_new_tokens=5, stop_ids=(4,)), 5, "stop", "abcd"),  # exactly at the budget
        (dict(max_new_tokens=5, stop_ids=(5,)), 5, "length", "abcde"),  # one past it
        (dict(max_new_tokens=9, stop_ids=(0,)), 1, "stop", ""),
        (dict(max_new_tokens=9, stop=("cd",)), 4, "stop", "ab"),
        (dict(max_new_tokens=4, stop=("cd",)), 4, "stop", "ab"),
        (dict(max_new_tokens=3, stop=("cd",)), 3, "length", "abc"),
        (dict(max_new_tokens=9, stop=("cd", "b")), 2, "stop", "a"),
        (dict(max_new_tokens=9, stop=("fg",)), 6, None, "abcde"),
        (dict(max_new_tokens=9, stop=("cd",), stop_ids=(3,)), 4, "stop", "abc"),
        (dict(max_new_tokens=9, min_new_tokens=3, stop_ids=(1, 3)), 4, "stop", "abc"),
        (dict(max_new_tokens=9, min_new_tokens=4, stop=("cd", "ef")), 6, "stop", "abcd"),
        (dict(max_new_tokens=9, min_new_tokens=3, stop=("cd",)), 4, "stop", "ab"),
    ],
)
def test_where_six_licensed_tokens_end(kwargs, count, reason, text):
    preview = front_end(**kwargs).preview([0, 1, 2, 3, 4, 5])
    assert (preview.count, preview.reason, preview.text) == (count, reason, text)


def test_min_new_tokens_counts_tokens_of_all_rounds():
    front = front_end(max_new_tokens=9, min_new_tokens=4, stop_ids=(1,))
    front.adopt(front.preview([1, 1, 1]))
    assert front.preview([1]).reason is None
    assert (front.preview([1, 1, 1]).count, front.preview([1, 1, 1]).reason) == (2, "stop")


def test_cancellation_publishes_nothing_more_and_lets_go_of_held_text():
    front = front_end(max_new_tokens=9, stop=("cd",))
    front.adopt(front.preview([1, 2]))
    front.cancel()
    preview = front.preview([3, 4])
    assert (preview.count, preview.reason, preview.text) == (0, "cancelled", "c")


def test_tokens_without_text():
    front = FrontEnd(None, max_new_tokens=3, stop_ids=(7,))
    preview = front.preview([1, 7, 2])
    assert (preview.count, preview.reason, preview.text) == (2, "stop", "")
    with pytest.raises(ValueError, match="stop: got .'a',., but without a tokenizer"):
        FrontEnd(None, max_new_tokens=3, stop=("a",))


@pytest.mark.parametrize(
    ("draft_tokens", "budget_left", "context_left", "width"),
    [(7, 100, 100, 7), (7, 8, 100, 7), (7, 7, 100, 6), (7, 1, 100, 0), (7, 100, 3, 3),
     (7, 100, 0, 0), (0, 100, 100, 0), (15, 16, 15, 15)],
)  # fmt: skip
def test_live_width(draft_tokens, budget_left, context_left, width):
    assert live_width(draft_tokens, budget_left, context_left) == width
