"""A `torch.nn.Linear` of which each rank holds a part: sizes, initial values, state dicts, copies."""

import copy
from contextvars import ContextVar
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn

from tileweave.fabric import Group, VirtualGroup, fabric_of
from tileweave.fabric.names import resolve_group
from tileweave.nn.arguments import size

SAVES_WHOLE: ContextVar[bool] = ContextVar("SAVES_WHOLE", default=False)  # whether state_dict gathers; one per thread


class ParallelLinear(nn.Module):
    """What the column- and the row-parallel layer have in common; not to be used itself.

    `in_features`, `out_features` are those of the whole layer; `weight` and `bias` plain parameters, this rank's part.
    """

    SPLIT: ClassVar[dict[str, int]]  # the parameters that are split, and the dimension of each
    SIZE: ClassVar[str]  # the size that is split

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        sequence_parallel: bool = True,
        sequence_dim: int = -2,
        max_sms: int | None = None,
        seed: int | None = None,
    ):
        super().__init__()
        self._check_options(
            bias=bias, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, max_sms=max_sms, seed=seed
        )
        self.in_features = size(self, "in_features", in_features)
        self.out_features = size(self, "out_features", out_features)
        self.group = resolve_group(group)
        self.rank, self.world_size = _place(self.group)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.max_sms, self.seed = max_sms, seed
        split, world = getattr(self, self.SIZE), self.world_size
        if split % world:
            near = f"{split - split % world} or {split - split % world + world}" if split > world else f"{world}"
            raise ValueError(
                f"{type(self).__name__}: {self.SIZE} = {split} is not divisible by the world size {world}; "
                f"{near} would be"
            )
        kind: dict[str, Any] = dict(device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.empty(self.part_shape("weight"), **kind))
        self.bias = nn.Parameter(torch.empty(self.part_shape("bias"), **kind)) if bias else None
        self.reset_parameters()

    def _check_options(self, **options: Any) -> None:
        """TypeError or ValueError for a value that forward would choke on."""
        name = type(self).__name__
        for word, value in options.items():
            if word in ("bias", "sequence_parallel", "regather"):
                if not isinstance(value, bool):
                    raise TypeError(f"{name}: {word} must be True or False, got {value!r}")
            elif (value is None and word == "sequence_dim") or not (value is None or type(value) is int):
                raise TypeError(
                    f"{name}: {word} must be an int{'' if word == 'sequence_dim' else ' or None'}, got {value!r}"
                )
            elif word == "max_sms" and value is not None and value < 1:
                raise ValueError(f"{name}: max_sms must be at least 1, or None for all, got {value}")

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Group = None, **options: Any) -> Self:
        """The layer that computes what `linear` does, with copies of this rank's part of its weights.

        linear: with the same weights on all ranks, on any device, "meta" included. Its hooks stay its own.
        options: the layer's keyword arguments.

        TypeError for what is no torch.nn.Linear, or has other than its plain parameters (weight norm, FSDP).
        """
        layer = cls.without_data(linear, group, **options)
        for name, whole in linear.named_parameters():
            part = layer.part(name, whole.detach()).clone(memory_format=torch.contiguous_format)
            setattr(layer, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        return layer.train(linear.training)

    @classmethod
    def without_data(cls, linear: nn.Linear, group: Group = None, **options: Any) -> Self:
        """What `from_linear` makes, but with parameters on the device "meta"."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{cls.__name__}: linear must be a torch.nn.Linear, got {type(linear).__name__}")
        kinds = {name: type(parameter) for name, parameter in linear.named_parameters()}
        if kinds not in ({"weight": nn.Parameter}, {"weight": nn.Parameter, "bias": nn.Parameter}):
            found = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
            raise TypeError(
                f"{cls.__name__}: linear must have a weight, and perhaps a bias, that are plain parameters, "
                f"got {found}; shard with FSDP, or change weights, afterwards"
            )
        has_bias = linear.bias is not None
        return cls(linear.in_features, linear.out_features, has_bias, device="meta", group=group, **options)

    def reset_parameters(self) -> None:
        """Draw the parameters anew: this rank's part of what a torch.nn.Linear of these sizes would draw.

        With `seed`, on the CPU from a generator of its own, as after torch.manual_seed(seed): the same on all ranks.
        Without, from PyTorch's generator of the weight's device: ranks have parts of one layer if theirs are in the
        same state, as they are in processes that call torch.manual_seed with one number.
        """
        if self.weight.is_meta:
            return
        device = self.weight.device if self.seed is None else torch.device("cpu")
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        bound = self.in_features**-0.5 if self.in_features else 0.0
        for name, parameter in self.named_parameters(recurse=False):
            whole = torch.empty(self.whole_shape(name), device=device, dtype=parameter.dtype)
            with torch.no_grad():
                if name == "bias":
                    whole.uniform_(-bound, bound, generator=generator)
                elif whole.numel():
                    nn.init.kaiming_uniform_(whole, a=5**0.5, generator=generator)
                parameter.copy_(self.part(name, whole))

    def whole_shape(self, name: str) -> list[int]:
        """The shape that a parameter has in torch.nn.Linear."""
        return [self.out_features, self.in_features] if name == "weight" else [self.out_features]

    def part_shape(self, name: str) -> list[int]:
        """The shape of this rank's part of a parameter."""
        shape = self.whole_shape(name)
        if name in self.SPLIT:
            shape[self.SPLIT[name]] //= self.world_size
        return shape

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole parameter, a view."""
        if name not in self.SPLIT:
            return whole
        dim = self.SPLIT[name]
        size = whole.shape[dim] // self.world_size
        return whole.narrow(dim, self.rank * size, size)

    def whole(self, name: str) -> torch.Tensor:
        """The whole of a parameter, gathered from all ranks: a new tensor. Collective."""
        part = getattr(self, name).detach()
        if self.world_size == 1 or name not in self.SPLIT:
            return part.clone()
        dim = self.SPLIT[name]
        rows = part.movedim(dim, 0).contiguous()
        return fabric_of(self.group, part.device).all_gather(rows).movedim(0, dim).contiguous()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if SAVES_WHOLE.get():
            for name in self.SPLIT:
                if prefix + name in destination:
                    destination[prefix + name] = self.whole(name)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        """Take this rank's part of what is whole, and parts as they are."""
        own = {key: x for key, x in state_dict.items() if key.startswith(prefix)}
        for name, parameter in self.named_parameters(recurse=False):
            key, whole, part = prefix + name, self.whole_shape(name), self.part_shape(name)
            given = list(own[key].shape) if key in own else part
            if given == part:
                continue
            if given == whole:
                own[key] = self.part(name, own[key]).clone(memory_format=torch.contiguous_format)
            else:
                legal = f"{whole}, the whole of it, or {part}, the part of one of {self.world_size} ranks"
                errors.append(f"{key} must be {legal}, got {given}")
                own[key] = parameter
        super()._load_from_state_dict(own, prefix, local_metadata, strict, missing, unexpected, errors)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the parameters in the same group, which cannot be copied."""
        memo[id(self.group)] = self.group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def extra_repr(self) -> str:
        """What print shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.rank} of {self.world_size}, sequence_parallel={self.sequence_parallel}"
        )


def _place(group: VirtualGroup | dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank in a resolved group, and the group's size."""
    if group is None:
        return 0, 1
    if isinstance(group, VirtualGroup):
        return group.rank, group.size()
    return dist.get_rank(group), group.size()
