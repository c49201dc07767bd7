"""The registered operators' library, and the collectives that gradients need, as operators of it."""

import torch

from tileweave.fabric import group_size, named_fabric

LIBRARY = torch.library.Library("tileweave", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag,)

LIBRARY.define("all_gather_rows(Tensor x, str group_name) -> Tensor", tags=TAGS)


@torch.library.impl(LIBRARY, "all_gather_rows", "CompositeExplicitAutograd")
def _all_gather_rows(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return named_fabric(group_name, x.device).all_gather(x)


@torch.library.register_fake("tileweave::all_gather_rows", lib=LIBRARY)
def _all_gather_rows_fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty(x.shape[0] * group_size(group_name), *x.shape[1:])


def _no_second_derivative(ctx, grad):
    raise NotImplementedError(
        "tileweave: the gradient of a fused op was differentiated again; second derivatives are not supported"
    )


torch.library.register_autograd("tileweave::all_gather_rows", _no_second_derivative, lib=LIBRARY)


def all_gather_rows(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """The `x` [rows, ...] of all ranks of a group in rank order: a new tensor [world * rows, ...]. Collective.

    A registered operator, so that torch.compile can hold it. NotImplementedError where it is differentiated.
    """
    return torch.ops.tileweave.all_gather_rows.default(x, group_name)
