"""Checkpoints of a real hybrid model: a resumed prompt has the bytes of one that was computed anew."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from core_kit import GREEDY, OPEN_TEMPLATE

from hipfire.base.sampling import GenerationParams
from hipfire.cache.prefix import common_prefix
from hipfire.engine.core import CoreLimits, EngineCore
from hipfire.engine.slots import SlotTable
from hipfire.engine.turn import Delta, Done, Started, TurnKey, TurnRequest
from hipfire.layers.context import Segment
from hipfire.runtime.load import LoadedModel, LoadOptions, load_model
from hipfire.runtime.runner import Runner
from tiny_models import IM_END, tokenizer_text

FIELDS: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "max_position_embeddings": 512, "eos_token_id": IM_END, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(5)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**FIELDS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.02 if "norm" in name else 0.3))
        # greedy replies have the length that is asked for
        model.lm_head.weight[IM_END:] = 0.0
    model.save_pretrained(made)
    (made / "tokenizer.json").write_text(tokenizer_text(), encoding="utf-8")
    config = {"eos_token": "<|im_end|>", "chat_template": OPEN_TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def loaded_of(folder: Path, residency: Any, slots: int) -> LoadedModel:
    options = LoadOptions(
        kv_cache="f32", max_seq=512, slots=slots, residency=residency, prefill_chunk=24, device="cpu"
    )
    return load_model(folder, options)


def read(runner: Runner, slots: SlotTable, number: int, prompt: list[int], start: int) -> torch.Tensor:
    """Compute a prompt as the core does; returns the last token's logits."""
    logits = torch.empty(0)
    while start < len(prompt):
        count = slots.room(number, min(runner.chunk, len(prompt) - start))
        logits = runner.step([(Segment(number, start, count), prompt[start : start + count])])[0]
        start += count
        slots.computed(number, start)
    return logits


def test_resumed_prompts_have_the_bytes_of_cold_ones(folder: Path) -> None:
    runner, cold = (loaded_of(folder, "panels", slots).runner for slots in (3, 1))
    table = SlotTable(runner, 12 * runner.cache.states.nbytes // 3, 20)  # type: ignore[union-attr]
    chance = random.Random(9)
    said = [[chance.randrange(256) for _ in range(60)]]
    reused = resumed = 0
    for turn in range(24):
        before = chance.choice(said)
        kept = chance.choice([len(before), chance.randrange(1, len(before) + 1)])
        prompt = [*before[:kept], *(chance.randrange(256) for _ in range(chance.randrange(1, 30)))]
        number = table.claim(prompt).slot
        start = table.begin(number, list(prompt), [len(prompt) - 3])
        assert start <= max(common_prefix(prompt, other) for other in said)
        reused, resumed = reused + start, resumed + (start > 0)
        logits = read(runner, table, number, prompt, start)
        assert torch.equal(logits, cold.prefill(0, prompt)), f"turn {turn} from {start} of {len(prompt)}"
        whole = list(prompt)
        for _ in range(chance.randrange(4)):
            token = int(logits.argmax())
            table._slots[number].tokens.append(token)
            logits = runner.decode(number, token, len(whole))
            assert torch.equal(logits, cold.decode(0, token, len(whole)))
            whole.append(token)
            table.computed(number, len(whole))
        table.release(number, keep=chance.random() < 0.8)
        table.check()
        said.append(whole)
    # most turns begin with something that is there
    assert resumed > 12
    assert reused > 600


class Talk:
    """A conversation with a core."""

    def __init__(self, loaded: LoadedModel, **limits: Any) -> None:
        self.core = EngineCore(loaded, CoreLimits(**limits))
        self.turns = 0

    def say(self, *messages: str) -> tuple[str, Started]:
        """Return the reply, thoughts included, and what was cached."""
        roles = ("user", "assistant")
        spoken = tuple({"role": roles[n % 2], "content": text} for n, text in enumerate(messages))
        self.turns += 1
        key, events = TurnKey(f"{self.turns}", 1), []
        generation = GenerationParams(max_tokens=8)
        self.core.submit(
            TurnRequest(key, messages=spoken, sampling=GREEDY, generation=generation), events.append
        )
        while self.core.step():
            pass
        self.core.commit(key)
        assert isinstance(events[-1], Done), events[-1]
        self.core.integrity_check()
        [started] = [event for event in events if isinstance(event, Started)]
        return "".join(event.text for event in events if isinstance(event, Delta)), started


def test_a_conversation_computes_its_suffixes_and_says_what_a_cold_one_says(folder: Path) -> None:
    talk = Talk(loaded_of(folder, "decoded", 2), state_interval=64)
    question = "tell me a story that is long enough " * 5
    talks = [
        (question,),
        (question, "once", "and then?"),
        (question, "once", "and then?", "well", "go on"),
        # edited, cut short, and asked again
        (question, "once", "and when?"),
        (question,),
        (question, "once", "and then?", "well", "go on"),
    ]
    cached = []
    for messages in talks:
        text, started = talk.say(*messages)
        assert text == Talk(loaded_of(folder, "decoded", 1), state_budget=0).say(*messages)[0]
        cached.append(started.cached_tokens)
        assert cached[-1] == 0 or started.prompt_tokens - cached[-1] < 90
    assert cached[0] == 0
    assert all(cached[1:])
