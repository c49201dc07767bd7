"""The tests: what each must and must not show, and the section of the PTX ISA that says so.

Sections are those of the chapter "Memory Consistency Model", or of an instruction that is named.

An outcome is a tuple of the results named by `results`: "r0", "r0'" the two words that party 0 leaves (-1: not read),
"x", "y" the cells in the end, "tile" the least element of the tile in the end.
"""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

from tileweave.bench.litmus import async_kernel, kernel, other_kernel, tensor_kernel

Outcome = tuple[int, ...]
Outcomes = frozenset[Outcome]

CAUSALITY = "Axioms > Causality"
PER_LOCATION = "Axioms > Sequential Consistency Per Location"
STRONG = "Conflict and Data-races"
PATTERNS = "Release and Acquire Patterns"
ORDER = "Causality Order"
ASYNC_ORDER = "Program Order > Asynchronous Operations"
SYNCHRONIZATION = "Memory synchronization"
PROXY_ORDER = "Proxies; Causality Order (proxy-preserved)"
TMA_PROXY = "Asynchronous copy > Async Proxy"
BULK_WAIT = "cp.async.bulk.wait_group"
MBARRIER = "mbarrier > Phase of the mbarrier object"
WGMMA_PROXY = "wgmma > Async Proxy"
TENSOR = "tcgen05 > Memory Consistency Model"


@dataclass(frozen=True)
class Litmus:
    """A test: a kernel with constexprs `options`, by `parties` CTAs, of one rank or (`ranks`) of a rank each.

    `allowed`: all outcomes that PTX allows (None: it forbids none, the accesses race). `never`: the outcome that the
    rule is about, forbidden. `shown`: outcomes that the emulator shows. `finding`: what it reports instead, a regular
    expression; then `weak` is the outcome that the fault may have. `gpu`: whether it runs on a GPU: it ends there
    whatever happens, the compiler takes it, and it means the same with all parties on one. `world`: options of the
    emulated world; `copies`: what the copy engine writes beside the kernel, in order: "tile" (ones), "flag" 0.
    """

    name: str
    kernel: Any
    options: dict[str, Any]
    results: tuple[str, ...]
    section: str
    parties: int = 2
    allowed: Outcomes | None = None
    never: Outcome | None = None
    shown: Outcomes = frozenset()
    finding: str | None = None
    weak: Outcome | None = None
    ranks: bool = False
    gpu: bool = True
    world: dict[str, Any] = field(default_factory=dict)
    copies: tuple[str, ...] = ()


def one_of(*outcomes: Outcome) -> Outcomes:
    """A set of outcomes."""
    return frozenset(outcomes)


def any_of(*values: tuple[int, ...]) -> Outcomes:
    """All combinations of one of each of the values."""
    return frozenset(product(*values))


BITS = (0, 1)
TOLD = one_of((0, -1), (1, 1))  # nothing told and nothing read, or told and there
RACE = "race on global memory"


def message_passing(name: str, release: str, acquire: str, scope: str, finding: str | None, **more: Any) -> Litmus:
    """A variant of message passing; with a finding the data may be old."""
    options = dict(RELEASE=release, ACQUIRE=acquire, SCOPE=scope)
    expected: dict[str, Any] = (
        dict(finding=finding, weak=(1, 0)) if finding else dict(allowed=TOLD, never=(1, 0), shown=TOLD)
    )
    expected["section"] = PATTERNS if finding else f"{CAUSALITY}; {PATTERNS}"
    return Litmus(name, kernel.message_passing, options, ("r1", "r1'"), **{**expected, **more})


