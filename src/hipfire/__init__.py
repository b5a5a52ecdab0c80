"""hipfire: run large language models on the machine in front of you."""

from typing import TYPE_CHECKING, Any

from hipfire.base.env import let_threads_sleep

if TYPE_CHECKING:
    from hipfire.base.errors import HipfireError
    from hipfire.base.sampling import GenerationParams, SamplingParams
    from hipfire.engine.llm import LLM
    from hipfire.runtime.load import LoadOptions

__version__ = "0.1.0"

__all__ = ["LLM", "GenerationParams", "HipfireError", "LoadOptions", "SamplingParams", "__version__"]

_LAZY = {
    "LLM": "hipfire.engine.llm",
    "LoadOptions": "hipfire.runtime.load",
    "GenerationParams": "hipfire.base.sampling",
    "SamplingParams": "hipfire.base.sampling",
    "HipfireError": "hipfire.base.errors",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: importing hipfire alone must not cost a second of torch."""
    if name in _LAZY:
        import importlib  # noqa: PLC0415 - only needed on first use of a public name

        let_threads_sleep()
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
