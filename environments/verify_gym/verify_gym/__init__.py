"""Bracket a constant, and be paid only for what is certified.

`verify_gym.api` lists what a program needs; `python -m verify_gym.cli` is the command line. Every name below is looked up
when it's asked for; all but `api` need the `verifiers` framework.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.1.0"
__all__ = ["VerifyGymEnv", "VerifyGymHarness", "VerifyGymTaskset", "api", "load_environment"]

_FRAMEWORK = {
    "VerifyGymEnv": "adapters_v1",
    "VerifyGymHarness": "adapters_v1",
    "VerifyGymTaskset": "adapters_v1",
    "load_environment": "adapters_v0",
}

# A wheel holds the modules beside this file. A checkout holds them once, in miniverl, and this package points there.
if find_spec(f"{__name__}.exact") is None:
    import_module(f"{__name__}._checkout").point_to("miniverl.verify_gym")


def __getattr__(name: str) -> Any:
    if name == "api":
        return import_module(f"{__name__}.api")
    if name in _FRAMEWORK:
        return getattr(import_module(f"{__name__}.{_FRAMEWORK[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
