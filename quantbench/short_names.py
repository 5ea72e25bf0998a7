"""In a checkout, `import models` is `import quantbench.models`: the same modules, not copies."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ShortNames(MetaPathFinder, Loader):
    """Finds models.llama as quantbench.models.llama once `models` has been bound."""

    def __init__(self) -> None:
        self.bound: set[str] = set()

    def bind(self, name: str) -> None:
        """Make `name` and everything inside it the module quantbench.name."""
        self.bound.add(name)
        sys.modules[name] = importlib.import_module(f"quantbench.{name}")
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder, _, inside = fullname.partition(".")
        return ModuleSpec(fullname, self) if inside and folder in self.bound else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = importlib.import_module(f"quantbench.{name}")


names = ShortNames()
