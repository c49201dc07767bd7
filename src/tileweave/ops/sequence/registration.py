"""What the registration of an attention op with PyTorch comes to, whatever the op."""

from typing import Any

import torch
from torch.autograd import forward_ad

from tileweave.fabric import Fabric
from tileweave.ops.contract import operand_dtype
from tileweave.ops.descriptors import ALIGN
from tileweave.ops.library import LIBRARY

KINDS = 256  # kinds of calls that a channel remembers


def is_plain(*tensors: Any) -> bool:
    """Whether PyTorch's dispatcher would do nothing but call the operator's implementation."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    graded = torch.is_grad_enabled()
    return all(
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and not (graded and x.requires_grad)
        and x.layout is torch.strided
        and operand_dtype(x) == x.dtype
        for x in tensors
    )


def kind(x: torch.Tensor) -> tuple | None:
    """All that a prepared launch depends on in a tensor; None of what is no tensor."""
    return (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGN) if isinstance(x, torch.Tensor) else None


def recall(fabric: Fabric, name: str, kinds: tuple, q: Any) -> tuple | None:
    """(agreement, prepared launch) of an earlier call of the same kind; None if there was none, or while capturing, as
    the channel has to be told."""
    remembered = fabric.views(name)
    try:
        known = remembered.get(kinds) if remembered else None
    except TypeError:  # an option of a kind that cannot be remembered, nor be right
        return None
    return None if known is not None and q.is_cuda and torch.cuda.is_current_stream_capturing() else known


def remember(fabric: Fabric, name: str, kinds: tuple, agreement: Any, prepared: Any) -> None:
    """Keep what later calls of the kind need; nothing if `prepared` is None."""
    remembered = fabric.views(name)
    if prepared is not None and remembered is not None:
        if len(remembered) == KINDS:
            remembered.clear()
        remembered[kinds] = agreement, prepared


def refuse_transforms(name: str, *tensors: torch.Tensor) -> None:
    """NotImplementedError where a derivative is asked for that would silently be missing."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{name} has no forward-mode derivative; its gradients are those of backward()")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            f"{name} has no rules for torch.func transforms; its gradients are those of backward()"
        )


def below_autograd(operator: Any, keys: Any, *args: Any) -> Any:
    """Go on to what comes after autograd: a tracer, or the implementation."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)


def register_backward(name: str, operator: Any) -> None:
    """Let the operator of a backward pass refuse gradients of its own, which would silently be missing."""

    def autograd(keys, *args):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise NotImplementedError(
                f"{name.removesuffix('_backward')} has no second derivatives; call backward() without create_graph"
            )
        return below_autograd(operator, keys, *args)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)


def register_autocast(name: str, operator: Any) -> None:
    """Under autocast, cast q, k and v as those of scaled_dot_product_attention are cast, then call the operator."""

    def register(device: str) -> None:
        key = f"Autocast{device.upper()}"
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def cast(q, k, v, *options):
            q, k, v = (x.to(operand_dtype(x)) for x in (q, k, v))
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(q, k, v, *options)

        LIBRARY.impl(name, cast, key)

    for device in ("cpu", "cuda"):
        register(device)
