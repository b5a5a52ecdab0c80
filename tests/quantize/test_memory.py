"""Peak memory of a conversion, measured in a process of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import torch

MEMORY_SCRIPT = """
import json, sys
from pathlib import Path
import torch
from hipfire.quantize.pipeline import quantize
torch.set_num_threads(1)
def peak():
    # of this program alone: rusage also counts what the parent held when it forked
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
before = peak()
report = quantize(folder, "hf4", out)
print(json.dumps([before, peak(), report.total.weights]))
"""


def write_large(folder: Path) -> int:
    """Write a llama of about 200 MB in bfloat16, in pieces; return the size of its weights."""
    hidden, vocab, wide = 1024, 24000, 16384
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "lm_head.weight": [vocab, hidden],
              "model.norm.weight": [hidden]}  # fmt: skip
    layer = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
    layer |= {f"self_attn.{part}_proj": [hidden, hidden] for part in "qkvo"}
    layer |= {"mlp.gate_proj": [wide, hidden], "mlp.up_proj": [wide, hidden], "mlp.down_proj": [hidden, wide]}
    shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    piece = block.view(torch.uint8).numpy().tobytes()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for begin in range(0, end, len(piece)):
            stream.write(piece[: end - begin])
    config = {"model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": wide,
              "num_hidden_layers": 1, "num_attention_heads": 8, "rms_norm_eps": 1e-6}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return end


def test_peak_memory_does_not_follow_the_model(tmp_path: Path) -> None:
    size = write_large(tmp_path / "large")
    assert size > 200e6
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, tmp_path / "large", tmp_path / "m"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after, weights = json.loads(done.stdout)
    assert 2 * weights == size
    # chunks of one size and their temporaries, and nothing that grows with the model
    assert after - before < 120e6
    assert after < 900e6
