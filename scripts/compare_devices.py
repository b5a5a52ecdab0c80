"""A real model on the GPU against the same model on the CPU in float32: greedy texts and logits.

usage: compare_devices.py MODEL [--contexts 40,700,5000] [--greedy 100] [--device gpu] [--json FILE]

For every context of so many tokens, and every arm, prints: how many of the greedy tokens are those of the CPU
before the first that is not, and the relative RMS difference of the logits over a prefill's last position and
32 decode steps that are fed the CPU's tokens. The reference holds weights, products and caches in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hipfire.base.errors import HipfireError
from hipfire.checkpoint.library import find_model
from hipfire.runtime.load import LoadedModel, LoadOptions, load_model
from hipfire.validate.metrics import relative_rms

TEXT = Path(__file__).parent.parent / "benchmarks" / "texts" / "lighthouse.txt"
# decode steps whose logits are compared
FED = 32
ROW = "{:>8} {:<8} {:<6} {:>14} {:>14} {:>12}"


@dataclass(frozen=True)
class Arm:
    """A way to compute on the GPU."""

    activations: str
    kv_cache: str


ARMS = (Arm("float", "f32"), Arm("float", "bf16"), Arm("float", "q8"), Arm("int8", "bf16"), Arm("int8", "q8"))


@dataclass(frozen=True)
class Outcome:
    """Greedy tokens after a context, and logits float32 [1 + FED, vocab] on the CPU."""

    greedy: list[int]
    logits: torch.Tensor


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    context: int
    activations: str
    kv_cache: str
    equal_tokens: int
    prefill_rms: float
    decode_rms: float


def main(words: Sequence[str] | None = None) -> int:
    """Compare, print, and return 1 where float arithmetic does not give the CPU's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--contexts", default="40,700,5000")
    parser.add_argument("--greedy", type=int, default=100)
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    contexts = [int(word) for word in arguments.contexts.split(",")]
    try:
        rows = _compare(find_model(arguments.model), contexts, arguments.greedy, arguments.device)
    except HipfireError as error:
        print(f"compare_devices: {error.line()}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    wrong = [row for row in rows if row.activations == "float" and row.kv_cache == "f32"]
    return int(any(row.equal_tokens < arguments.greedy for row in wrong))


def _compare(path: Path, contexts: Sequence[int], greedy: int, device: str) -> list[Row]:
    room = max(contexts) + greedy + FED
    exact = load_model(path, LoadOptions(device="cpu", residency="decoded", kv_cache="f32", max_seq=room))
    texts = {length: _tokens(exact, length) for length in contexts}
    wanted = {length: _run(exact, text, greedy, None) for length, text in texts.items()}
    print(f"{path.name} on {device}, against the CPU in float32")
    print(ROW.format("context", "products", "kv", "equal tokens", "prefill RMS", "decode RMS"))
    rows = []
    for arm in ARMS:
        options = LoadOptions(
            device=device,
            kv_cache=arm.kv_cache,
            activations=arm.activations,  # type: ignore[arg-type]
            max_seq=room,
        )
        loaded = load_model(path, options)
        for length, text in texts.items():
            row = _row(length, arm, _run(loaded, text, greedy, wanted[length].greedy), wanted[length])
            shown = f"{row.equal_tokens} of {greedy}", f"{row.prefill_rms:.2e}", f"{row.decode_rms:.2e}"
            print(ROW.format(length, arm.activations, arm.kv_cache, *shown), flush=True)
            rows.append(row)
        loaded.close()
    return rows


def _row(length: int, arm: Arm, found: Outcome, wanted: Outcome) -> Row:
    pairs = zip(found.greedy, wanted.greedy, strict=True)
    equal = next((index for index, (a, b) in enumerate(pairs) if a != b), len(wanted.greedy))
    prefill, decode = (
        relative_rms(found.logits[part], wanted.logits[part]) for part in (slice(0, 1), slice(1, None))
    )
    return Row(length, arm.activations, arm.kv_cache, equal, prefill, decode)


def _tokens(loaded: LoadedModel, count: int) -> list[int]:
    """Return so many tokens of the text, which is repeated as often as it takes."""
    text = TEXT.read_text()
    tokens = loaded.tokenizer.encode(text)
    while len(tokens) < count:
        tokens = tokens + loaded.tokenizer.encode(text)
    return tokens[:count]


def _run(loaded: LoadedModel, text: Sequence[int], greedy: int, fed: Sequence[int] | None) -> Outcome:
    """Continue a text greedily; then step through the tokens `fed` (its own if None) from its end again."""
    runner, end = loaded.runner, len(text)
    logits = runner.prefill(0, text)
    collected = [logits.cpu()]
    made: list[int] = []
    for index in range(greedy):
        made.append(int(logits.argmax()))
        logits = runner.decode(0, made[-1], end + index)
    for index, token in enumerate((made if fed is None else fed)[:FED]):
        collected.append(runner.decode(0, token, end + index).cpu())
    return Outcome(made, torch.stack(collected))


if __name__ == "__main__":
    sys.exit(main())
