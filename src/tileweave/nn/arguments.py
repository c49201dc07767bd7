"""Arguments of modules held to their rules: each error names the module or function, the argument and the rule."""

from typing import Any

import torch
from torch import nn

from tileweave.fabric.arguments import whole_number


def size(module: nn.Module, name: str, value: Any) -> int:
    """`value` as a size, from 0 up. TypeError if it is no whole number, ValueError if it is negative."""
    return whole_number(f"{type(module).__name__}: {name}", value, 0, "a size from 0 up")


def check_tensor(module: nn.Module, x: Any) -> None:
    """TypeError unless `x`, the input of a module, is a dense tensor."""
    if not isinstance(x, torch.Tensor) or x.is_nested:
        got = "a nested one" if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{type(module).__name__}: input must be a dense torch.Tensor, got {got}")


def check_module(function: str, name: str, module: Any) -> None:
    """TypeError unless the argument `name` of a function is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{function}: {name} must be a torch.nn.Module, got {type(module).__name__}")
