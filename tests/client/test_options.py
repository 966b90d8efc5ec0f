"""One table of training options serves Python and the magic."""

from __future__ import annotations

import numpy as np
import pytest

from ftnb.client.options import TRAIN_OPTIONS, check_train_options
from ftnb.errors import UsageError
from ftnb.magics import ft_train
from ftnb.magics.arguments import parse


def test_defaults():
    assert check_train_options({}) == {
        "steps": 200, "epochs": None, "global_batch": 32, "seed": 0, "mode": "ddp", "clip_norm": None,
        "recovery": "replace", "workers": 0, "evaluate_every": None, "scheduler_interval": "epoch",
        "name": "run", "wait": False, "hang_timeout_s": 30.0, "on_nan": "stop", "check_replicas": None,
        "evict_stragglers": False,
    }  # fmt: skip


def test_epochs_replace_steps():
    options = check_train_options({"epochs": 3})
    assert (options["steps"], options["epochs"]) == (None, 3)
    with pytest.raises(UsageError, match="not both"):
        check_train_options({"epochs": 3, "steps": 4})


@pytest.mark.parametrize(
    "given",
    [
        {"steps": 0}, {"steps": 2.5}, {"steps": True}, {"steps": "3"}, {"global_batch": -1},
        {"global_batch": None},
        {"seed": -1}, {"seed": 2**32}, {"clip_norm": 0}, {"clip_norm": float("nan")}, {"workers": -1}, {"workers": 1000},
        {"scheduler_interval": "steps"}, {"wait": 1}, {"name": "a/b"}, {"name": ".."}, {"name": 3},
        {"mode": "dp"}, {"recovery": "shrnk"}, {"hang_timeout_s": 0}, {"hang_timeout_s": None}, {"on_nan": "ignore"},
        {"check_replicas": 0}, {"check_replicas": 2.5}, {"evict_stragglers": 1},
    ],
)  # fmt: skip
def test_wrong_values_are_refused(given):
    with pytest.raises(UsageError):
        check_train_options(given)


def test_numpy_numbers_are_numbers():
    options = check_train_options({"steps": np.int64(7), "clip_norm": np.float64(0.5)})
    assert options["steps"] == 7
    assert type(options["steps"]) is int
    assert options["clip_norm"] == 0.5


@pytest.mark.parametrize(
    "given", [{"exact": True}, {"checkpoint_every": 5}, {"mode": "allreduce"}]
)
def test_what_comes_later_is_said_to(given):
    with pytest.raises(UsageError, match="not available yet"):
        check_train_options(given)


def test_unknown_options_get_a_suggestion():
    with pytest.raises(UsageError, match="Did you mean global_batch"):
        check_train_options({"globel_batch": 3})


def test_magic_and_python_know_the_same_options():
    examples = {
        "steps": 7, "epochs": 2, "global_batch": 64, "seed": 5, "mode": "ddp", "clip_norm": 1.5,
        "recovery": "shrink", "workers": 2, "evaluate_every": 10, "scheduler_interval": "step",
        "name": "mine", "wait": True, "hang_timeout_s": 2.5, "on_nan": "rollback", "check_replicas": 50,
        "evict_stragglers": True,
    }  # fmt: skip
    assert set(examples) == {option.keyword for option in TRAIN_OPTIONS}
    for option in TRAIN_OPTIONS:
        value = examples[option.keyword]
        text = option.long if option.kind is bool else f"{option.long} {value}"
        assert parse(ft_train.COMMAND, text).values == {option.keyword: value}
        assert check_train_options({option.keyword: value})[option.keyword] == value


def test_how_the_options_about_failures_are_written():
    line = "--hang-timeout 2 --on-nan skip --check-replicas 20 --evict-stragglers --recovery restart"
    assert parse(ft_train.COMMAND, line).values == {
        "hang_timeout_s": 2.0, "on_nan": "skip", "check_replicas": 20, "evict_stragglers": True,
        "recovery": "restart",
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"--on-nan takes stop or skip or rollback, not 'skp'. Did you mean skip\?"):
        parse(ft_train.COMMAND, "--on-nan skp")
    with pytest.raises(UsageError, match="--hang-timeout takes a number above 0, not 0"):
        parse(ft_train.COMMAND, "--hang-timeout 0")
    with pytest.raises(UsageError, match="recovery takes replace or shrink or restart"):
        check_train_options({"recovery": "restrt"})
