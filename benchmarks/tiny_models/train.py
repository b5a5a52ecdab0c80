"""Train a tiny Qwen3.5-style model from scratch, and save it as a Hugging Face folder.

usage: train.py --kind dense|moe --data FOLDER --out FOLDER [--seconds S] [--steps N] [--batch N] ...

Needs torch and transformers only: what `data.py` made is all that it reads. It trains until the steps are
done or the time is over, and the learning rate falls along with that.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

# every fourth layer is one of full attention
INTERVAL: Final = 4
# widths that products read are multiples of 256, as rotated formats want them
COMMON: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
# the embedding is most of a file of at most 20 MB, hence the few layers of the one that has experts
KINDS: Final[dict[str, dict[str, Any]]] = {
    "dense": {"num_hidden_layers": 8, "intermediate_size": 512},
    "moe": {
        "num_hidden_layers": 4,
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
    },
}
WARMUP: Final = 0.04
LEAST: Final = 0.02
REPORT: Final = 50
SHOWN: Final = 64


@dataclass(frozen=True)
class Run:
    """How a model is trained; it ends after `steps` or `seconds`."""

    steps: int = 1000
    seconds: float = 85.0
    batch: int = 32
    rate: float = 2e-3
    decay: float = 0.1
    seed: int = 0
    device: str = "cuda"

    def progress(self, step: int, elapsed: float) -> float:
        """Return how much of the run is behind it, from 0 to 1."""
        return min(1.0, max(step / self.steps, elapsed / self.seconds))

    def rate_at(self, progress: float) -> float:
        """Return the learning rate: a short rise, then half a cosine."""
        if progress < WARMUP:
            # the first step learns too
            return self.rate * (progress + 0.1 * WARMUP) / (1.1 * WARMUP)
        fallen = 0.5 + 0.5 * math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))
        return self.rate * (LEAST + (1 - LEAST) * fallen)


def build(kind: str, vocabulary: int, generation: dict[str, Any], **changes: Any) -> PreTrainedModel:
    """Return a fresh float32 model of KINDS; `generation` has the ids of control tokens.

    `changes` replace fields of the configuration. A vocabulary is rounded up to a multiple of 64.
    """
    fields = {**COMMON, **KINDS[kind], **changes}
    layers = fields["num_hidden_layers"]
    full = [(layer + 1) % INTERVAL == 0 or layer + 1 == layers for layer in range(layers)]
    fields.setdefault("layer_types", ["full_attention" if one else "linear_attention" for one in full])
    ids = {name: generation[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fields.update(vocab_size=-(-vocabulary // 64) * 64, **ids)
    if kind == "dense":
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields))
    config = Qwen3_5MoeTextConfig(**fields)
    # one product for each expert: other ways take only some types of numbers, or copy the weights
    config._experts_implementation = "eager"
    return Qwen3_5MoeForCausalLM(config)


def batches(rows: np.ndarray, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield int64 ids [size, width] without end, all rows in a new order in each round."""
    generator = np.random.default_rng(seed)
    order = np.empty(0, np.int64)
    while True:
        while len(order) < size:
            order = np.concatenate((order, generator.permutation(len(rows))))
        yield torch.from_numpy(rows[order[:size]].astype(np.int64))
        order = order[size:]


def optimizer_of(model: torch.nn.Module, run: Run) -> torch.optim.Optimizer:
    """Return AdamW that lets matrices decay, and nothing else."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": run.decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = run.device.startswith("cuda")
    return torch.optim.AdamW(groups, lr=run.rate, betas=(0.9, 0.95), fused=fused)


def train(model: PreTrainedModel, rows: np.ndarray, run: Run) -> list[float]:
    """Train a model on the run's device with all ids as targets; return the losses that were printed.

    Products are of bfloat16, weights and their moments of float32.
    """
    model.to(run.device).train()
    optimizer = optimizer_of(model, run)
    source = batches(rows, run.batch, run.seed)
    losses: list[float] = []
    begun, step, progress = time.monotonic(), 0, 0.0
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = run.rate_at(progress)
        ids = next(source).to(run.device)
        with torch.autocast(run.device.split(":")[0], dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        # waits for the device: a queue of launches is not training that has been done
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value} at step {step}")
        elapsed = time.monotonic() - begun
        progress = run.progress(step, elapsed)
        if step == 1 or step % REPORT == 0 or progress >= 1.0:
            losses.append(value)
            print(f"step {step}: loss {value:.4f}, {elapsed:.1f} s", flush=True)
    return losses


def continuations(model: PreTrainedModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return greedy continuations of `prompts`, up to `count` ids each, with the ends of their turns."""
    model.eval()
    found: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, use_cache=True
        )
        found.append(whole[0, len(prompt) :].tolist())
    return found


def save(model: PreTrainedModel, out: Path, texts: Path) -> None:
    """Write a bfloat16 folder: safetensors and config of the model, and the text files of `texts`."""
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False
    model.save_pretrained(out, max_shard_size="1GB")
    # behind the model, whose own generation config says less
    for path in sorted(texts.iterdir()):
        shutil.copyfile(path, out / path.name)


def make(kind: str, data: Path, out: Path, run: Run, **changes: Any) -> list[float]:
    """Train a model of `kind` on the files in `data`, save it in `out`, and return the losses printed."""
    texts = data / "tokenizer"
    generation = json.loads((texts / "generation_config.json").read_text(encoding="utf-8"))
    described = json.loads((texts / "tokenizer.json").read_text(encoding="utf-8"))
    highest = max(described["model"]["vocab"].values())
    highest = max(highest, *(token["id"] for token in described["added_tokens"]))
    rows = np.load(data / "rows.npy")
    torch.manual_seed(run.seed)
    model = build(kind, highest + 1, generation, **changes)
    count = sum(weight.numel() for weight in model.parameters())
    print(
        f"{kind}: {count / 1e6:.2f} million parameters, {rows.shape[0]} rows of {rows.shape[1]} ids",
        flush=True,
    )
    losses = train(model, rows, run)
    # what is shown is what is saved: weights as bfloat16 has them
    save(model, out, texts)
    prompts = json.loads((data / "prompts.json").read_text(encoding="utf-8"))
    for prompt, reply in zip(prompts, continuations(model, prompts, SHOWN), strict=True):
        print(f"prompt {prompt}\nreply {reply}", flush=True)
    return losses


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description="Train a tiny Qwen3.5-style model.")
    parser.add_argument("--kind", choices=sorted(KINDS), required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder that data.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=Run.steps, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=Run.seconds, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=Run.batch, help="rows of a step (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=Run.rate, help="highest rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=Run.seed, help="(default: %(default)s)")
    parser.add_argument("--device", default=Run.device, help="(default: %(default)s)")
    given = vars(parser.parse_args())
    kind, data, out = given.pop("kind"), given.pop("data"), given.pop("out")
    make(kind, data, out, Run(**given))


if __name__ == "__main__":
    main()
