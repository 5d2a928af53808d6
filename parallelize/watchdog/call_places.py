"""Where in the model a collective is called: read from the Python frames above it, so that no forward has to announce
itself.

In a forward the nearest call of a module names it. In a backward there is no module: the autograd Functions of this
package remember where they were applied (`call_patches`), FSDP's groups know their module, and nodes of parameters
their parameter.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import nn
from torch.autograd.function import BackwardCFunction

from parallelize.base.package import FOLDER
from parallelize.base.torch_private import torch_tensors as private

PLACE = "_watched_place"
"""The attribute of an autograd node with the place of its backward; `call_patches` writes it out, which costs less than
its name."""
_HERE, _COMM = (f"{FOLDER}/{room}/" for room in ("watchdog", "comm"))
_LIBRARY, _MODULE, _NODE, _PUBLIC, _PRIVATE, _FSDP, _TRANSPORT, _USER = range(8)
_IN_PACKAGE = (_PUBLIC, _PRIVATE)
FORWARD, EVALUATION, BACKWARD = "forward", "evaluation", "backward"


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


Places = tuple[CallPlace, CallPlace]
"""Of a module: where its forward runs, and the backward of what is called there."""


class ModuleNames:
    """The fqns of the modules and parameters of the models that were called so far, and the places of calls in them. A
    place is one object, so that equal ones of this process are the same.

    The model of a module that is not known is the outermost one whose call is on the stack.

    Attributes:
        roots: the models, to look up their plans. names: fqn by id of a module. places: those in training, and in
            evaluation.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self.places: dict[int, tuple[Places, Places]] = {}
        self._other_places: dict[Any, CallPlace] = {}

    def of(self, module: nn.Module, frame: Any) -> Places:
        """The places of a module whose call is the frame. Its fqn is its class where it is the model itself."""
        places = self.places.get(id(module)) or self._learned(module, frame)
        return places[not module.training]

    def of_parameter(self, parameter: Any) -> str:
        """The fqn of a parameter, "" where no model that was called has it."""
        return self._parameters.get(id(parameter), "")

    def place(self, *fields: str) -> CallPlace:
        """The place with these fields."""
        place = self._other_places.get(fields)
        if place is None:
            place = self._other_places[fields] = CallPlace(*fields)
        return place

    def add(self, root: nn.Module) -> None:
        """Learn the names of one model. The model is referenced from now on, so that no other object gets its id."""
        if not any(known is root for known in self.roots):
            self.roots.append(root)
        for name, module in root.named_modules():
            self._name(module, name or type(root).__name__.removeprefix("FSDP"))
        for name, parameter in root.named_parameters():
            self._parameters[id(parameter)] = name

    def _name(self, module: nn.Module, name: str) -> tuple[Places, Places]:
        self.names[id(module)] = name
        backward = self.place(name, BACKWARD)
        places = (self.place(name, FORWARD), backward), (self.place(name, EVALUATION), backward)
        self.places[id(module)] = places
        return places

    def _learned(self, module: nn.Module, frame: Any) -> tuple[Places, Places]:
        root = module
        while frame is not None:
            if frame.f_code is _CALL:
                root = frame.f_locals["self"]
            frame = frame.f_back
        self.add(root)
        return self.places.get(id(module)) or self._name(module, type(module).__name__)


_CALL = nn.Module._call_impl.__code__
_APPLY = BackwardCFunction.apply.__code__
_WRAPPED = nn.Module._wrapped_call_impl.__code__
_kinds: dict[int, int] = {id(_CALL): _MODULE}  # by the id of a code object, which `_codes` keeps from being another's
_codes: list[Any] = [_CALL]
_frame_at = sys._getframe
_functions: dict[tuple[int, int], str] = {}


def _classified(code: Any) -> int:
    """The kind of a function that is seen for the first time."""
    file = code.co_filename
    kind = _LIBRARY if "/torch/" in file or "contextlib" in file else _USER
    if code is _APPLY or file.endswith("torch/autograd/graph.py"):
        kind = _NODE
    elif file.endswith("_fsdp_param_group.py"):
        kind = _FSDP
    elif file.startswith((_HERE, _COMM)):
        kind = _TRANSPORT
    elif file.startswith(FOLDER):
        kind = _PRIVATE if code.co_name.startswith(("_", "hook", "<")) else _PUBLIC
    _codes.append(code)
    _kinds[id(code)] = kind
    return kind


def place_here(names: ModuleNames, depth: int = 2) -> CallPlace:
    """The place of the caller's caller. Cost: 1 to 3 us, and some times that with cold caches."""
    frame: Any = _frame_at(depth)
    innermost = public = None  # functions of this package, until user code calls them
    from_user, kinds = False, _kinds
    while frame is not None:
        code = frame.f_code
        kind = kinds.get(id(code))
        if kind is None:
            kind = _classified(code)
        if kind == _MODULE:
            outer = frame.f_back  # has fewer locals to read
            called = outer if outer is not None and outer.f_code is _WRAPPED else frame
            return names.of(called.f_locals["self"], frame)[0]
        if kind == _NODE:
            break
        if kind in _IN_PACKAGE:
            if not from_user:
                innermost = innermost or code
                public = code if kind == _PUBLIC else public
        elif kind == _USER:
            from_user = innermost is not None
        elif kind == _FSDP:
            unit = frame.f_locals.get("self")
            if hasattr(unit, "_module_fqn"):
                phase = FORWARD if private.running_node() is None else BACKWARD
                return names.place(unit._module_fqn or "", phase, "the ZeRO unit of the model itself")
        frame = frame.f_back
    node = private.running_node()
    applied_at = None if node is None else getattr(node, PLACE, None)
    if applied_at is not None:
        return applied_at
    function = "" if innermost is None else _function(public or innermost, innermost)
    return names.place("", "", function) if node is None else _place_of_node(node, names, function)


def module_here(names: ModuleNames) -> Places | None:
    """The places of the caller's caller, an autograd Function, in the forward of a module; None outside of modules, and
    in a backward."""
    frame: Any = _frame_at(3)  # what applies the Function, by its `apply`
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            outer = frame.f_back  # has fewer locals to read
            module = (outer if outer is not None and outer.f_code is _WRAPPED else frame).f_locals["self"]
            places = names.places.get(id(module))
            return names.of(module, frame) if places is None else places[not module.training]
        if code is _APPLY:
            return None
        frame = frame.f_back
    return None


def _place_of_node(node: Any, names: ModuleNames, function: str) -> CallPlace:
    name = names.of_parameter(getattr(node, "variable", None))  # which parameter comes last may differ between ranks
    return names.place("", BACKWARD, f"{function}, at the gradient of {name}" if name else function)


def _function(public: Any, innermost: Any) -> str:
    """Names of two functions of this package, by their code: the public one that was called, and the innermost."""
    key = id(public), id(innermost)  # the hash of a code object reads all of it
    text = _functions.get(key)
    if text is None:
        names = dict.fromkeys(getattr(code, "co_qualname", code.co_name) for code in (public, innermost))
        file = innermost.co_filename.removeprefix(f"{FOLDER}/")
        text = _functions[key] = f"{' > '.join(names)} ({file})"
    return text
