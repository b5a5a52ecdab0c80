"""Logits of a real model in hipfire against transformers in float32, and of its quantized forms.

usage: compare_with_transformers.py MODEL [--tokens N] [--formats q8 hf4 mq4 ...]

MODEL is a GGUF file or the tag of one. Prints, for the file as it is (float, then with bf16 and q8 caches)
and for every format: the relative RMS difference of the logits, the KL divergence in nats a token, the
share of equal most likely tokens, the perplexity, and whether 40 greedy tokens after a short prefix are the
same.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from gguf_oracle import load_oracle
from hipfire.checkpoint.library import find_model
from hipfire.quantize.pipeline import quantize
from hipfire.runtime.load import LoadOptions, load_model
from hipfire.runtime.runner import Runner
from hipfire.runtime.weights import Residency
from hipfire.validate.metrics import kl_divergence, perplexity, relative_rms, top1_agreement

TEXT = Path(__file__).parent.parent / "benchmarks" / "texts" / "lighthouse.txt"
PREFIX, GREEDY = 40, 40
# how weights are held, and the name of the arithmetic that follows
ARMS: Mapping[Residency, str] = {"decoded": "float32", "panels": "int8"}
ROW = "{:<14} {:<8} {:>12} {:>12} {:>8} {:>10} {:>8}"


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--formats", nargs="*", default=["q8", "hf4", "mq4v1", "mq4", "mq6", "hf6"])
    arguments = parser.parse_args()
    path = find_model(arguments.model)
    exact = load_model(path, LoadOptions(kv_cache="f32", residency="decoded"))
    tokens = exact.tokenizer.encode(TEXT.read_text())[: arguments.tokens]
    del exact
    oracle = load_oracle(path)
    with torch.inference_mode():
        reference = oracle(torch.tensor([tokens])).logits[0]
        greedy = oracle.generate(
            torch.tensor([tokens[:PREFIX]]),
            attention_mask=torch.ones(1, PREFIX, dtype=torch.long),
            max_new_tokens=GREEDY,
            do_sample=False,
        )[0, PREFIX:].tolist()
    del oracle
    print(f"{path.name}: {len(tokens)} tokens of {TEXT.name}, against transformers float32")
    print(ROW.format("arm", "products", "rel. RMS", "KL nats/tok", "top-1", "perplexity", "greedy"))
    print(
        ROW.format(
            "transformers", "float32", "-", "-", "-", f"{perplexity(*_shifted(reference, tokens)):.3f}", "-"
        )
    )
    for mode in ("f32", "bf16", "q8"):
        for residency in ARMS:
            report(f"file, kv {mode}", path, mode, residency, tokens, reference, greedy)
    with tempfile.TemporaryDirectory() as folder:
        for fmt in arguments.formats:
            out = Path(folder) / f"model.{fmt}"
            quantize(path, fmt, out)
            for residency in ARMS:
                report(fmt, out, "f32", residency, tokens, reference, greedy)
            out.unlink()


def report(
    name: str,
    path: Path,
    mode: str,
    residency: Residency,
    tokens: Sequence[int],
    reference: torch.Tensor,
    greedy: Sequence[int],
) -> None:
    """Print one row of the table."""
    options = LoadOptions(kv_cache=mode, max_seq=max(1024, len(tokens) + 1), residency=residency)
    loaded = load_model(path, options)
    logits = loaded.runner.all_logits(0, tokens)
    same = _greedy(loaded.runner, tokens[:PREFIX]) == list(greedy)
    print(
        ROW.format(
            name,
            ARMS[residency],
            f"{relative_rms(logits, reference):.2e}",
            f"{kl_divergence(logits, reference):.2e}",
            f"{top1_agreement(logits, reference):.3f}",
            f"{perplexity(*_shifted(logits, tokens)):.3f}",
            "same" if same else "differs",
        ),
        flush=True,
    )


def _greedy(runner: Runner, prefix: Sequence[int]) -> list[int]:
    logits = runner.prefill(0, prefix)
    reply: list[int] = []
    while len(reply) < GREEDY:
        reply.append(int(logits.argmax()))
        logits = runner.decode(0, reply[-1], len(prefix) + len(reply) - 1)
    return reply


def _shifted(logits: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return logits[:-1], torch.tensor(tokens[1:])


if __name__ == "__main__":
    main()
