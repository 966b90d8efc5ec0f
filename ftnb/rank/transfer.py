"""Live state for ranks that lack it: from every rank that has it, straight into the receiver's own memory.

    source ──▶ structure, other values, small tensors in one piece ──┐
    source ──▶ large buffers                                         ├──▶ each rank that is behind
    giver i ─▶ stripe i of the large parameters and moments ─────────┘

All givers hold bitwise the same parameters and optimizer state, so each sends a stripe of the bytes. Buffers (the
statistics of a rank's own samples), and whatever is not a tensor, come from `source` alone. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ftnb.errors import CheckError
from ftnb.rank import cell, state
from ftnb.rank.collectives import Collectives, Message
from ftnb.rank.stripes import plan_stripes, split_messages

# Tensors below this size travel in one flat message: a message of its own costs about as much as copying so many bytes.
SMALL_BYTES = 256 * 1024
# The sections whose tensors the receiver must have as well; what else it lacks is created.
_MUST_MATCH = ("model", "buffers")



@dataclass(frozen=True)
class Roles:
    """Who gives and who takes, in ranks; `members[i]` has torch rank i."""

    members: Sequence[int]
    source: int
    behind: Sequence[int]

    @property
    def givers(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.behind]


# --- what there is to send


def whole_state(job: cell.Job) -> dict[str, Any]:
    """Everything that a rank which joins needs, as plain data and the live tensors themselves."""
    model = job.model.state_dict()
    return {
        "model": model,
        # Those that state_dict leaves out (persistent=False) belong to the step just as well.
        "buffers": {name: b for name, b in job.model.named_buffers() if name not in model},
        "optimizer": job.optimizer.state_dict(),
        "scheduler": cell.scheduler_state(job.scheduler) if job.scheduler is not None else None,
    }


@dataclass
class Manifest:
    """How the tensors of a state travel, by their number in its description."""

    striped: list[int] = field(default_factory=list)  # large, equal on all givers
    alone: list[int] = field(default_factory=list)  # large, from the source
    small: list[int] = field(default_factory=list)  # from the source, in one piece, in this order
    same_as: dict[int, int] = field(default_factory=dict)  # number of a tensor that is sent already: tied weights
    strides: dict[int, list[int]] = field(default_factory=dict)  # of the large ones, as their bytes lie in memory
    on_host: list[int] = field(default_factory=list)  # kept in host memory by the giver

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "same_as": [*self.same_as.items()], "strides": [*self.strides.items()]}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Manifest:
        return cls(**{**plain, "same_as": dict(plain["same_as"]), "strides": dict(plain["strides"])})


def make_manifest(tensors: Sequence[torch.Tensor], equal: set[int]) -> Manifest:
    """Sort the tensors; `equal` has the addresses of those that all givers hold alike."""
    manifest = Manifest()
    seen: dict[tuple[Any, ...], int] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel() and (first := seen.setdefault(identity(tensor), number)) != number:
            manifest.same_as[number] = first
            continue
        if tensor.device.type == "cpu":
            manifest.on_host.append(number)
        if tensor.nbytes < SMALL_BYTES:
            manifest.small.append(number)
            continue
        (manifest.striped if tensor.data_ptr() in equal else manifest.alone).append(number)
        manifest.strides[number] = _wire_strides(tensor)
    # Large elements first, so that each tensor starts at a multiple of its element size.
    manifest.small.sort(key=lambda number: (-tensors[number].element_size(), str(tensors[number].dtype), number))
    return manifest


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _wire_strides(tensor: torch.Tensor) -> list[int]:
    """The tensor's own strides if it fills its memory without gaps (channels_last, say), else contiguous ones."""
    if not tensor.is_contiguous() and _is_dense(tensor):
        return list(tensor.stride())
    return _contiguous_strides(tensor.shape)


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one block of memory, each place once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in the order of its memory, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _lies_as(tensor: torch.Tensor, strides: list[int]) -> bool:
    if strides == _contiguous_strides(tensor.shape):
        return tensor.is_contiguous()
    return list(tensor.stride()) == strides and _is_dense(tensor)


