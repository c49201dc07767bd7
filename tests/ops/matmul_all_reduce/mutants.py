"""The op's kernel with edits in its text or in that of the tile files that it is made of."""

import importlib.util
import sys
from pathlib import Path

from tileweave.ops.matmul_all_reduce import launch

SOURCES = Path(launch.__file__).parents[2]
KERNEL, MATMUL, CHANNEL = "ops/matmul_all_reduce/kernel.py", "tiles/matmul.py", "tiles/channel.py"


def put_edited(file, edits, monkeypatch, folder):
    """Put the kernel with edits (old, new) of `file` in place of the real one; each old text must occur exactly once.

    `folder`: where the edited copies are written.
    """
    modules = {}
    for path in (CHANNEL, MATMUL, KERNEL):
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
    kernel = sys.modules[modules["ops.matmul_all_reduce.kernel"]].matmul_all_reduce_kernel
    monkeypatch.setattr(launch, "matmul_all_reduce_kernel", kernel)
