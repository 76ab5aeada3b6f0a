"""Optimise inner functions of compiled code once, as part of their callers.

Numba optimises each function alone and generates its machine code, and does so again wherever it is linked
in. These functions are never called from outside. The scheduler has four hundred of them, and the repeated
work is a third of its compile time.
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.environment import lookup_environment

ENTRIES = ("_ZN7cpython", "cfunc.")  # how the names of functions begin that Python and C call
COMPILED = "_ZN"  # and of all that Numba compiles from Python
ENVIRONMENT = "_ZN08NumbaEnv"


class SharedLibrary(JITCodeLibrary):
    """The code of one function and its callees. `put_off`: it has no entry point yet, and so no machine code."""

    put_off = False

    def _has_no_entry(self) -> bool:
        names = [function.name for function in self._final_module.functions if _is_seen(function)]
        return bool(names) and all(name.startswith(COMPILED) and not name.startswith(ENTRIES) for name in names)

    def _optimize_final_module(self) -> None:
        if not self._has_no_entry():
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        if not self._has_no_entry():
            self._emit()
            return
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = self.put_off = True

    def _emit(self) -> None:
        """Make machine code, and let it find the constants of all functions in it."""
        super()._finalize_final_module()
        self.put_off = False
        for variable in self._final_module.global_variables:
            environment = lookup_environment(variable.name) if variable.name.startswith(ENVIRONMENT) else None
            if environment is not None:
                self._codegen.set_env(variable.name, environment)

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        if self.put_off:
            if all(function.name != name for function in self.get_defined_functions()):
                return 0
            super()._optimize_final_module()
            self._emit()
        pointer: int = super().get_pointer_to_function(name)
        return pointer


def _is_seen(function: Any) -> bool:
    """Whether a function is visible outside its module."""
    return not function.is_declaration and function.linkage.name == "external"


_set_environment = JITCPUCodegen.set_env


def _set_environment_of_code(self: Any, name: str, environment: Any) -> None:
    """Numba's own, for code that is there already; see SharedLibrary._emit."""
    if self._engine.is_symbol_defined(name):
        _set_environment(self, name, environment)


def optimise_once() -> None:
    """Enable this for the process. Code compiled earlier is unchanged."""
    JITCPUCodegen.set_env = _set_environment_of_code
    JITCPUCodegen._library_class = SharedLibrary
