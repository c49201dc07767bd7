"""`parallelize`: parallel layers in place of an existing model's linear ones."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from tileweave.fabric import Group
from tileweave.fabric.names import resolve_group
from tileweave.nn.arguments import check_module
from tileweave.nn.layers import ColumnParallelLinear, RowParallelLinear
from tileweave.nn.shard import ParallelLinear

M = TypeVar("M", bound=nn.Module)
SHOWN = 20  # how many names an error lists


@dataclass(frozen=True)
class Column:
    """ "column" in a plan, with options; see `ColumnParallelLinear`."""

    sequence_parallel: bool = True
    sequence_dim: int = -2
    max_sms: int | None = None
    regather: bool = False


@dataclass(frozen=True)
class Row:
    """ "row" in a plan, with options; see `RowParallelLinear`."""

    sequence_parallel: bool = True
    sequence_dim: int = -2
    max_sms: int | None = None


Style = str | Column | Row
LAYERS: dict[type, type[ParallelLinear]] = {Column: ColumnParallelLinear, Row: RowParallelLinear}
SHORT: dict[str, Column | Row] = {"column": Column(), "row": Row()}


def parallelize(module: M, plan: Mapping[str, Style], group: Group = None) -> M:
    """Replace linear layers of `module` by parallel ones, in place, as torch.distributed.tensor.parallel does.

        parallelize(model, {"layers.*.attention.[qkv]": "column", "layers.*.attention.out": "row"}, group)

    Args:
        module: a model whose torch.nn.Linear have the same weights on all ranks, on any device; on "meta" they can be
            loaded later. Each rank has its own copy.
        plan: by the layers' names, "column", "row", or a `Column` or `Row` with options. In each part of a name between
            dots *, ? and [...] match as in file names. A name that several patterns match needs one style.
        group: as in `ColumnParallelLinear`.

    Returns:
        `module`. Its parallel layers hold copies of this rank's parts, and need a gradient where the layers did; make
        optimizers afterwards. What else of the model depends on the sizes is the model's: with sequence parallelism its
        input is a shard of the sequence, and a rank has heads / world heads, so write them as -1 in view. Several
        projections in one layer (a fused qkv) must become layers of their own first: a rank has a piece of the whole.
        Projections share a gather where the model calls `column_parallel`.

    Raises, before anything is replaced:
        TypeError, ValueError: a pattern matches no torch.nn.Linear; a name has two styles; a size is not divisible by
            the world size; a weight is tied to one of another module; a layer has hooks.
    """
    group = resolve_group(group)
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan: expected a dict of names and styles, got {type(plan).__name__}")
    check_module("parallelize", "module", module)
    styles = _styles(module, plan)
    _check_ties(module, styles)
    linears = {name: module.get_submodule(name) for name in styles}
    for name, style in styles.items():
        _layer(name, linears[name], style, group, dry=True)
    made: dict[int, ParallelLinear] = {}
    for name, linear in linears.items():
        if id(linear) not in made:
            made[id(linear)] = _layer(name, linear, styles[name], group)
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, made[id(linear)])
    return module


def _styles(module: nn.Module, plan: Mapping[str, Style]) -> dict[str, Column | Row]:
    """The style of each layer that the plan names, also of its other names where it has several."""
    modules = dict(module.named_modules(remove_duplicate=False))
    linears = [name for name, each in modules.items() if type(each) is nn.Linear and name]
    styles: dict[str, Column | Row] = {}
    for pattern, given in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(f"plan: its keys are names of layers, got {pattern!r}")
        style = SHORT.get(given) if isinstance(given, str) else given
        if not isinstance(style, Column | Row):
            raise ValueError(
                f"plan: the style of {pattern!r} must be 'column', 'row', Column(...) or Row(...), got {given!r}"
            )
        found = [name for name in linears if _matches(name, pattern)]
        if not found:
            raise ValueError(_nothing(pattern, modules, linears))
        same = {id(modules[name]) for name in found}
        for name in linears:
            if id(modules[name]) not in same:
                continue
            if styles.setdefault(name, style) != style:
                raise ValueError(f"plan: {name!r} has two styles, {styles[name]} and, by {pattern!r}, {style}")
    return styles


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _nothing(pattern: str, modules: dict[str, nn.Module], linears: list[str]) -> str:
    """Why a pattern matches nothing, and what there is, the likeliest first."""
    others = [f"{name} ({type(each).__name__})" for name, each in modules.items() if _matches(name, pattern)]
    why = f"matches {', '.join(others[:3])}, but no torch.nn.Linear" if others else "matches no module"
    near = difflib.get_close_matches(pattern, linears, SHOWN, 0.0)
    names = ", ".join(near) + (f" and {len(linears) - SHOWN} more" if len(linears) > SHOWN else "")
    return f"plan: {pattern!r} {why}; there is {names or 'no torch.nn.Linear at all'}"


def _check_ties(module: nn.Module, styles: Mapping[str, object]) -> None:
    """ValueError if a parameter of a layer to be split is also one of a module that is not, or is split differently."""
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, style in styles.items():
        linear = module.get_submodule(name)
        for key, parameter in linear.named_parameters(recurse=False):
            for other in owners[id(parameter)]:
                if module.get_submodule(other.rpartition(".")[0]) is not linear:
                    raise ValueError(
                        f"plan: {name}.{key} is tied to {other}; a split copy ({style}) would not be. Leave {name!r} "
                        "out, or untie them"
                    )


def _layer(name: str, linear: nn.Module, style: Column | Row, group: Group, dry: bool = False) -> ParallelLinear:
    """The layer in place of `linear`; dry: without its data, to see that it is possible. Errors begin with its name."""
    assert isinstance(linear, nn.Linear)
    hooks = [kind for kind, them in vars(linear).items() if "_hooks" in kind and isinstance(them, Mapping) and them]
    if hooks:
        raise ValueError(
            f"plan: {name} has hooks ({', '.join(hooks)}), which the layer in its place would not have; "
            "register them afterwards"
        )
    kind = LAYERS[type(style)]
    make = kind.without_data if dry else kind.from_linear
    try:
        return make(linear, group, **asdict(style))
    except (TypeError, ValueError) as error:
        raise type(error)(f"plan: {name}: {error}") from None
