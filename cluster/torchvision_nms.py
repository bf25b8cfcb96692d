"""Let `import torchvision` succeed where pip could only find a CUDA build of torchvision beside a CPU build of torch.

The CUDA build cannot load its compiled operators there, and torchvision then dies with
"operator torchvision::nms does not exist" while it registers a shape function for them. Declaring the two
operators first lets the import go through; nothing in this project calls them.

`cluster/setup.sh` copies this file into the environment (with a .pth line that imports it) only where the import
fails. The finder does nothing until something imports torchvision, so that other processes start as fast as before.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _DeclareOperatorsFirst(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import torch

        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        module.__dict__["_declared_operators"] = library  # the declarations live as long as this object
        self._inner.exec_module(module)


class _TorchvisionFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeclareOperatorsFirst(spec.loader)
        return spec


sys.meta_path.insert(0, _TorchvisionFinder())
