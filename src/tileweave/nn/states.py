"""Whole state dicts of split models, and the gradients of what is not split."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tileweave.nn.arguments import check_module
from tileweave.nn.moe import MoE
from tileweave.nn.shard import SAVES_WHOLE, ParallelLinear
from tileweave.ops.collectives import all_reduce


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with the whole weights of its parallel layers, as the model had them before `parallelize`,
    and of its `MoE` those of all experts.

    Collective: all ranks of the layers' groups call it. Each gets all of the weights, the split ones in new tensors.

    A rank's own `module.state_dict()` has parts under the names of wholes. Save each rank's to a file of its own:
    torch.distributed.checkpoint would take them for one tensor that all ranks have.
    """
    check_module("full_state_dict", "module", module)
    token = SAVES_WHOLE.set(True)
    try:
        return module.state_dict()
    finally:
        SAVES_WHOLE.reset(token)


def reduce_gradients(module: nn.Module) -> None:
    """Sum over the ranks the gradients of the parameters that all ranks have whole, in place. Collective.

    For models with sequence-parallel layers or `MoE`, between the backward pass (the last one, where several accumulate
    gradients) and the optimizer's step. There norms, embeddings, routers, and biases of row-parallel layers are the
    same on all ranks, but each rank's gradient comes from its own tokens. The loss of a rank is its tokens' share of
    the whole loss: a sum divided by the number of all tokens. Gradients of split weights, experts' too, are complete
    after the backward pass.

    The ranks are those of the group of the module's parallel layers. Where none of these is sequence parallel, nor MoE,
    every gradient is complete, and nothing is done. Parameters without a gradient are left out, the same on all ranks.

    ValueError: the layers whose ranks have tokens of their own have several groups, or only some layers are such.
    """
    check_module("reduce_gradients", "module", module)
    layers = [layer for layer in module.modules() if isinstance(layer, ParallelLinear | MoE)]
    split = {id(getattr(layer, name)) for layer in layers for name in layer.SPLIT}
    own = [layer for layer in layers if isinstance(layer, MoE) or layer.sequence_parallel]  # each rank its own tokens
    if own and len(own) < len(layers):
        raise ValueError(
            "module: its parallel layers must all be sequence parallel, or none, and MoE always is: it cannot be "
            "told which norms see tokens of one rank and which see all; call it for each part"
        )
    groups = [layer.group for layer in own if layer.world_size > 1]
    if not groups:
        return
    if any(group != groups[0] for group in groups):
        raise ValueError(
            "module: its sequence-parallel layers and MoE must have one group; call it for each part that has one"
        )
    grads: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in module.parameters():
        if parameter.grad is not None and id(parameter) not in split:
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad  # of FSDP: this rank's shard of it
            grads.setdefault(local.dtype, []).append(local)
    for same in grads.values():
        total = all_reduce(torch.cat([grad.flatten() for grad in same]), groups[0])
        for grad, part in zip(same, total.split([grad.numel() for grad in same]), strict=True):
            grad.copy_(part.view(grad.shape))
