"""Where in the model a collective is called: read from the Python frames above it, so that no forward has to announce itself.

In a forward the nearest call of a module names it. In a backward there is no module: the autograd Functions of this package
remember where they were applied (`call_patches`), FSDP's groups know their module, and nodes of parameters their parameter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.autograd.function import BackwardCFunction

from parallelize import _torch_private as private

PLACE = "_watched_place"
"""The attribute of an autograd node with the place where it was applied."""
_ROOT = str(Path(__file__).parents[1])
_HERE, _COMM = (f"{_ROOT}/{room}/" for room in ("watchdog", "comm"))
_LIBRARY, _MODULE, _NODE, _PACKAGE, _FSDP, _TRANSPORT, _USER = range(7)


class CallPlace(NamedTuple):
    """Where a collective is called.

    Attributes:
        module: the fqn of the innermost module, "" where none runs.
        phase: "forward", "evaluation" (a module in evaluation mode), "backward", or "" outside of both.
        function: the functions of this package by which user code came here, where no module runs.
    """

    module: str = ""
    phase: str = ""
    function: str = ""

    def __str__(self) -> str:
        if self.module:
            return f"{self.module}, {self.phase}"
        return ", ".join(filter(None, (self.function, self.phase))) or "the script"


class ModuleNames:
    """The fqns of the modules and parameters of the models that were called so far.

    The model of a module that is not known is the outermost one whose call is on the stack.

    Attributes:
        roots: the models, to look up their plans. names: fqn by id of a module.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}

    def of(self, module: nn.Module, frame: Any) -> str:
        """The fqn of a module whose call is the frame; its class where it is the model itself."""
        name = self.names.get(id(module))
        return self._learned(module, frame) if name is None else name

    def of_parameter(self, parameter: Any) -> str:
        """The fqn of a parameter, "" where no model that was called has it."""
        return self._parameters.get(id(parameter), "")

    def add(self, root: nn.Module) -> None:
        """Learn the names of one model. The model is referenced from now on, so that no other object gets its id."""
        if not any(known is root for known in self.roots):
            self.roots.append(root)
        for name, module in root.named_modules():
            self.names[id(module)] = name or type(root).__name__.removeprefix("FSDP")
        for name, parameter in root.named_parameters():
            self._parameters[id(parameter)] = name

    def _learned(self, module: nn.Module, frame: Any) -> str:
        root = module
        while frame is not None:
            if frame.f_code is _CALL:
                root = frame.f_locals["self"]
            frame = frame.f_back
        self.add(root)
        return self.names.setdefault(id(module), type(module).__name__)


_CALL = nn.Module._call_impl.__code__
_kinds: dict[int, int] = {id(_CALL): _MODULE}  # by the id of a code object, which `_codes` keeps from being another's
_codes: list[Any] = [_CALL]


def _classified(code: Any) -> int:
    """The kind of a function that is seen for the first time."""
    file = code.co_filename
    kind = _LIBRARY if "/torch/" in file or "contextlib" in file else _USER
    if code is BackwardCFunction.apply.__code__ or file.endswith("torch/autograd/graph.py"):
        kind = _NODE
    elif file.endswith("_fsdp_param_group.py"):
        kind = _FSDP
    elif file.startswith((_HERE, _COMM)):
        kind = _TRANSPORT
    elif file.startswith(_ROOT):
        kind = _PACKAGE
    _codes.append(code)
    _kinds[id(code)] = kind
    return kind


def place_here(names: ModuleNames, depth: int = 2) -> CallPlace:
    """The place of the caller's caller. Cost: 1 to 4 us, most of it for reading the locals of one frame."""
    frame: Any = sys._getframe(depth)
    functions: list[Any] = []  # of this package, until user code calls them
    from_user, kinds = False, _kinds
    while frame is not None:
        code = frame.f_code
        kind = kinds.get(id(code))
        if kind is None:
            kind = _classified(code)
        if kind == _MODULE:
            module = frame.f_locals["self"]
            return CallPlace(names.of(module, frame), "forward" if module.training else "evaluation")
        if kind == _FSDP:
            unit = frame.f_locals.get("self")
            if hasattr(unit, "_module_fqn"):
                phase = "forward" if private.running_node() is None else "backward"
                return CallPlace(unit._module_fqn or "", phase, "the ZeRO unit of the model itself")
        if kind == _NODE:
            break
        if kind == _PACKAGE and not from_user:
            functions.append(code)
        elif kind == _USER and functions:
            from_user = True
        frame = frame.f_back
    function = _function(functions)
    node = private.running_node()
    return CallPlace(function=function) if node is None else _place_of_node(node, names, function)


def _place_of_node(node: Any, names: ModuleNames, function: str) -> CallPlace:
    applied_at = getattr(node, PLACE, None)
    if applied_at is not None:
        return CallPlace(applied_at, "backward")
    name = names.of_parameter(getattr(node, "variable", None))  # which parameter comes last may differ between ranks
    return CallPlace("", "backward", f"{function}, at the gradient of {name}" if name else function)


def _function(codes: list[Any]) -> str:
    """Names of two functions of this package, innermost first in the list: the public one that was called, and the innermost."""
    if not codes:
        return ""
    public = next((code for code in reversed(codes) if not code.co_name.startswith(("_", "hook", "<"))), codes[0])
    names = dict.fromkeys(getattr(code, "co_qualname", code.co_name) for code in (public, codes[0]))
    file = codes[0].co_filename.removeprefix(f"{_ROOT}/")
    return f"{' > '.join(names)} ({file})"