def _structure_digest(tensors: Sequence[Any], manifest: Manifest) -> int:
    """64 bits over types, shapes and strides of what is striped: equal on all givers, or the stripes do not fit."""
    striped = [[str(tensors[n].dtype), list(tensors[n].shape), manifest.strides[n]] for n in manifest.striped]
    return int.from_bytes(hashlib.sha256(json.dumps(striped).encode()).digest()[:8], "little", signed=True)


# --- giving


def give(job: cell.Job, collectives: Collectives, roles: Roles, rank: int, transport: torch.device) -> None:
    """Send this rank's part to everybody who is behind; `transport` is the device the backend sends from."""
    full = whole_state(job)
    description, tensors = state.take_apart(full)
    equal = {p.data_ptr() for p in job.model.parameters()}
    equal.update(t.data_ptr() for t in state.take_apart(full["optimizer"]["state"])[1])
    manifest = make_manifest(tensors, equal)
    letter = torch.zeros(0, dtype=torch.uint8)
    head_bytes = 0
    if rank == roles.source:
        head = json.dumps({"state": description, "manifest": manifest.to_json()}, separators=(",", ":")).encode()
        head_bytes = len(head)
        letter = pack(head, [tensors[n] for n in manifest.small], transport)
    digest = _structure_digest(tensors, manifest)
    announcement = torch.tensor([digest, head_bytes, letter.numel()], device=transport).view(torch.uint8)
    messages = [announcement, letter] if head_bytes else [announcement]
    if rank == roles.source:
        for number in manifest.alone:
            content = _sendable(tensors[number], manifest.strides[number], transport)
            messages += [content[p.start : p.stop] for p in split_messages(number, 0, content.numel())]
    stripes = plan_stripes([tensors[n].nbytes for n in manifest.striped], len(roles.givers))
    contents: dict[int, torch.Tensor] = {}
    for piece in stripes[roles.givers.index(rank)]:
        number = manifest.striped[piece.tensor]
        if number not in contents:
            contents[number] = _sendable(tensors[number], manifest.strides[number], transport)
        messages.append(contents[number][piece.start : piece.stop])
    takers = [roles.members.index(taker) for taker in roles.behind]
    collectives.exchange(sends=[(message, taker) for taker in takers for message in messages], receives=[])


