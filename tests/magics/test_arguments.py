"""The one argument parser of all magics."""

from __future__ import annotations

import pytest

from ftnb.client.options import Option
from ftnb.errors import UsageError
from ftnb.magics.arguments import Command, parse

COMMAND = Command(
    "ft_try",
    "try it",
    (
        Option("num_ranks", int, None, "number", short="-n", minimum=1),
        Option("low", float, 0.0, "lowest"),
        Option("name", str, "x", "a name"),
        Option("wait", bool, False, "block"),
    ),
    positional="KIND",
    later_flags=("--exact",),
)


@pytest.mark.parametrize("line", ["-n 4", "-n4", "--num-ranks 4", "--num-ranks=4", "-n=4", "-n 4  # four"])
def test_ways_to_give_a_value(line):
    assert parse(COMMAND, line).values == {"num_ranks": 4}


def test_words_quotes_flags_and_negative_numbers():
    parsed = parse(COMMAND, "kill --name 'a b' --wait --low -2.5")
    assert parsed.words == ["kill"]
    assert parsed.values == {"name": "a b", "wait": True, "low": -2.5}


@pytest.mark.parametrize(
    "line, message",
    [
        ("--num-rank 4", "Did you mean --num-ranks"),
        ("--exact", "not available yet"),
        ("-n", "-n needs a value"),
        ("-n --wait", "-n needs a value"),
        ("-n four", "whole number of at least 1, not 'four'"),
        ("-n 0", "whole number of at least 1, not 0"),
        ("--wait=yes", "takes no value"),
        ("-n 1 --num-ranks 2", "given twice"),
        ("kill twice", "'twice' is too much"),
        ("--name 'a", "No closing quotation"),
    ],
)
def test_mistakes_are_explained(line, message):
    with pytest.raises(UsageError, match=message):
        parse(COMMAND, line)


def test_a_bare_rank_is_recognised():
    command = Command("ft_try", "try it", (Option("rank", int, None, "the rank"),), positional="KIND")
    with pytest.raises(UsageError, match=r"'2' is too much. Did you mean --rank 2\?"):
        parse(command, "kill 2")


def test_help_is_printed_and_nothing_is_checked(capsys):
    assert parse(COMMAND, "--nonsense --help").help
    text = capsys.readouterr().out
    assert "%ft_try KIND [options]" in text
    assert "-n, --num-ranks N" in text
    assert "lowest (default 0.0)" in text  # a default of zero is one, too
    assert "block (default" not in text