GENERIC = [
    message_passing("MP release, acquire", "release", "acquire", "gpu", None),
    message_passing("MP acq_rel both", "acq_rel", "acq_rel", "gpu", None),
    message_passing("MP relaxed write", "relaxed", "acquire", "gpu", f"{RACE}.*release at scope gpu"),
    message_passing("MP relaxed read", "release", "relaxed", "gpu", f"{RACE}.*acquired"),
    message_passing("MP at scope cta", "release", "acquire", "cta", RACE, section="Scope; Morally strong operations"),
    message_passing(
        "MP between ranks, sys", "release", "acquire", "sys", None, section=f"Scope; {CAUSALITY}", ranks=True
    ),
    message_passing(
        "MP between ranks, gpu", "release", "acquire", "gpu", RACE, section="Scope; Morally strong operations",
        ranks=True, gpu=False,
    ),
    Litmus(
        "MP of strong operations", kernel.message_passing_strong, dict(VOLATILE=False), ("r1", "r1'"),
        ORDER, allowed=any_of(BITS, BITS), shown=any_of(BITS, BITS), weak=(1, 0),
    ),
    Litmus(
        "MP of volatile loads", kernel.message_passing_strong, dict(VOLATILE=True), ("r1", "r1'"),
        "volatile Operation", allowed=any_of(BITS, BITS), shown=any_of(BITS, BITS), weak=(1, 0),
    ),
    Litmus(
        "signal, wait", kernel.message_passing_flag, dict(BARRIER=True), ("r1", "r1'"),
        f"{CAUSALITY}; {SYNCHRONIZATION}", allowed=one_of((1, 1)), never=(1, 0), shown=one_of((1, 1)), ranks=True,
    ),
    Litmus(
        "signal, wait, no barrier", kernel.message_passing_flag, dict(BARRIER=False), ("r1", "r1'"), SYNCHRONIZATION,
        finding=rf"{RACE}.*barrier\(\) of the partition", weak=(1, 0), ranks=True,
    ),
    Litmus(
        "SB relaxed", kernel.store_buffering, dict(RELEASE="relaxed", ACQUIRE="relaxed"), ("r0", "r1"), CAUSALITY,
        allowed=any_of(BITS, BITS), shown=any_of(BITS, BITS), weak=(0, 0),
    ),
    Litmus(
        "SB release, acquire", kernel.store_buffering, dict(RELEASE="release", ACQUIRE="acquire"), ("r0", "r1"),
        f"{CAUSALITY} (its Store Buffering test: only fence.sc forbids)",
        allowed=any_of(BITS, BITS), shown=any_of(BITS, BITS), weak=(0, 0),
    ),
    Litmus(
        "LB", kernel.load_buffering, dict(DEPENDS=False), ("r0", "r1"), "Axioms > No Thin Air",
        allowed=any_of(BITS, BITS), shown=one_of((0, 0), (0, 1), (1, 0)), weak=(1, 1),
    ),
    Litmus(
        "LB with dependencies", kernel.load_buffering, dict(DEPENDS=True), ("r0", "r1"), "Axioms > No Thin Air",
        allowed=one_of((0, 0)), never=(1, 1), shown=one_of((0, 0)),
    ),
    Litmus(
        "2+2W", kernel.two_writers, {}, ("x", "y"), "Coherence Order",
        allowed=any_of((1, 2), (1, 2)), shown=one_of((1, 2), (2, 1), (2, 2)), weak=(1, 1),
    ),
    *(
        Litmus(
            f"IRIW {sem}", kernel.independent_reads, dict(ACQUIRE=sem), ("r2", "r2'", "r3", "r3'"), CAUSALITY,
            parties=4, allowed=any_of(BITS, BITS, BITS, BITS), shown=one_of((1, 0, 1, 0), (1, 1, 1, 1)),
            weak=(1, 0, 1, 0),
        )
        for sem in ("relaxed", "acquire")
    ),
    *(
        Litmus(
            f"CoRR {name}", kernel.read_read, dict(VOLATILE=volatile), ("r1", "r1'"), PER_LOCATION,
            allowed=one_of((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)), never=(1, 0),
            shown=one_of((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)),
        )
        for name, volatile in (("relaxed", False), ("volatile", True))
    ),
    Litmus(
        "CoWR", kernel.write_read, {}, ("r0", "r1"), PER_LOCATION,
        allowed=one_of((1, 2), (2, 2), (1, 1)), never=(2, 1), shown=one_of((1, 2), (2, 2), (1, 1)),
    ),
    Litmus(
        "WRC", kernel.write_to_read_causality, dict(RELEASE="release"), ("r1", "r2", "r2'"), f"{CAUSALITY}; {ORDER}",
        parties=3, allowed=any_of(BITS, BITS, BITS) - one_of((1, 1, 0)), never=(1, 1, 0),
        shown=one_of((1, 1, 1), (0, 1, 0), (1, 0, 0)),
    ),
    Litmus(
        "WRC relaxed", kernel.write_to_read_causality, dict(RELEASE="relaxed"), ("r1", "r2", "r2'"), ORDER,
        parties=3, allowed=any_of(BITS, BITS, BITS), shown=one_of((1, 1, 0), (1, 1, 1)), weak=(1, 1, 0),
    ),
    Litmus(
        "ISA2", kernel.passed_on, dict(RELEASE="release"), ("r1", "r2", "r2'"), f"{ORDER} (cumulativity)",
        parties=3, allowed=one_of((0, 0, -1), (1, 0, -1), (1, 1, 1)), never=(1, 1, 0),
        shown=one_of((0, 0, -1), (1, 0, -1), (1, 1, 1)),
    ),
    Litmus(
        "ISA2 relaxed", kernel.passed_on, dict(RELEASE="relaxed"), ("r1", "r2", "r2'"), f"{ORDER} (cumulativity)",
        parties=3, finding=RACE, weak=(1, 1, 0),
    ),
    Litmus(
        "release sequence", kernel.release_sequence, {}, ("r2", "r2'"), "Observation Order", parties=3,
        allowed=one_of((0, -1), (1, 1), (2, -1), (3, 1)), never=(3, 0), shown=one_of((0, -1), (3, 1)),
    ),
    Litmus(
        "additions, gpu", kernel.additions, dict(SCOPE_0="gpu", SCOPE_1="gpu"), ("x",), "Axioms > Atomicity",
        allowed=one_of((2,)), never=(1,), shown=one_of((2,)),
    ),
    Litmus(
        "additions, cta and gpu", kernel.additions, dict(SCOPE_0="cta", SCOPE_1="gpu"), ("x",),
        "Axioms > Atomicity (Litmus Test 2)", finding=f"{RACE}.*a common scope", weak=(1,),
    ),
    Litmus(
        "tile, barrier, release", kernel.tile_passing, dict(BARRIER=True), ("r1", "r1'"),
        f"{SYNCHRONIZATION}; {ORDER} (cumulativity)", allowed=TOLD, never=(1, 0), shown=TOLD,
    ),
    Litmus(
        "tile, release", kernel.tile_passing, dict(BARRIER=False), ("r1", "r1'"), STRONG,
        finding=rf"{RACE}.*barrier\(\) of the partition", weak=(1, 0),
    ),
]  # fmt: skip

