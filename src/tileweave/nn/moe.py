"""A layer of experts, divided over the ranks of a group."""

import copy
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from tileweave.fabric import Group, fabric_of
from tileweave.fabric.names import resolve_group
from tileweave.nn.arguments import check_tensor, size
from tileweave.nn.shard import SAVES_WHOLE, _place
from tileweave.ops.moe import Experts, moe_dispatch_matmul, moe_matmul_combine


class MoE(nn.Module):
    """y = the sum over a token's k experts of p * (silu(x @ gate_e) * (x @ up_e)) @ down_e, experts split over ranks.

    Args:
        features, hidden: size of a token and of an expert's inner layer.
        experts, k: how many experts in all, at least one for each rank, and how many of them a token goes to.
        group: a ProcessGroup, a 1-D DeviceMesh, the group that `virtual_world` hands out, or None: the thread's virtual
            world, else torch.distributed's WORLD, else a world of one.
        normalize: whether the k probabilities of a token are divided by their sum.
        capacity, max_tokens: as in `moe_dispatch_matmul`.
        seed: what the initial weights are drawn from, on the CPU: the same whatever the world's size. None: PyTorch's
            generator, which must be in the same state on all ranks.

    Shapes: [..., features] -> [..., features]; each rank has tokens of its own, as many as it likes. `router` is
    [experts, features], the same on all ranks, `gate` and `up` [E_local, features, hidden], `down` [E_local, hidden,
    features]: this rank's experts, consecutive ones, as torch.tensor_split divides them. state_dict() has these parts
    (`full_state_dict` the whole); load_state_dict takes such parts, or the whole of all experts.

    The gradients of gate, up and down are complete after the backward pass, that of `router` is of this rank's tokens,
    as those of other weights that all ranks have: `reduce_gradients` sums them. Forward and backward passes are
    collective.
    After a forward pass `route` says where its tokens went.

    Raises:
        ValueError: fewer experts than ranks, k not from 1 to `experts`. And whatever the ops raise.
    """

    SPLIT = ("gate", "up", "down")

    def __init__(
        self,
        features: int,
        hidden: int,
        experts: int,
        k: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        normalize: bool = True,
        capacity: int | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
    ):
        super().__init__()
        self.features, self.hidden = size(self, "features", features), size(self, "hidden", hidden)
        self.experts, self.k = experts, k = size(self, "experts", experts), size(self, "k", k)
        if seed is not None and type(seed) is not int:
            raise TypeError(f"MoE: seed must be an int or None, got {seed!r}")
        self.normalize, self.capacity, self.max_tokens, self.seed = normalize, capacity, max_tokens, seed
        self.group = resolve_group(group)
        self.rank, self.world_size = _place(self.group)
        if experts < self.world_size:
            raise ValueError(f"MoE: experts must be at least one for each of {self.world_size} ranks, got {experts}")
        if not 1 <= k <= experts:
            raise ValueError(f"MoE: k must be from 1 to {experts}, the number of experts, got {k}")
        self.first, self.end = Experts(experts, self.world_size).of(self.rank)
        kind: dict[str, Any] = dict(device=device, dtype=dtype)
        own = self.end - self.first
        self.router = nn.Parameter(torch.empty(experts, features, **kind))
        self.gate = nn.Parameter(torch.empty(own, features, hidden, **kind))
        self.up = nn.Parameter(torch.empty(own, features, hidden, **kind))
        self.down = nn.Parameter(torch.empty(own, hidden, features, **kind))
        self.route: Any = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters anew, uniform as torch.nn.Linear's: all experts' are drawn, this rank's kept."""
        if self.router.is_meta:
            return
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        device = self.router.device if self.seed is None else torch.device("cpu")
        for name, inner in (
            ("router", self.features),
            ("gate", self.features),
            ("up", self.features),
            ("down", self.hidden),
        ):
            parameter = getattr(self, name)
            for expert in range(self.experts if name in self.SPLIT else 1):
                shape = parameter.shape[1:] if name in self.SPLIT else parameter.shape
                whole = torch.empty(shape, device=device, dtype=parameter.dtype)
                whole.uniform_(-(inner**-0.5), inner**-0.5, generator=generator)
                if name not in self.SPLIT:
                    parameter.copy_(whole)
                elif self.first <= expert < self.end:
                    parameter[expert - self.first].copy_(whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        check_tensor(self, x)
        if not x.dim() or x.shape[-1] != self.features:
            raise ValueError(f"MoE: input must be [..., {self.features}], got {list(x.shape)}")
        tokens = x.reshape(-1, self.features)
        probabilities = F.softmax(F.linear(tokens, self.router).float(), -1)
        weight, index = probabilities.topk(self.k, -1)
        if self.normalize:
            weight = weight / weight.sum(-1, keepdim=True)
        h, self.route = moe_dispatch_matmul(
            tokens,
            index,
            self.up,
            self.group,
            topk_weight=weight,
            w_gate=self.gate,
            experts=self.experts,
            capacity=self.capacity,
            max_tokens=self.max_tokens,
        )
        return moe_matmul_combine(h, self.down, self.route, self.group).view(x.shape)

    def whole(self, name: str) -> torch.Tensor:
        """The whole of a parameter, all experts of all ranks: a new tensor. Collective."""
        part = getattr(self, name).detach()
        if self.world_size == 1 or name not in self.SPLIT:
            return part.clone()
        experts = Experts(self.experts, self.world_size)
        padded = part.new_zeros(experts.most, *part.shape[1:])  # ranks may have one expert more than others
        padded[: part.shape[0]] = part
        of_rank = fabric_of(self.group, part.device).all_gather(padded).split(experts.most)
        ends = [experts.of(rank) for rank in range(self.world_size)]
        return torch.cat([each[: end - first] for each, (first, end) in zip(of_rank, ends, strict=True)])

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if SAVES_WHOLE.get():
            for name in self.SPLIT:
                destination[prefix + name] = self.whole(name)

    def _load_from_state_dict(self, state_dict, prefix, *others):
        """Take this rank's part of what is whole, and parts as they are."""
        own = {key: x for key, x in state_dict.items() if key.startswith(prefix)}
        for name in self.SPLIT:
            given = own.get(prefix + name)
            if given is not None and given.shape[0] == self.experts:
                own[prefix + name] = given[self.first : self.end]
        super()._load_from_state_dict(own, prefix, *others)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the parameters in the same group, which cannot be copied; without a route."""
        memo[id(self.group)] = self.group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({**self.__dict__, "route": None}, memo))
        return twin

    def extra_repr(self) -> str:
        """What print shows."""
        return (
            f"features={self.features}, hidden={self.hidden}, experts={self.experts}, k={self.k}, "
            f"rank={self.rank} of {self.world_size}"
        )
