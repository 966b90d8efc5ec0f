"""The one argument parser of all magics. It raises `UsageError`; it never exits and never guesses."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from ftnb.client.options import Option, did_you_mean
from ftnb.errors import UsageError


@dataclass(frozen=True)
class Command:
    """What a magic accepts."""

    name: str
    summary: str
    options: tuple[Option, ...] = ()
    positional: str = ""  # shown in the help, such as "KIND"; required unless in brackets
    later_flags: tuple[str, ...] = ()  # designed, not built yet
    prefix: str = "%"


@dataclass
class Parsed:
    values: dict[str, Any] = field(default_factory=dict)  # only what was given
    words: list[str] = field(default_factory=list)
    help: bool = False

    def get(self, keyword: str, default: Any = None) -> Any:
        return self.values.get(keyword, default)


def parse(command: Command, line: str) -> Parsed:
    """The options and words of `line`. With `--help` the help is printed and `.help` is set."""
    try:
        tokens = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{command.prefix}{command.name}: {error} in {line.strip()!r}.") from None
    parsed = Parsed()
    if "--help" in tokens or "-h" in tokens:
        print(help_text(command))
        parsed.help = True
        return parsed
    flags = {name: option for option in command.options for name in (option.long, option.short) if name}
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("-") or _is_number(token):
            parsed.words.append(token)
            continue
        flag, value = _split(token, flags)
        option = flags.get(flag)
        if option is None:
            raise UsageError(_unknown(command, flag, flags))
        if option.keyword in parsed.values:
            raise UsageError(f"{option.long} is given twice.")
        parsed.values[option.keyword] = _value(command, option, flag, value, tokens)
    _check_words(command, parsed.words)
    return parsed


def _split(token: str, flags: dict[str, Option]) -> tuple[str, str | None]:
    """`--steps=5`, `--steps`, `-n4` or `-n` as flag and value."""
    flag, equals, value = token.partition("=")
    if equals:
        return flag, value
    if not token.startswith("--") and len(token) > 2 and token[:2] in flags:
        return token[:2], token[2:]
    return token, None


def _value(command: Command, option: Option, flag: str, value: str | None, tokens: list[str]) -> Any:
    if option.kind is bool:
        if value is not None:
            raise UsageError(f"{flag} takes no value, not {value!r}.")
        return True
    if value is None:
        if not tokens or (tokens[0].startswith("-") and not _is_number(tokens[0])):
            full = f"{command.prefix}{command.name}"
            raise UsageError(f"{flag} needs a value: {option.help}. Help: {full} --help")
        value = tokens.pop(0)
    return option.parse(value)


def _unknown(command: Command, flag: str, flags: dict[str, Option]) -> str:
    full = f"{command.prefix}{command.name}"
    if flag in command.later_flags:
        return f"{full}: the option {flag} is not available yet."
    hint = did_you_mean(flag, (*flags, *command.later_flags))
    known = ", ".join(option.long for option in command.options) or "none"
    return f"{full} has no option {flag}.{hint} Options: {known}. Help: {full} --help"


def _check_words(command: Command, words: list[str]) -> None:
    wanted = command.positional.split()
    full = f"{command.prefix}{command.name}"
    if len(words) > len(wanted):
        extra = words[len(wanted)]
        usage = f"{full} {command.positional}".strip()
        hint = ""
        if extra.isdigit() and any(option.keyword == "rank" for option in command.options):
            hint = f" Did you mean --rank {extra}?"
        elif extra.isdigit() and any(option.short == "-n" for option in command.options):
            hint = f" Did you mean -n {extra}?"
        raise UsageError(f"{full}: {extra!r} is too much.{hint} Usage: {usage} [options]. Help: {full} --help")


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


def help_text(command: Command) -> str:
    usage = " ".join(part for part in (f"{command.prefix}{command.name}", command.positional) if part)
    lines = [f"{usage} [options]" if command.options else usage, f"  {command.summary}"]
    rows = []
    for option in command.options:
        names = ", ".join(name for name in (option.short, option.long) if name)
        value = "" if option.kind is bool else " " + _metavar(option)
        default = "" if option.default is None or option.default is False else f" (default {option.default})"
        rows.append((names + value, option.help + default))
    width = max((len(left) for left, _ in rows), default=0)
    lines += [f"  {left.ljust(width)}  {right}" for left, right in rows]
    return "\n".join(lines)


def _metavar(option: Option) -> str:
    if option.choices:
        return "|".join(option.choices)
    return {int: "N", float: "X", str: option.keyword.upper()}[option.kind]