SHARED_RACE = "race on shared memory"


def alone(name: str, made: Any, options: dict, results: tuple[str, ...], section: str, **more: Any) -> Litmus:
    """A test of one CTA."""
    return Litmus(name, made, options, results, section, parties=1, **more)


ASYNC = [
    Litmus(
        "TMA store, store_wait, barrier, release", async_kernel.tma_publishes, dict(HOW="right"), ("r1", "r1'"),
        f"{BULK_WAIT}; {TMA_PROXY}", allowed=TOLD, never=(1, 0), shown=TOLD,
    ),
    Litmus(
        "TMA store, store_read_wait, release", async_kernel.tma_publishes, dict(HOW="read wait"), ("r1", "r1'"),
        f"{BULK_WAIT} (.read)", finding=f"{RACE}.*store_wait for the TMA store", weak=(1, 0),
    ),
    Litmus(
        "TMA store, store_wait, release", async_kernel.tma_publishes, dict(HOW="no barrier"), ("r1", "r1'"),
        f"{BULK_WAIT}: of the executing thread", finding=rf"{RACE}.*barrier\(\), by the partition that issued it",
        weak=(1, 0),
    ),
    Litmus(
        "acquire, proxy fence, TMA load", async_kernel.tma_takes, dict(FENCE=True), ("r1", "r1'"),
        PROXY_ORDER, allowed=TOLD, never=(1, 0), shown=TOLD,
    ),
    Litmus(
        "acquire, TMA load", async_kernel.tma_takes, dict(FENCE=False), ("r1", "r1'"), PROXY_ORDER,
        finding=f"{RACE}.*fence_proxy_async between", weak=(1, 0),
    ),
    alone(
        "load, proxy fence, TMA store", async_kernel.tma_overwrites, dict(FENCE=True), ("r0", "r0'"),
        PROXY_ORDER, allowed=one_of((0, 1)), never=(1, 1), shown=one_of((0, 1)),
    ),
    alone(
        "load, TMA store", async_kernel.tma_overwrites, dict(FENCE=False), ("r0", "r0'"), PROXY_ORDER,
        finding=f"{RACE}.*fence_proxy_async between", weak=(1, 1),
    ),
    alone(
        "buffer, proxy fence, TMA store", async_kernel.tma_reads_registers, dict(FENCE=True), ("r0",), TMA_PROXY,
        allowed=one_of((1,)), never=(0,), shown=one_of((1,)),
    ),
    alone(
        "buffer, TMA store", async_kernel.tma_reads_registers, dict(FENCE=False), ("r0",), TMA_PROXY,
        finding=f"{SHARED_RACE}.*fence_async_shared between", weak=(0,),
    ),
    alone(
        "TMA store, store_read_wait, buffer", async_kernel.tma_buffer_again, dict(WAIT=True), ("r0",),
        f"{BULK_WAIT} (.read)", allowed=one_of((1,)), never=(2,), shown=one_of((1,)),
    ),
    alone(
        "TMA store, buffer", async_kernel.tma_buffer_again, dict(WAIT=False), ("r0",), ASYNC_ORDER,
        finding=f"{SHARED_RACE}.*store_read_wait for the TMA store", weak=(2,),
    ),
    alone(
        "TMA load, mbarrier_wait", async_kernel.tma_arrives, dict(WAIT=True), ("r0",), f"{MBARRIER}; {TMA_PROXY}",
        allowed=one_of((0,)), never=(1,), shown=one_of((0,)),
    ),
    alone(
        "TMA load, no wait", async_kernel.tma_arrives, dict(WAIT=False), ("r0",), ASYNC_ORDER,
        finding=f"{SHARED_RACE}.*mbarrier_wait for the bytes of the TMA load", weak=(1,),
    ),
    Litmus(
        "TMA adds", async_kernel.tma_additions, {}, ("tile",), "cp.reduce.async.bulk", allowed=one_of((2,)), never=(1,),
        shown=one_of((2,)),
    ),
    Litmus(
        "TMA adds of two ranks", async_kernel.tma_additions, {}, ("tile",),
        "cp.reduce.async.bulk (.relaxed.gpu: relied upon between GPUs)", allowed=one_of((2,)), never=(1,),
        shown=one_of((2,)), ranks=True, gpu=False,
    ),
    Litmus(
        "TMA adds of two ranks, as PTX promises", async_kernel.tma_additions, {}, ("tile",), "cp.reduce.async.bulk",
        finding=f"{RACE}.*a common scope", weak=(1,), ranks=True, gpu=False, world=dict(reduce_scope="gpu"),
    ),
    alone(
        "arrival, mbarrier_wait", async_kernel.arrival, dict(WAIT=True), ("r0",), f"{PATTERNS}; mbarrier.arrive",
        allowed=one_of((1,)), never=(0,), shown=one_of((1,)),
    ),
    alone(
        "arrival, no wait", async_kernel.arrival, dict(WAIT=False), ("r0",), STRONG, finding=SHARED_RACE, weak=(0,),
    ),
    alone(
        "store, mbarrier_expect, TMA load", async_kernel.completion, dict(ORDERED=True), ("r0",),
        f"{PATTERNS}; mbarrier.arrive", allowed=one_of((1,)), never=(0,), shown=one_of((1,)),
    ),
    alone(
        "mbarrier_expect, store, TMA load", async_kernel.completion, dict(ORDERED=False), ("r0",),
        f"{ASYNC_ORDER} (complete-tx is not transitive)", finding=RACE, weak=(0,),
    ),
    alone(
        "one phase, one wait", async_kernel.phases, dict(ARRIVALS=2, WAITS=1), ("r0",), MBARRIER,
        allowed=one_of((1,)), shown=one_of((1,)),
    ),
    alone(
        "two phases, the first waited for", async_kernel.phases, dict(ARRIVALS=1, WAITS=1), ("r0",),
        "mbarrier.test_wait, mbarrier.try_wait (the current or the phase before)",
        finding="deadlock.*parity 0 of mbarrier bar .phase 2", gpu=False,
    ),
    alone(
        "an arrival too few", async_kernel.phases, dict(ARRIVALS=3, WAITS=1), ("r0",), MBARRIER,
        finding="deadlock.*pending arrivals 1 of 3", gpu=False,
    ),
    alone(
        "more bytes expected than come", async_kernel.bytes_expected, dict(BYTES=8192), ("r0",),
        "mbarrier > Tracking asynchronous operations by the mbarrier object",
        finding="deadlock.*pending bytes 4096", gpu=False,
    ),
    alone(
        "an mbarrier that nobody is told of", async_kernel.barrier_begins, {}, ("r0",), "mbarrier.init",
        finding="race on shared memory bar|used before mbarrier_init", gpu=False,
    ),
    alone(
        "wgmma, wait, operand", async_kernel.wgmma_reads, dict(HOW="right"), ("r0",),
        f"{WGMMA_PROXY}; wgmma.wait_group", allowed=one_of((64,)), never=(128,), shown=one_of((64,)),
    ),
    alone(
        "wgmma, operand, wait", async_kernel.wgmma_reads, dict(HOW="no wait"), ("r0",), "wgmma.wait_group",
        finding=f"{SHARED_RACE} a.*warpgroup_mma_wait", weak=(128,),
    ),
    alone(
        "wgmma, sums used", async_kernel.wgmma_reads, dict(HOW="early use"), ("r0",), "wgmma.wait_group",
        finding="race on registers", weak=(0,), gpu=False,
    ),
    alone(
        "operand, wgmma without fence", async_kernel.wgmma_reads, dict(HOW="no fence"), ("r0",), WGMMA_PROXY,
        finding=f"{SHARED_RACE} a.*fence_async_shared between", weak=(128,),
    ),
]  # fmt: skip

