"""An op's kernel with edits in its text or in that of the tile files that it is made of."""

import importlib.util
import sys
from pathlib import Path

import tileweave

SOURCES = Path(tileweave.__file__).parent
KERNEL, MATMUL, CHANNEL = "ops/matmul_reduce_scatter/kernel.py", "tiles/matmul.py", "tiles/channel.py"


def put_edited(file, edits, monkeypatch, folder, op="matmul_reduce_scatter", template=MATMUL):
    """Put the kernel of `op` with edits (old, new) of `file` in place of the real one; an old text must occur exactly
    once.

    `folder`: where the edited copies are written; `template`: the tile file that the kernel is made of.
    """
    modules = {}
    for path in (CHANNEL, template, f"ops/{op}/kernel.py"):
        text = (SOURCES / path).read_text()
        for old, new in edits if path == file else ():
            assert text.count(old) == 1, f"the text to edit occurs {text.count(old)} times: {old!r}"
            text = text.replace(old, new)
        for name, module in modules.items():
            text = text.replace(f"from tileweave.{name} import", f"from {module} import")
        name = f"mutant_{folder.name}_{Path(path).stem}"
        target = folder / f"{name}.py"
        target.write_text(text)
        spec = importlib.util.spec_from_file_location(name, target)
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules[name])
        modules[path.removesuffix(".py").replace("/", ".")] = name
    kernel = getattr(sys.modules[modules[f"ops.{op}.kernel"]], f"{op}_kernel")
    monkeypatch.setattr(f"tileweave.ops.{op}.launch.{op}_kernel", kernel)
