"""An op's kernel with edits in its text or in that of the tile files that it is made of."""

import importlib.util
import sys
from pathlib import Path

import tileweave

SOURCES = Path(tileweave.__file__).parent
KERNEL, MATMUL, CHANNEL = "ops/matmul_reduce_scatter/kernel.py", "tiles/matmul.py", "tiles/channel.py"
PHASES, MOVER, COMMUNICATOR = (f"tiles/{name}.py" for name in ("phases", "mover", "communicator"))
REDUCER, SUMS = "tiles/reducer.py", "tiles/sums.py"
TCGEN05, BLOCK_SCALES = "tiles/matmul_tcgen05.py", "tiles/block_scales.py"
GROUPED = "tiles/grouped.py"
ATTENTION, ATTENTION_TCGEN05 = "tiles/attention.py", "tiles/attention_tcgen05.py"
# Where an op has its kernel and its launch, if not under its name.
APART = {
    "moe_dispatch_matmul": ("ops/moe/kernel.py", "tileweave.ops.moe.launch"),
    "moe_matmul_combine": ("ops/moe/combine_kernel.py", "tileweave.ops.moe.combine_launch"),
}
TEMPLATE = ("tiles/units.py", "tiles/matmul_wgmma.py", MATMUL)  # what an edit of MATMUL may be in


def put_edited(file, edits, monkeypatch, folder, op="matmul_reduce_scatter", template=MATMUL):
    """Put the kernel of `op` with edits (old, new) of `file`, or of several, in place of the real one; an old text must
    occur exactly once in them.

    `folder`: where the edited copies are written; `template`: the tile file that the kernel is made of.
    """
    modules = {}
    kernel_file, launch = APART.get(op, (f"ops/{op}/kernel.py", f"tileweave.ops.{op}.launch"))
    files = (file,) if isinstance(file, str) else file
    if MATMUL in files:
        files = [*TEMPLATE[:-1], *files]
    paths = (
        CHANNEL,
        *TEMPLATE[:-1],
        BLOCK_SCALES,
        TCGEN05,
        template,
        *((GROUPED,) if template == MATMUL else ()),
        *((ATTENTION_TCGEN05, "tiles/attention_roles.py") if template == ATTENTION else ()),
        COMMUNICATOR,
        PHASES,
        MOVER,
        REDUCER,
        SUMS,
        kernel_file,
    )
    texts = {path: (SOURCES / path).read_text() for path in paths}
    for old, new in edits:
        found = [path for path in files for _ in range(texts[path].count(old))]
        assert len(found) == 1, f"the text to edit occurs {len(found)} times: {old!r}"
        texts[found[0]] = texts[found[0]].replace(old, new)
    for path, text in texts.items():
        for name, module in modules.items():
            text = text.replace(f"from tileweave.{name} import", f"from {module} import")
        name = f"mutant_{folder.name}_{Path(path).stem}"
        target = folder / f"{name}.py"
        target.write_text(text)
        spec = importlib.util.spec_from_file_location(name, target)
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules[name])
        modules[path.removesuffix(".py").replace("/", ".")] = name
    kernel = getattr(sys.modules[modules[kernel_file.removesuffix(".py").replace("/", ".")]], f"{op}_kernel")
    monkeypatch.setattr(f"{launch}.{op}_kernel", kernel)