ALIASES = "Causality Order (aliases); Multimem Addresses"


def multimem(name: str, made: Any, options: dict, **more: Any) -> Litmus:
    """A test of a multicast address over two ranks' tiles."""
    return Litmus(name, made, options, ("tile",) if not options else ("r1", "r1'"), ranks=True, gpu=False, **more)


OTHERS = [
    multimem(
        "multimem store, alias fence, load", other_kernel.multimem_passing, dict(FENCE=True),
        section=f"{ALIASES}; fence.proxy.alias", allowed=TOLD, never=(1, 0), shown=TOLD,
    ),
    multimem(
        "multimem store, load", other_kernel.multimem_passing, dict(FENCE=False), section=ALIASES,
        finding=f"{RACE}.*fence_proxy_alias between", weak=(1, 0),
    ),
    multimem(
        "store, alias fence, multimem load", other_kernel.multimem_sums, dict(FENCE=True),
        section=f"{ALIASES}; fence.proxy.alias", allowed=TOLD, never=(1, 0), shown=TOLD,
    ),
    multimem(
        "store, multimem load", other_kernel.multimem_sums, dict(FENCE=False), section=ALIASES,
        finding=f"{RACE}.*fence_proxy_alias between", weak=(1, 0),
    ),
    multimem(
        "multimem additions", other_kernel.multimem_additions, {}, section="multimem.red; Axioms > Atomicity",
        allowed=one_of((2,)), never=(1,), shown=one_of((2,)),
    ),
    alone(
        "copy, flag", other_kernel.copy_passing, {}, ("r0",), "Memory synchronization > API synchronization",
        allowed=one_of((1,)), never=(0,), shown=one_of((1,)), copies=("tile", "flag"), gpu=False,
    ),
    alone(
        "flag, copy", other_kernel.copy_passing, {}, ("r0",), "Memory synchronization > API synchronization",
        finding=f"{RACE}.*copy-engine copy", weak=(0,), copies=("flag", "tile"), gpu=False,
    ),
]  # fmt: skip