def _sendable(tensor: torch.Tensor, strides: list[int], transport: torch.device) -> torch.Tensor:
    """Its bytes on the transport's device: the tensor's own memory wherever that is possible."""
    if not _lies_as(tensor, strides):
        tensor = tensor.contiguous()
    return _memory(tensor.to(transport))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def pack(head: bytes, small: Sequence[torch.Tensor], transport: torch.device) -> torch.Tensor:
    """The head and the small tensors in one flat message, ready to send."""
    letter = torch.empty(_padded(len(head)) + sum(t.nbytes for t in small), dtype=torch.uint8, device=transport)
    letter[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    offset = _padded(len(head))
    for dtype in dict.fromkeys(t.dtype for t in small):  # those of one type are neighbours
        same = [t.reshape(-1).to(transport) for t in small if t.dtype == dtype]
        size = sum(t.nbytes for t in same)
        if size:
            torch.cat(same, out=letter[offset : offset + size].view(dtype))
        offset += size
    return letter


def unpack(letter: torch.Tensor, head_bytes: int, small: Sequence[torch.Tensor]) -> None:
    """Overwrite the tensors with what `pack` put into the letter."""
    arrived, offset = [], _padded(head_bytes)
    for tensor in small:
        arrived.append(letter[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        offset += tensor.nbytes
    for dtype in dict.fromkeys(t.dtype for t in small):
        torch._foreach_copy_(
            [t for t in small if t.dtype == dtype], [t for t in arrived if t.dtype == dtype]
        )


# --- taking


def take(
    job: cell.Job, collectives: Collectives, roles: Roles, transport: torch.device, overwriting: Callable[[], None]
) -> None:
    """Receive the state and put it into the job. `overwriting` is called before the first byte of it changes.

    Whatever is raised after that leaves the job with a mixture of two states.
    """
    own = whole_state(job)
    own_parts = state.take_apart(own)  # while the givers do the same
    source = roles.members.index(roles.source)
    givers = [roles.members.index(rank) for rank in roles.givers]
    announced = [torch.zeros(3, dtype=torch.int64, device=transport) for _ in givers]
    collectives.exchange(sends=[], receives=[(a.view(torch.uint8), peer) for a, peer in zip(announced, givers)])
    digests, head_lengths, letter_lengths = zip(*(a.tolist() for a in announced))
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in zip(roles.givers, digests) if digest != digests[givers.index(source)])
        raise CheckError(
            f"Rank {other} and rank {roles.source} hold parameters or optimizer state of different shapes, so no rank "
            "can join them. Make the model and the optimizer independent of the rank."
        )
    letter = torch.empty(max(letter_lengths), dtype=torch.uint8, device=transport)
    collectives.exchange(sends=[], receives=[(letter, source)])
    head = json.loads(letter[: max(head_lengths)].cpu().numpy().tobytes())
    manifest = Manifest.from_json(head["manifest"])
    into = _Receiver(job, own, own_parts, head["state"], manifest, roles.source, transport)
    if manifest.striped or manifest.alone:
        overwriting()
        receives = into.receives(source, givers)
        collectives.exchange(sends=[], receives=receives)
    # Without large tensors nothing has been touched up to here, and a transfer that breaks off does no harm.
    overwriting()
    into.finish(letter, max(head_lengths))


class _Receiver:
    """The receiver's side of one state: where each tensor goes, and how it gets into the job."""

    def __init__(
        self, job: cell.Job, own_state: dict[str, Any], own_parts: tuple[Any, list[torch.Tensor]], description: Any,
        manifest: Manifest, source: int, transport: torch.device,
    ) -> None:  # fmt: skip
        self._job, self._description, self._manifest, self._transport = job, description, manifest, transport
        self._own = own_state
        own_description, own_tensors = own_parts
        given, own = state.tensor_places(description), state.tensor_places(own_description)
        if difference := first_difference(given, own) or self._other_groups():
            raise CheckError(
                f"The state of rank {source} does not fit this rank: {difference}. The cell must define the same model "
                "and optimizer on every rank, whenever it runs."
            )
        self._tensors = self._targets(given, {place: own_tensors[leaf.number] for place, leaf in own.items()})
        self._staged: list[tuple[int, torch.Tensor]] = []  # large tensors that cannot be received in place

    def _other_groups(self) -> str | None:
        """The optimizer's groups are checked by torch as well, but only when half of the state is overwritten."""
        blank = state.put_together(self._description, [None] * len(state.tensor_specs(self._description)))
        there = [len(group["params"]) for group in blank["optimizer"]["param_groups"]]
        here = [len(group["params"]) for group in self._job.optimizer.param_groups]
        if there != here:
            return f"the optimizer's groups hold {there} parameters there and {here} here"
        if (blank["scheduler"] is None) != (self._job.scheduler is None):
            return f"only {'this rank' if blank['scheduler'] is None else 'the other'} has a `scheduler`"
        return None

    def _targets(self, given: dict[Any, state.Leaf], own: dict[Any, torch.Tensor]) -> list[torch.Tensor]:
        """For each tensor number: this rank's own tensor where it has one that fits, else a new one."""
        targets: dict[int, torch.Tensor] = {}
        taken: set[tuple[Any, ...]] = set()
        for place, leaf in given.items():
            mine = own.get(place)
            if leaf.number in self._manifest.same_as or mine is None:
                continue
            if mine.dtype == leaf.dtype and list(mine.shape) == leaf.shape and is_writable(mine):
                # Two tensors there that are one here: they would overwrite each other.
                if mine.numel() and identity(mine) in taken:
                    continue
                taken.add(identity(mine))
                targets[leaf.number] = mine
        on_host = set(self._manifest.on_host)
        for number, (dtype, shape) in state.tensor_specs(self._description).items():
            if number not in targets and number not in self._manifest.same_as:
                strides = self._manifest.strides.get(number) or _contiguous_strides(shape)
                device = torch.device("cpu") if number in on_host else self._job.device
                targets[number] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for number, first in self._manifest.same_as.items():
            targets[number] = targets[first]
        return [targets[number] for number in range(len(targets))]

    def receives(self, source: int, givers: Sequence[int]) -> list[Message]:
        """Where the large messages go, for each peer in the order in which it sends."""
        contents = {n: self._content(n) for n in [*self._manifest.alone, *self._manifest.striped]}
        messages = [
            (contents[n][p.start : p.stop], source)
            for n in self._manifest.alone for p in split_messages(n, 0, contents[n].numel())
        ]  # fmt: skip
        striped = [contents[n] for n in self._manifest.striped]
        for peer, pieces in zip(givers, plan_stripes([c.numel() for c in striped], len(givers))):
            messages += [(striped[p.tensor][p.start : p.stop], peer) for p in pieces]
        return messages

    def _content(self, number: int) -> torch.Tensor:
        target, strides = self._tensors[number], self._manifest.strides[number]
        if target.device.type == self._transport.type and _lies_as(target, strides):
            return _memory(target)
        stage = torch.empty_strided(target.shape, strides, dtype=target.dtype, device=self._transport)
        self._staged.append((number, stage))
        return _memory(stage)

    def finish(self, letter: torch.Tensor, head_bytes: int) -> None:
        """Everything has arrived: fill in the small tensors, and load what is not in place yet."""
        with torch.no_grad():
            for number, stage in self._staged:
                self._tensors[number].copy_(stage)
            unpack(letter, head_bytes, [self._tensors[number] for number in self._manifest.small])
        load(self._job, state.put_together(self._description, self._tensors), self._own)


def load(job: cell.Job, full: dict[str, Any], own: dict[str, Any]) -> None:
    """Let the job take over a whole state. `own`: its `whole_state` up to now, whose tensors are filled already."""
    # Parameters and buffers are their own source now, and copying those costs nothing. What this call is for:
    # get_extra_state, and modules that do something of their own when they are loaded.
    model = OrderedDict(full["model"])
    model._metadata = getattr(own["model"], "_metadata", None)
    job.model.load_state_dict(model)
    _load_optimizer(job.optimizer, full["optimizer"])
    if job.scheduler is not None:
        job.scheduler.load_state_dict(full["scheduler"])


def is_writable(tensor: torch.Tensor) -> bool:
    return all(stride or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape))  # not an expanded one


def _load_optimizer(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Like load_state_dict, but every value keeps the type that the givers hold it in.

    torch converts state to the type of its parameter: float32 moments of bfloat16 parameters would come out rounded.
    """
    optimizer.load_state_dict(given)
    loaded = optimizer.state_dict()["state"]
    for index, values in given["state"].items():
        for name, value in values.items() if isinstance(values, dict) else ():
            mine = loaded.get(index, {}).get(name)
            if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor) and mine.dtype != value.dtype:
                loaded[index][name] = value.to(mine.device)


def first_difference(given: dict[Any, state.Leaf], own: dict[Any, state.Leaf]) -> str | None:
    """The first of the model's tensors that giver and receiver do not have alike, in words; None if there is none."""
    there, here = (
        {place: leaf for place, leaf in places.items() if place[0] in _MUST_MATCH and len(place) == 2}
        for places in (given, own)
    )
    for place, leaf in there.items():
        name = f"the model's `{place[1]}`"
        mine = here.get(place)
        if mine is None:
            return f"{name} ({leaf.dtype}, {leaf.shape}) is not in the model here"
        if (mine.dtype, mine.shape) != (leaf.dtype, leaf.shape):
            return f"{name} is {leaf.dtype} {leaf.shape} there and {mine.dtype} {mine.shape} here"
    for place in here:
        if place not in there:
            return f"the model's `{place[1]}` is not in the model there"
    return None
