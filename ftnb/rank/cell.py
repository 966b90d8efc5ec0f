"""Running the user's cell on this rank, and checking that what it defines can be trained."""

from __future__ import annotations

import inspect
import linecache
import math
import os
import sys
import time
import traceback
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

import ftnb
from ftnb.errors import CheckError
from ftnb.rank import state

FILENAME = "<ft_train cell>"
CONTRACT = ("model", "optimizer", "dataset", "loss_fn", "training_step", "collate_fn", "scheduler", "evaluate")


@dataclass
class Job:
    """What the cell defined, checked."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    loss_fn: Any
    training_step: Any
    collate_fn: Any
    scheduler: Any
    evaluate: Any
    dataset_len: int
    device: torch.device

    @property
    def has_batchnorm(self) -> bool:
        return any(
            isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.training for m in self.model.modules()
        )


def run_cell(source: str, namespace: dict[str, Any], names: dict[str, Any], seed: int) -> None:
    """Execute the cell in `namespace`, seeded; whatever it raises comes out unchanged."""
    forget_last_cell(namespace)
    namespace.update(names)
    lines = source.splitlines(keepends=True)
    # Tracebacks quote the user's line only when linecache knows the source; mtime None keeps it there.
    linecache.cache[FILENAME] = (len(source), None, lines, FILENAME)
    code = compile(source, FILENAME, "exec", dont_inherit=True)
    state.seed_everything(seed)
    torch.manual_seed(seed)  # also reaches a GPU that nothing has used yet
    try:
        exec(code, namespace)
    finally:  # what a cell has defined before it raised is not for the next one either
        namespace["_ftnb_defined"] = {name: id(namespace[name]) for name in CONTRACT if name in namespace}


def forget_last_cell(namespace: dict[str, Any]) -> None:
    """Remove what the last cell defined, so that a cell which forgets `model` does not train the old one.

    Objects that the user has put there since (with %%px) stay.
    """
    for name, identity in namespace.pop("_ftnb_defined", {}).items():
        if name in namespace and id(namespace[name]) == identity:
            del namespace[name]


def check(namespace: dict[str, Any], options: dict[str, Any], device: torch.device, world_size: int) -> Job:
    """The job that the namespace describes; raises `CheckError` naming what is missing or wrong."""
    missing = [name for name in ("model", "optimizer", "dataset") if name not in namespace]
    if missing:
        names = " and ".join(f"`{name}`" for name in missing)
        raise CheckError(
            f"The cell does not define {names}. It must define `model`, `optimizer`, `dataset`, and `loss_fn` or "
            "`training_step`; add what is missing and run the cell again."
        )
    model, optimizer, dataset = (namespace[name] for name in ("model", "optimizer", "dataset"))
    _check_model(model)
    _check_optimizer(optimizer, model)
    dataset_len = _check_dataset(dataset, options["global_batch"], world_size)
    functions = {}
    for name in ("loss_fn", "training_step", "collate_fn", "evaluate"):
        functions[name] = namespace.get(name)
        if functions[name] is not None and not callable(functions[name]):
            raise CheckError(f"`{name}` is a {_type(functions[name])}, not a function: `def {name}(…):`.")
    if isinstance(functions["loss_fn"], type):
        name = functions["loss_fn"].__name__
        raise CheckError(f"`loss_fn` is the class {name}, not an instance of it: `loss_fn = {name}()`.")
    if functions["loss_fn"] is None and functions["training_step"] is None:
        raise CheckError(
            "The cell defines neither `loss_fn(output, target)` nor `training_step(model, batch)`. Add, for "
            "example, `loss_fn = torch.nn.functional.cross_entropy`."
        )
    if functions["loss_fn"] is not None and functions["training_step"] is not None:
        raise CheckError("The cell defines both `loss_fn` and `training_step`; keep one (`training_step` can do all).")
    for name, arguments in (("loss_fn", 2), ("training_step", 2), ("evaluate", 1)):
        _check_signature(name, functions[name], arguments)
    if options.get("evaluate_every") and functions["evaluate"] is None:
        raise CheckError("--evaluate-every is given, but the cell does not define `evaluate(model)`.")
    scheduler = namespace.get("scheduler")
    if scheduler is not None and not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        raise CheckError(f"`scheduler` is a {_type(scheduler)}; it needs `step()` and `state_dict()` as in torch.")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise CheckError(
            "`scheduler` is a ReduceLROnPlateau, which needs a metric at each step; ftnb steps schedulers without "
            "one. Use another scheduler of torch.optim.lr_scheduler."
        )
    try:
        state.take_apart(dict(model.state_dict()))
        state.take_apart(optimizer.state_dict())
        if scheduler is not None:
            state.take_apart(scheduler_state(scheduler))
    except TypeError as error:
        raise CheckError(
            f"The state of `model`, `optimizer` or `scheduler` cannot be given to another rank: {error}."
        ) from None
    model.to(device)
    return Job(
        model, optimizer, dataset, functions["loss_fn"], functions["training_step"], functions["collate_fn"],
        scheduler, functions["evaluate"], dataset_len, device,
    )


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """The part of the scheduler's state that moves; functions and milestones (a Counter) are the cell's own."""
    return {k: v for k, v in scheduler.state_dict().items() if not callable(v) and not isinstance(v, Counter)}


def _check_signature(name: str, function: Any, arguments: int) -> None:
    if function is None:
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some callables do not tell
    try:
        signature.bind(*range(arguments))
    except TypeError:
        wanted = {"loss_fn": "output, target", "training_step": "model, batch", "evaluate": "model"}[name]
        raise CheckError(f"`{name}{signature}` must take ({wanted}).") from None


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise CheckError(f"`model` is a {_type(model)}, not a torch.nn.Module.")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise CheckError("`model` is wrapped in DistributedDataParallel already; give the bare module, ftnb wraps it.")
    for module_name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise CheckError(
                f"`{module_name}` gives sparse gradients (sparse=True), which ftnb does not support; leave that out."
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise CheckError("`model` has no parameter that requires a gradient; there is nothing to train.")


def _check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CheckError(f"`optimizer` is a {_type(optimizer)}, not a torch.optim.Optimizer.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CheckError(
            f"{_type(optimizer)} needs a closure that it calls several times in each step; ftnb supports optimizers "
            "whose step() takes none (SGD, Adam, AdamW, …)."
        )
    known = {id(p) for p in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if foreign:
        shapes = ", ".join(str(list(p.shape)) for p in foreign[:3])
        raise CheckError(
            f"`optimizer` holds {len(foreign)} parameter{'s' if len(foreign) > 1 else ''} that `model` does not have "
            f"(shape {shapes}). Create it after the model: `optimizer = torch.optim.SGD(model.parameters(), lr=…)`."
        )


def _check_dataset(dataset: Any, global_batch: int, world_size: int) -> int:
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise CheckError(
            "`dataset` is an IterableDataset; to give the samples of a lost rank to the others, ftnb needs a map-style "
            "one (`dataset[i]` and `len(dataset)`)."
        )
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise CheckError("`dataset` is a DataLoader; give the dataset itself, ftnb makes the batches (--global-batch).")
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise CheckError(f"`dataset` is a {_type(dataset)}; it needs `__getitem__` and `__len__` (map-style).")
    dataset_len = len(dataset)
    if dataset_len == 0:
        raise CheckError("`dataset` is empty: len(dataset) is 0.")
    if global_batch > dataset_len:
        raise CheckError(
            f"The global batch ({global_batch}) is larger than the dataset ({dataset_len} samples). "
            f"Use --global-batch {dataset_len} or less."
        )
    if global_batch < world_size:
        raise CheckError(
            f"The global batch ({global_batch}) is smaller than the number of ranks ({world_size}): some would have "
            f"nothing to do. Use --global-batch {world_size} or more."
        )
    return dataset_len


def signature(job: Job) -> dict[str, Any]:
    """What must be equal on all ranks: names, shapes, types and initial values of parameters and buffers."""
    tensors = []
    for kind, named in (("parameter", job.model.named_parameters()), ("buffer", job.model.named_buffers())):
        for name, tensor in named:
            value = zlib.crc32(state.as_bytes(tensor).numpy())
            tensors.append([kind, name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad, value])
    groups = [
        [len(group["params"]), {k: v for k, v in group.items() if isinstance(v, (int, float, bool, str))}]
        for group in job.optimizer.param_groups
    ]
    return {
        "tensors": tensors,
        "optimizer": [_type(job.optimizer), groups],
        "dataset_len": job.dataset_len,
        "training": "training_step" if job.training_step else "loss_fn",
        "evaluate": job.evaluate is not None,
        "scheduler": _type(job.scheduler) if job.scheduler is not None else None,
    }


def describe_error(error: BaseException, step: int | None = None) -> dict[str, Any]:
    """Plain data about an exception in the user's code: type, text, line of the cell, the user's frames."""
    frames = traceback.extract_tb(error.__traceback__)
    lineno = next((f.lineno for f in reversed(frames) if f.filename == FILENAME), None)
    if isinstance(error, SyntaxError) and error.filename == FILENAME:
        lineno = error.lineno
    # From the user's first line on; an error that comes up inside torch alone keeps the frames nearest to it.
    users = [i for i, frame in enumerate(frames) if frame.filename == FILENAME or not _is_ours(frame.filename)]
    shown = frames[users[0] :] if users else frames[-3:]
    text = "".join(
        ["Traceback (most recent call last):\n"] * bool(shown)
        + traceback.format_list(shown)
        + traceback.format_exception_only(type(error), error)
    )
    return {
        "etype": type(error).__name__,
        "evalue": printable(error),
        "lineno": lineno,
        "step": step,
        "traceback": text[-8000:],
        "time": time.time(),
    }


def printable(error: BaseException) -> str:
    """The exception's text, cut to a length that can be shown; one that cannot even be asked says so."""
    try:
        text = str(error)
    except BaseException:
        return "(its text cannot be shown)"
    if text.startswith("Caught ") and " DataLoader worker process " in text.partition("\n")[0]:
        # torch sends a worker's exception with its whole traceback for a text; what it said stands at the end.
        text = text.rstrip().rpartition("\n")[2].removeprefix(f"{type(error).__name__}: ")
    return text[:2000]


def _is_ours(filename: str) -> bool:
    """Whether the file belongs to ftnb or torch."""
    return any(filename.startswith(os.path.dirname(os.path.abspath(m.__file__)) + os.sep) for m in (ftnb, torch))


def _type(x: Any) -> str:
    return type(x).__name__


def apply_paths(cwd: str, sys_path: list[str]) -> None:
    """Work in the notebook's directory and import what it can import.

    Entries that this rank already has keep their place, so that the rank's own packages win.
    """
    os.chdir(cwd)
    if "" not in sys.path and cwd not in sys.path:
        sys.path.insert(0, cwd)
    sys.path += [entry for entry in sys_path if entry not in sys.path]


def plain_number(value: Any, name: str) -> float:
    """`value` as float: a number or a tensor with one element."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise CheckError(f"`{name}` has {value.numel()} elements; a scalar is needed.")
        return float(value.detach())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise CheckError(f"`{name}` is a {_type(value)}; a number is needed.") from None


def is_finite(x: float | None) -> bool:
    return x is not None and math.isfinite(x)
