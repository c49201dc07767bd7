"""The other libraries that ops are measured beside: what each contender of that name is, and whether it is there."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


@dataclass(frozen=True)
class Rival:
    """what: it is; module: by which it is imported, and package: in which that comes, "torch" for PyTorch's own."""

    what: str
    module: str = "torch"
    package: str = "torch"

    @property
    def version(self) -> str | None:
        """Of the package that is installed; None without the module."""
        if not find_spec(self.module):
            return None
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"


RIVALS = {
    "cublas": Rival("torch.mm"),
    "nccl": Rival("PyTorch's kernels and torch.distributed's collectives, one after the other"),
    "async-tp": Rival("torch.ops.symm_mem.fused_all_gather_matmul, fused_matmul_reduce_scatter"),
    "one-shot": Rival("torch.mm, then torch.ops.symm_mem.one_shot_all_reduce"),
    "two-shot": Rival("torch.mm, then torch.ops.symm_mem.two_shot_all_reduce_"),
    "cudnn": Rival("scaled_dot_product_attention by cuDNN"),
    "torch, gather": Rival("PyTorch's ring attention, context_parallel, by all-gather"),
    "torch, rotate": Rival("PyTorch's ring attention, context_parallel, by all-to-all"),
    "torch": Rival("torch.nn.functional.grouped_mm, with the copies that bring rows to it"),
    "grouped_mm": Rival("torch.nn.functional.grouped_mm"),
    "fa3": Rival("FlashAttention-3", "fa3_fwd_interface", "fa3-fwd"),
    "flux": Rival("Flux's GemmRS and AGKernel", "flux", "byte-flux"),
    "comet": Rival("Comet, Flux's GemmGroupedV3AGScatter", "flux", "byte-flux"),
    "triton-distributed": Rival("Triton-Distributed's gemm_rs and ag_gemm", "triton_dist", "triton-dist"),
    "yunchang": Rival("yunchang's LongContextAttention, ring or Ulysses", "yunchang", "yunchang"),
    "xdit": Rival("xDiT's xFuserLongContextAttention, ring or Ulysses", "xfuser", "xfuser"),
}


def versions() -> dict[str, str | None]:
    """Of each rival that is no part of PyTorch, its version here; None where it is not installed."""
    return {name: each.version for name, each in RIVALS.items() if each.module != "torch"}
