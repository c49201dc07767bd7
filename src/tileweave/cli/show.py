"""How the results of `tileweave run` and `tileweave doctor` read in a terminal."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from tileweave.cli.environment import program
from tileweave.cli.ops import OPS
from tileweave.cli.problem import LARGEST_SEED

RAN_AS = {
    "emulated": "emulated ranks on the CPU: the device code itself, tile by tile",
    "virtual": "virtual ranks on one GPU, a stream and a share of the SMs each",
    "processes": "one process and one GPU per rank",
    "nodes": "calls inside each node, what goes between them by torch.distributed",
}
WITHOUT = {"emulated": ": no kernel ran, so none was checked", "virtual": ": no fused kernel"}


def report(console: Console, result: dict[str, Any]) -> None:
    """Print what `run_job` returned, and what to try next."""
    ranks, sizes = result["ranks"], " ".join(f"{name}={size}" for name, size in result["shape"].items())
    per_rank = f"{' @ '.join(map(str, result['operands']))} -> {result['result']}"
    options = "".join(f", {name}" for name in ("deterministic", "bias") if result[name])
    console.print(f"[bold]{result['op']}[/], {ranks} rank{'s' * (ranks != 1)}, {result['dtype']}{options}")
    rows = {
        "problem": f"{sizes}; per rank {per_rank}",
        "ran as": f"{ran_as(result)}; {result['calls']} calls, fresh data each, seed {result['seed']}",
        "plan": plan_line(result),
        "reason": result["reason"],
        "result": verdict(result),
        "seconds": f"{result['seconds']:.2f}",
    }
    for name, text in rows.items():
        wrong = name == "result" and not result["ok"]
        console.print(f"  [cyan]{name:<8}[/] {escape(text)}", style="red" if wrong else None)
    console.print("try next")
    steps = next_steps(result)
    width = max(len(command) for command, _ in steps)
    for command, purpose in steps:
        console.print(f"  {escape(command):<{width}}  [dim]{escape(purpose)}[/]")


def ran_as(result: dict[str, Any]) -> str:
    """What computed the result."""
    if result["backend"] != "fallback":
        return RAN_AS[result["backend"]]
    op, world = OPS[result["op"]], result["world"]
    if result["ranks"] == 1:
        return op.alone
    return op.between if world == "processes" else op.within.format(world) + WITHOUT[world]


def plan_line(result: dict[str, Any]) -> str:
    """The plan in one line; says so where there is none."""
    plan = result["plan"]
    if plan is None:
        return "none: a collective has but one way" if result["fused"] else "none: no fused kernel"
    tile = "x".join(str(size) for size in plan["tile"])
    line = f"{plan['mechanism']}, {plan['schedule']}, tile {tile}, {plan['stages']} stages"
    if plan["comm_sms"]:
        line += f", {plan['comm_sms']} communicator SMs"
    predicted = plan["predicted_us"]
    return line if predicted is None else f"{line}; the cost model says {predicted:.1f} us on an H200"


def verdict(result: dict[str, Any]) -> str:
    """Right or wrong, with the error and what was allowed."""
    error = "not a number" if result["rel_error"] is None else f"{result['rel_error']:.1e}"
    word = "right" if result["ok"] else "WRONG"
    return f"{word}: relative error {error} against float32, tolerance {result['tolerance']:.1e}"


def next_steps(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Commands worth running after this one, each with what it shows."""
    run = f"{program()} run {result['op']}"
    steps = []
    if result["ranks"] == 1 and not OPS[result["op"]].local:
        steps.append((f"{run} --ranks 4", "ranks that send each other their tiles"))
    known = {"--deterministic": result["deterministic"] or result["ranks"] == 1, "--bias": result["bias"]}
    more = OPS[result["op"]].more
    steps += [(f"{run} {options}", purpose) for options, purpose in more if not known.get(options)]
    if result["backend"] == "emulated":
        steps.append((f"{run} --seed {(result['seed'] + 1) % (LARGEST_SEED + 1)}", "another schedule, other data"))
    steps.append((f"{program()} doctor", "what this machine can run"))
    return steps


def facts(console: Console, found: dict[str, Any]) -> None:
    """Print what `doctor.examine` returned."""

    def row(name: str, text: str) -> None:
        console.print(f"  [cyan]{name:<14}[/] {escape(text)}")

    console.print(f"[bold]tileweave {found['version']}[/] on {found['platform']}")
    for name in ("python", "torch", "triton", "nccl", "cuda_bindings"):
        row(name.replace("_", " "), found[name] or "not there")
    row("driver", driver_line(found))
    for gpu in found["gpus"]:
        size = f"{gpu['sms']} SMs, {gpu['memory_gib']} GiB"
        row(f"gpu {gpu['index']}", f"{gpu['name']}, compute capability {gpu['capability']}, {size}")
    if not found["gpus"]:
        row("gpus", "none")
    for index, reached in enumerate(found["peer_access"]):
        peers = [peer_text(found["peers"], index, peer) for peer, yes in enumerate(reached) if yes and peer != index]
        row(f"gpu {index} reaches", ", ".join(peers) or "no other GPU")
    row("nvlink", links_line(found["links"]))
    row("memory handles", handles_line(found["handles"]))
    row("multicast", multicast_line(found["multicast"]))
    console.print("worlds")
    for name, state in found["backends"].items():
        row(name, f"{'yes' if state['works'] else 'no':<3}  {state['reason']}")
    for advice in found["advice"]:
        console.print(f"to do: {escape(advice)}")


def driver_line(found: dict[str, Any]) -> str:
    """The driver's version and the CUDA that it supports."""
    if found["cuda_driver"] is None:
        return "not there"
    driver = found["driver"]
    return f"{driver['version'] or unknown(driver)}, supports {found['cuda_driver']}"


def peer_text(peers: dict[str, Any], gpu: int, peer: int) -> str:
    """A GPU that another one reaches, and what the driver says of the link between them."""
    if peers["why"]:
        return f"gpu {peer} (link {unknown(peers)})"
    atomics = "native atomics" if peers["native_atomics"][gpu][peer] else "no native atomics"
    return f"gpu {peer} ({atomics}, performance rank {peers['performance_rank'][gpu][peer]})"


def links_line(links: dict[str, Any]) -> str:
    """Active NVLink links of each GPU and what they carry."""
    if links["why"]:
        return unknown(links)
    each = enumerate(zip(links["nvlinks"], links["gb_per_s"], strict=True))
    return "; ".join(f"gpu {gpu}: {count} links, {speed:g} GB/s each way" for gpu, (count, speed) in each)


def handles_line(handles: dict[str, Any]) -> str:
    """As what the GPUs' memory can be exported to other processes."""
    if handles["why"]:
        return unknown(handles)
    return f"file descriptor: {of_all(handles['posix_fd'])}; fabric handle: {of_all(handles['fabric'])}, not needed"


def multicast_line(multicast: dict[str, Any]) -> str:
    """Whether NVLink multicast is offered, and whether it is allowed."""
    offered = unknown(multicast) if multicast["why"] else of_all(multicast["offered"])
    allowed = "yes" if multicast["allowed"] else "no"
    return f"offered: {offered}; allowed: {allowed}, {multicast['reason']}"


def of_all(each: list[bool]) -> str:
    """yes, no, or which GPUs do."""
    if len(set(each)) == 1:
        return "yes" if each[0] else "no"
    return f"only gpu {', '.join(str(gpu) for gpu, yes in enumerate(each) if yes)}"


def unknown(fact: dict[str, Any]) -> str:
    """For a fact that could not be read: why."""
    return f"unknown: {fact['why']}"
