"""The options of a training: one table, read by `session.train(...)` and by `%%ft_train` alike.

An `Option` knows its flag in a magic, its keyword in Python, how its text is read and which values are
allowed, so that the two ways of saying the same thing cannot drift apart.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ftnb.errors import UsageError
from ftnb.wire import paths

# Each is a process; a typo must not start a thousand of them on every rank.
MAX_WORKERS = 64


@dataclass(frozen=True)
class Option:
    keyword: str
    kind: type  # int, float, str, or bool for a flag without a value
    default: Any
    help: str
    flag: str = ""  # "--global-batch"; made from the keyword when left out
    short: str = ""  # "-n"
    choices: tuple[str, ...] = ()
    minimum: float | None = None  # smallest allowed value
    above: float | None = None  # values must be larger than this
    check: Callable[[str, Any], None] | None = None

    @property
    def long(self) -> str:
        return self.flag or "--" + self.keyword.replace("_", "-")

    def parse(self, text: str) -> Any:
        """The value written in a magic as `text`."""
        if self.kind is str:
            return self.checked(text, self.long)
        try:
            value = self.kind(text)
        except ValueError:
            raise UsageError(f"{self.long} takes {self._wanted()}, not {text!r}.") from None
        return self.checked(value, self.long)

    def checked(self, value: Any, label: str | None = None) -> Any:
        """`value` if it is allowed; `label` is how the user wrote the option."""
        label = label or self.keyword
        if value is None and self.default is None:
            return None
        if self.kind is bool:
            fits = isinstance(value, bool)
        elif self.kind is int:
            fits = _is_whole(value)
            value = int(value) if fits else value
        elif self.kind is float:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            value = float(value) if fits else value
        else:
            fits = isinstance(value, str)
        if (
            not fits
            or (self.minimum is not None and value < self.minimum)
            or (self.above is not None and value <= self.above)
        ):
            raise UsageError(f"{label} takes {self._wanted()}, not {value!r}.")
        if self.choices and value not in self.choices:
            hint = did_you_mean(value, self.choices)
            raise UsageError(f"{label} takes {self._wanted()}, not {value!r}.{hint}")
        if self.check:
            self.check(label, value)
        return value

    def _wanted(self) -> str:
        if self.choices:
            return " or ".join(self.choices)
        noun = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}[self.kind]
        if self.minimum is not None:
            return f"{noun} of at least {self.minimum:g}"
        return f"{noun} above {self.above:g}" if self.above is not None else noun


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return value.__index__() == value  # also NumPy's integers
    except AttributeError:
        return False


def check_seed(label: str, value: int) -> None:
    if value >= 2**32:
        raise UsageError(f"{label} must be below 2**32 (NumPy's limit), not {value}.")


def check_workers(label: str, value: int) -> None:
    if value > MAX_WORKERS:
        raise UsageError(f"{label} takes at most {MAX_WORKERS} processes per rank, not {value}.")


def check_mode(label: str, value: str) -> None:
    if value in LATER_MODES:
        raise UsageError(f"{label} {value}: this mode is not available yet. Use ddp.")
    if value != "ddp":
        raise UsageError(f"{label} takes ddp, not {value!r}.{did_you_mean(value, ('ddp', *LATER_MODES))}")


def check_run_name(label: str, value: str) -> None:
    paths.check_name(value, "run")  # the name becomes a folder


LATER_MODES = ("allreduce", "fsdp", "pipeline", "tensor")
RECOVERIES = ("replace", "shrink", "restart")
DEFAULT_STEPS = 200

TRAIN_OPTIONS = (
    Option("steps", int, None, f"updates to make ({DEFAULT_STEPS} unless --epochs is given)", minimum=1),
    Option("epochs", int, None, "passes over the dataset, instead of --steps", minimum=1),
    Option("global_batch", int, 32, "samples per step over all ranks together", minimum=1),
    Option("seed", int, 0, "seed of Python, NumPy, torch and the shuffling", minimum=0, check=check_seed),
    Option("mode", str, "ddp", "how ranks share the work: ddp", check=check_mode),
    Option("clip_norm", float, None, "clip the averaged gradient to this norm", above=0),
    Option("recovery", str, "replace", "after a failure: replace the lost rank, shrink (go on without it), or restart "
           "(all go back to the start, or the last replica check, and wait for the full number)", choices=RECOVERIES),
    Option("hang_timeout_s", float, 30.0, "seconds without progress after which a rank counts as stuck (10 steps, if "
           "those take longer; 300 s in a first step, which may be compiling)", flag="--hang-timeout", above=0),
    Option("on_nan", str, "stop", "when a gradient is not finite: stop the run, skip that update, or rollback to the "
           "last state that is kept", choices=("stop", "skip", "rollback")),
    Option("check_replicas", int, None, "compare the ranks' weights and optimizer states every K steps", minimum=1),
    Option("evict_stragglers", bool, False, "take ranks out of the run that are much slower than the others"),
    Option("workers", int, 0, "DataLoader worker processes per rank", minimum=0, check=check_workers),
    Option("evaluate_every", int, None, "call evaluate(model) on rank 0 every K steps", minimum=1),
    Option("scheduler_interval", str, "epoch", "step the scheduler once per this", choices=("epoch", "step")),
    Option("name", str, "run", "name of the run and of its folder in ftnb_runs", check=check_run_name),
    Option("wait", bool, False, "block until the training has ended"),
)

# Designed, but not built yet: said so, instead of "unknown option".
LATER_TRAIN_KEYWORDS = (
    "checkpoint_every", "checkpoint_dir", "keep_checkpoints", "exact", "resume",
)  # fmt: skip


def later_flags(keywords: Iterable[str]) -> tuple[str, ...]:
    return tuple("--" + keyword.removesuffix("_s").replace("_", "-") for keyword in keywords)


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """' Did you mean --steps?' or an empty string."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def refuse_unknown(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise for the first keyword of `given`: `call` has no such option."""
    known = tuple(known)
    for keyword in given:
        hint = did_you_mean(keyword, known)
        raise UsageError(f"{call}() has no option {keyword!r}.{hint} Options: {', '.join(known)}.")


def check_train_options(given: dict[str, Any]) -> dict[str, Any]:
    """All training options, checked and with defaults filled in, from those that were `given`."""
    table = {option.keyword: option for option in TRAIN_OPTIONS}
    for keyword in given:
        if keyword in LATER_TRAIN_KEYWORDS:
            raise UsageError(f"The option {keyword} is not available yet.")
    refuse_unknown("train", [keyword for keyword in given if keyword not in table], table)
    options = {
        keyword: option.checked(given[keyword]) if keyword in given else option.default
        for keyword, option in table.items()
    }
    if options["steps"] is not None and options["epochs"] is not None:
        raise UsageError("Give either steps or epochs, not both.")
    if options["steps"] is None and options["epochs"] is None:
        options["steps"] = DEFAULT_STEPS
    return options
