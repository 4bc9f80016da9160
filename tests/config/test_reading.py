"""Field lookup: places, precedence, types."""

import pytest

from dflash_jax.config import reading
from dflash_jax.config.reading import ConfigError, Section

TOP = Section({"size": 8, "only_top": 3, "nothing": None, "bad": 5}, "draft/config.json")
NESTED = Section({"size": 8, "only_nested": 2}, "draft/config.json", "dflash_config")


def test_finds_a_field_in_either_place():
    assert reading.read(reading.SIZE, "only_nested", NESTED, TOP) == 2
    assert reading.read(reading.SIZE, "only_top", NESTED, TOP) == 3
    assert reading.read(reading.SIZE, "size", NESTED, TOP) == 8


def test_conflict_names_both_places_and_values():
    other = Section({"size": 9}, "draft/config.json")
    with pytest.raises(ConfigError, match=r"dflash_config\.size is 8 but .*: size is 9"):
        reading.read(reading.SIZE, "size", NESTED, other)
    assert reading.read(reading.SIZE, "size", NESTED, other, first_wins=True) == 8


@pytest.mark.parametrize("name", ["absent", "nothing"])
def test_missing_names_the_field_and_every_place(name):
    with pytest.raises(ConfigError) as error:
        reading.read(reading.SIZE, name, NESTED, TOP)
    assert f"missing field '{name}'" in str(error.value)
    assert f"'draft/config.json: dflash_config.{name}'" in str(error.value)
    assert f"'draft/config.json: {name}'" in str(error.value)
    assert reading.read(reading.SIZE, name, NESTED, TOP, default=7) == 7


@pytest.mark.parametrize(
    ("kind", "good", "expected"),
    [
        (reading.INT, -3, -3),
        (reading.SIZE, 1, 1),
        (reading.TOKEN, 0, 0),
        (reading.TOKENS, 5, (5,)),
        (reading.TOKENS, [5, 0], (5, 0)),
        (reading.NUMBER, -2, -2.0),
        (reading.POSITIVE, 1e-6, 1e-6),
        (reading.BOOL, False, False),
        (reading.TEXT, "x", "x"),
        (reading.INTS, [3, -1], (3, -1)),
        (reading.TEXTS, ["a"], ("a",)),
    ],
)
def test_kinds_accept(kind, good, expected):
    value = reading.read(kind, "f", Section({"f": good}, "c"))
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (reading.INT, True),
        (reading.INT, 1.0),
        (reading.INT, "1"),
        (reading.SIZE, 0),
        (reading.SIZE, -1),
        (reading.TOKEN, -1),
        (reading.TOKENS, [1, -1]),
        (reading.TOKENS, "1"),
        (reading.NUMBER, float("inf")),
        (reading.NUMBER, "1e-6"),
        (reading.NUMBER, True),
        (reading.POSITIVE, 0),
        (reading.BOOL, 1),
        (reading.BOOL, "false"),
        (reading.TEXT, 1),
        (reading.INTS, 3),
        (reading.INTS, [1, "2"]),
        (reading.TEXTS, "full_attention"),
    ],
)
def test_kinds_refuse_with_value_and_expectation(kind, bad):
    with pytest.raises(ConfigError) as error:
        reading.read(kind, "f", Section({"f": bad}, "c"))
    assert repr(bad) in str(error.value)
    assert kind.name in str(error.value)


def test_section_must_be_an_object():
    with pytest.raises(ConfigError, match="c: inner is 4, expected an object"):
        Section({"inner": 4}, "c").section("inner")
    deep = Section({"a": {"b": {"x": 1}}}, "c").section("a").section("b")
    assert deep.place("x") == "c: a.b.x"


def test_sources(tmp_path):
    (tmp_path / "config.json").write_text('{"size": 4}')
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json", {"size": 4}):
        assert reading.read(reading.SIZE, "size", reading.open_section(source)) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("{", "not valid JSON"), ("[1]", "expected a JSON object, got list")],
)
def test_unreadable_files_are_named(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        reading.open_section(path)
    assert str(path) in str(error.value)