def tensor(name: str, how: str, section: str, made: Any = tensor_kernel.tensor_products, **more: Any) -> Litmus:
    """A test of products in tensor memory."""
    return alone(name, made, dict(HOW=how), ("r0",), section, gpu=False, **more)


def scales(name: str, how: str, section: str, **more: Any) -> Litmus:
    """A test of scales on their way to tensor memory."""
    return tensor(name, how, section, tensor_kernel.tensor_scales, **more)


PRODUCTS = [
    tensor(
        "two products, commit, wait, sums", "right", f"{TENSOR} > Pipelined tcgen05 Instructions; tcgen05.commit",
        allowed=one_of((128,)), never=(64,), shown=one_of((128,)),
    ),
    tensor(
        "product, sums, no wait", "sums", "tcgen05.commit",
        finding="race on tensor memory whole.*missing: tcgen05_commit|read before anything has written", weak=(0,),
    ),
    tensor(
        "product, operand, no wait", "operand", "tcgen05.commit",
        finding=f"{SHARED_RACE} a.*tcgen05_commit", weak=(192,),
    ),
    tensor(
        "product, arrival for commit", "arrival", f"{TENSOR} > Asynchronous Operations",
        finding="race on tensor memory whole.*missing: tcgen05_commit|read before anything has written", weak=(0,),
    ),
    tensor("product, no commit", "commit", "tcgen05.commit", finding="deadlock"),
    tensor(
        "operand, product without fence", "no fence", "tcgen05.mma > Async Proxy",
        finding=f"{SHARED_RACE} a.*fence_async_shared between", weak=(0,),
    ),
    tensor(
        "products into columns that overlap", "other columns", f"{TENSOR} > Pipelined tcgen05 Instructions",
        finding="race on tensor memory whole", weak=(64,),
    ),
    tensor(
        "products of two kinds into one accumulator", "another kind", f"{TENSOR} > Pipelined tcgen05 Instructions",
        finding="race on tensor memory whole", weak=(64,),
    ),
    tensor(
        "product onto what nobody wrote", "nobody wrote", "tcgen05.alloc",
        finding="whole is read before anything has written it",
    ),
    tensor("more columns than there are", "too much", "tcgen05.alloc", finding="544 columns of tensor memory"),
    tensor(
        "sums read, accumulator given back, next product", "right", f"{TENSOR} > Canonical Synchronization Patterns",
        tensor_kernel.tensor_reused, allowed=one_of((64,)), never=(128,), shown=one_of((64,)),
    ),
    tensor(
        "sums read, next product", "no release", f"{TENSOR} > Canonical Synchronization Patterns",
        tensor_kernel.tensor_reused, finding="race on tensor memory acc", weak=(128,),
    ),
    tensor(
        "operand written, told, product, commit, operand", "operand",
        f"{TENSOR} > Pipelined tcgen05 Instructions > Implicitly pipelined; Causality Order",
        tensor_kernel.tensor_passes_on, allowed=one_of((128,)), never=(192,), shown=one_of((128,)),
    ),
    tensor(
        "cell written, told, product, commit, cell", "cell", "tcgen05.commit", tensor_kernel.tensor_passes_on,
        finding=RACE, weak=(0,),
    ),
    scales(
        "scales loaded, mbarrier_wait, copied, product", "right",
        f"{TENSOR} > Pipelined tcgen05 Instructions (tcgen05.cp before tcgen05.mma); {MBARRIER}",
        allowed=one_of((0,)), never=(128,), shown=one_of((0,)),
    ),
    scales(
        "scales loaded, copied, no wait", "early", MBARRIER,
        finding=f"{SHARED_RACE} buf.*mbarrier_wait for the bytes of the TMA load", weak=(128,),
    ),
    scales(
        "scales copied, their buffer, no wait", "buffer", "tcgen05.commit",
        finding=f"{SHARED_RACE} buf.*tcgen05_commit", weak=(128,),
    ),
    scales(
        "scales copied, commit, another partition's product", "told by a commit",
        f"{TENSOR} > Canonical Synchronization Patterns; tcgen05.commit",
        allowed=one_of((0,)), never=(128,), shown=one_of((0,)),
    ),
    scales(
        "scales copied, arrival, another partition's product", "told by an arrival",
        f"{TENSOR} > Pipelined tcgen05 Instructions (of one thread)",
        finding="race on tensor memory .*_scales|read before anything has written", weak=(128,),
    ),
]  # fmt: skip

CASES = GENERIC + ASYNC + OTHERS + PRODUCTS
