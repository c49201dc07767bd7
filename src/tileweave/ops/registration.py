"""What stands between a call and its kernel, whatever the op: whether PyTorch's dispatcher is needed, what it meets on
its way to the implementation, and what a channel remembers of earlier calls."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad

from tileweave.fabric import Fabric
from tileweave.ops.contract import operand_dtype
from tileweave.ops.descriptors import ALIGN
from tileweave.ops.library import LIBRARY
from tileweave.planner import Plan

KINDS = 256  # kinds of calls that a channel remembers
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_read = lru_cache(Plan.from_json)


def is_plain(first: Any, *others: Any) -> bool:
    """Whether PyTorch's dispatcher would do nothing but call its implementation; `others` may be None.

    It comes to it through two kernels in Python, which takes as long as all the rest of a warm call but the launch.
    """
    if (
        first is None
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    casts = torch._C._is_any_autocast_enabled()
    for x in (first, *others):
        if x is not None and (
            type(x) not in _PLAIN
            or (x.requires_grad and torch.is_grad_enabled())
            or x.layout is not torch.strided
            or x.is_nested
            or (casts and operand_dtype(x) != x.dtype)
        ):
            return False
    return True


def read_plan(text: str) -> Plan | None:
    """An operator's `plan`: a Plan as JSON, or "" for the planner's."""
    return _read(text) if text else None


def read_max_sms(name: str, max_sms: int) -> int | None:
    """An operator's `max_sms`, of which 0 stands for all; ValueError for a negative one."""
    if max_sms < 0:
        raise ValueError(f"{name}: max_sms must be at least 0, which stands for all, got {max_sms}")
    return max_sms or None


def kind(x: torch.Tensor | None) -> tuple | None:
    """All that a prepared launch depends on in a tensor; None of None."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGN)


@dataclass(slots=True)
class Unfused:
    """What is remembered of a call that no kernel of ours computes: how, and what it asks for."""

    compute: Callable[..., Any]
    call: Any

    def launch(self, fabric: Fabric, *operands: Any) -> Any:
        """Compute it on the current stream, as earlier calls of the kind."""
        return self.compute(fabric, self.call, *operands)


def recall(fabric: Fabric, channel: str, kinds: tuple, x: torch.Tensor) -> Any:
    """What an earlier call of the same kind has left to `remember`, once the ranks agree on the call; `x`: an operand.

    None if there was none, or while capturing, as the channel has to be told.
    """
    remembered = fabric.views(channel)
    try:
        known = remembered.get(kinds) if remembered else None
    except TypeError:  # an option of a kind that cannot be remembered, nor be right: see check_kinds
        return None
    if known is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    agreement, prepared = known
    if agreement is not None and fabric.compares:
        fabric.agree(agreement)
    return prepared


def remember(fabric: Fabric, channel: str, kinds: tuple, agreement: Any, prepared: Any) -> None:
    """Keep the `prepared` launch for later calls of the kind, if there is one. agreement: what `Fabric.agree` compares;
    None for a call that every rank makes as it likes."""
    remembered = fabric.views(channel)
    if prepared is not None and remembered is not None:
        if len(remembered) == KINDS:
            remembered.clear()
        remembered[kinds] = agreement, prepared


def refuse_forward_mode(name: str, *tensors: torch.Tensor | None) -> None:
    """NotImplementedError where a forward-mode derivative is asked for, which would silently be missing."""
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError(f"{name} has no forward-mode derivative; its gradients are those of backward()")


def refuse_transforms(name: str, *tensors: torch.Tensor | None) -> None:
    """NotImplementedError where any derivative is asked for that would silently be missing."""
    refuse_forward_mode(name, *tensors)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            f"{name} has no rules for torch.func transforms; its gradients are those of backward()"
        )


def wants_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of any of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def below_autograd(operator: Any, keys: Any, *args: Any) -> Any:
    """Go on to what comes after autograd: a tracer, or the implementation."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)


def register_backward(name: str, operator: Any) -> None:
    """Let the operator of a backward pass refuse gradients of its own, which would silently be missing."""

    def autograd(keys, *args):
        if wants_gradients(*(x for x in args if isinstance(x, torch.Tensor))):
            raise NotImplementedError(
                f"{name.removesuffix('_backward')} has no second derivatives; call backward() without create_graph"
            )
        return below_autograd(operator, keys, *args)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)


def register_autocast(name: str, operator: Any, *operands: int) -> None:
    """Under autocast, cast the arguments at the places `operands`, tensors, lists of them or None, as those of
    torch.matmul are cast, then call the operator."""

    def register(device: str) -> None:
        key = f"Autocast{device.upper()}"
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def cast(*args):
            given = list(args)
            for at in operands:
                given[at] = _as_operand(given[at])
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(*given)

        LIBRARY.impl(name, cast, key)

    for device in ("cpu", "cuda"):
        register(device)


def _as_operand(x: Any) -> Any:
    if isinstance(x, list):
        return [_as_operand(each) for each in x]
    return None if x is None else x.to(operand_dtype(x))
