"""Whether this version can run a model of the registry: it can if it has the model file of the card's family.

The answer is read from the package's files, so a card needs no change when a model file is added.
"""

from __future__ import annotations

from importlib import resources

from hipfire.checkpoint.registry import Card


def is_runnable(card: Card) -> bool:
    """Return whether this version has the model file that runs the card's family."""
    return resources.files("hipfire").joinpath("models", f"{card.family}.py").is_file()


def needs_later_version(card: Card) -> str:
    """Return the sentence about a card that is not runnable."""
    return f"this version cannot run {card.family} models yet; a later one will"
