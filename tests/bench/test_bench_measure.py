"""The timed loops over a tiny model, with a clock that counts the tokens which went through the runner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hipfire.base.errors import ValidationError
from hipfire.bench import measure as module
from hipfire.bench.measure import measure
from hipfire.bench.plan import BenchOptions, BenchPlan, plan_bench
from hipfire.bench.workload import Workload, make_workload
from hipfire.engine.llm import LLM
from hipfire.layers.context import Segment
from hipfire.runtime.load import LoadOptions
from hipfire.runtime.runner import Runner
from recital import recite
from tiny_models import CONTROLS, IM_END, ROWS, TOKENS, tiny_model, write_folder

SLOTS = 3


class Watched:
    """A runner that notes every step, as (slot, position, tokens) per sequence; its clock ticks per token."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.model = runner.model
        self.site = runner.site
        self.steps: list[list[tuple[int, int, list[int]]]] = []
        self.seconds = 0.0

    def clock(self) -> float:
        return self.seconds

    def prefill(self, slot: int, tokens: Sequence[int]) -> torch.Tensor:
        self._note([(slot, 0, list(tokens))])
        return self.runner.prefill(slot, tokens)

    def decode(self, slot: int, token: int, position: int) -> torch.Tensor:
        self._note([(slot, position, [token])])
        return self.runner.decode(slot, token, position)

    def step(self, batch: Sequence[tuple[Segment, Sequence[int]]]) -> torch.Tensor:
        self._note([(segment.slot, segment.start, list(tokens)) for segment, tokens in batch])
        return self.runner.step(batch)

    def _note(self, parts: list[tuple[int, int, list[int]]]) -> None:
        self.steps.append(parts)
        self.seconds += sum(len(tokens) for _, _, tokens in parts)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_folder(tmp_path_factory.mktemp("bench") / "tiny", tiny_model("llama"))
    return LLM(folder, LoadOptions(kv_cache="f32", max_seq=64, slots=SLOTS))


@pytest.fixture
def watched(llm: LLM) -> Any:
    return Watched(llm.loaded.runner)


def plan(prompt: int = 20, **changes: Any) -> BenchPlan:
    few: dict[str, Any] = {"pp": (5,), "ctx": (0,), "tg": 4, "max_tokens": 6, "runs": 3, "warmups": 1}
    return plan_bench(BenchOptions(**{**few, **changes}), prompt, 64)


def workload(prompt: Sequence[int] = TOKENS) -> Workload:
    return Workload(tuple(prompt), tuple(range(200)), (261,))


def test_every_run_is_counted_and_warm_ups_are_not(watched: Any) -> None:
    done = measure(watched, plan(pp=(5, 9)), workload(), clock=watched.clock)
    assert [(each.tokens, each.seconds) for each in done.prefill] == [(5, (5.0,) * 3), (9, (9.0,) * 3)]
    assert [each.seconds for each in done.decode] == [(4.0,) * 3]
    assert len(done.reply.times) == 3
    # a token takes one second
    assert done.prefill[1].tok_s.median == done.decode[0].tok_s.median == 1.0
    prefills = [parts for parts in watched.steps if len(parts[0][2]) > 1]
    assert [len(parts[0][2]) for parts in prefills] == [5] * 4 + [9] * 4 + [len(TOKENS)] * 4


@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_gpu_has_started_is_waited_for(watched: Any, monkeypatch: Any, batch: int) -> None:
    """On a GPU a step returns at once: its time passes while the device is waited for."""
    owed = [0.0]
    card = torch.device("cuda", 0)

    def synchronize(device: torch.device) -> None:
        assert device == card
        watched.seconds, owed[0] = watched.seconds + owed[0], 0.0

    def note(parts: Any) -> None:
        owed[0] += sum(len(tokens) for _, _, tokens in parts)

    def fetch(logits: torch.Tensor) -> torch.Tensor:
        synchronize(card)
        return logits

    watched.site, watched._note = SimpleNamespace(device=card), note
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(module, "fetch", fetch)
    few = plan(batch=(batch,), ctx=(7,), runs=2)
    done = measure(watched, few, workload(), clock=watched.clock)
    assert done.prefill[0].seconds == (5.0, 5.0)
    # the context is not part of it
    assert done.decode[0].seconds == (4.0 * batch,) * 2
    for times in done.reply.times:
        assert (times.prefill, times.first, times.last) == (len(TOKENS), len(TOKENS), len(TOKENS) + 5)


def test_no_warm_up_means_none(watched: Any) -> None:
    measure(watched, plan(warmups=0, runs=1), workload(), clock=watched.clock)
    # one prefill, one run of decode steps, one reply whose last token is not fed
    assert watched.seconds == 5 + 4 + len(TOKENS) + 5


def test_a_context_is_there_but_is_not_timed(watched: Any) -> None:
    done = measure(watched, plan(ctx=(7,), runs=2), workload(), clock=watched.clock)
    assert done.decode[0].seconds == (4.0, 4.0)
    begin = next(index for index, parts in enumerate(watched.steps) if len(parts[0][2]) == 7)
    following = watched.steps[begin + 1 : begin + 1 + 3 * 4]
    # every run starts behind the context again, and feeds the same tokens
    assert [parts[0][1] for parts in following] == [7, 8, 9, 10] * 3
    text = workload().synthetic(11)
    assert watched.steps[begin][0][2] == text[:7]
    assert [parts[0][2][0] for parts in following] == text[7:] * 3


def test_a_batch_decodes_all_slots_in_each_step(watched: Any) -> None:
    done = measure(watched, plan(batch=(3,), ctx=(2,), warmups=0, runs=1), workload(), clock=watched.clock)
    (result,) = done.decode
    assert (result.batch, result.ctx, result.steps, result.seconds) == (3, 2, 4, (12.0,))
    assert result.tok_s.median == 1.0
    batches = [parts for parts in watched.steps if len(parts) > 1]
    assert [[(slot, position) for slot, position, _ in parts] for parts in batches] == [
        [(slot, position) for slot in range(3)] for position in (2, 3, 4, 5)
    ]
    # the sequences differ from each other
    assert len({tuple(parts[slot][2][0] for parts in batches) for slot in range(3)}) == 3


def test_a_reply_takes_the_most_likely_tokens_and_counts_the_sampling(watched: Any, llm: LLM) -> None:
    done = measure(watched, plan(runs=1, warmups=0), workload(), clock=watched.clock)
    fed = [parts[0][2][0] for parts in watched.steps[-5:]]
    history, expected = list(TOKENS), []
    for _ in range(5):
        expected.append(int(llm.loaded.runner.all_logits(0, history)[-1].argmax()))
        history.append(expected[-1])
    assert fed == expected
    assert [parts[0][1] for parts in watched.steps[-5:]] == list(range(len(TOKENS), len(TOKENS) + 5))
    (times,) = done.reply.times
    count = float(len(TOKENS))
    assert (times.prefill, times.first, times.last) == (count, count, count + 5)
    assert (done.reply.prompt_tokens, done.reply.tokens) == (len(TOKENS), 6)


def test_sampling_is_timed_in_the_reply_alone(monkeypatch: pytest.MonkeyPatch, watched: Any) -> None:
    class Slow(module.Sampler):
        def sample(self, logits: torch.Tensor, history: Sequence[int]) -> Any:
            watched.seconds += 100.0
            return super().sample(logits, history)

    monkeypatch.setattr(module, "Sampler", Slow)
    done = measure(watched, plan(runs=1, warmups=0), workload(), clock=watched.clock)
    assert (done.prefill[0].seconds, done.decode[0].seconds) == ((5.0,), (4.0,))
    (times,) = done.reply.times
    count = len(TOKENS)
    assert (times.prefill, times.first, times.last) == (count, count + 100, count + 5 + 600)


def test_an_end_token_does_not_end_a_reply_and_surplus_rows_are_never_drawn() -> None:
    loaded = recite([1, 2, 3], [IM_END, ROWS - 1, 9, 9], max_seq=64)
    watched: Any = Watched(loaded.runner)
    load = Workload((1, 2, 3), (1, 2), loaded.tokenizer.surplus_ids)
    assert ROWS - 1 in load.blocked
    done = measure(watched, plan(3, max_tokens=4, runs=1, warmups=0), load, clock=watched.clock)
    fed = [parts[0][2][0] for parts in watched.steps[-3:]]
    assert fed[0] == IM_END
    assert ROWS - 1 not in fed
    assert done.reply.tokens == 4


def test_progress_names_each_measurement_once_and_costs_no_time(watched: Any) -> None:
    lines: list[str] = []

    def slow(line: str) -> None:
        watched.seconds += 1000.0
        lines.append(line)

    changes = plan(pp=(5, 9), ctx=(0, 7), batch=(1, 2), runs=2)
    done = measure(watched, changes, workload(), clock=watched.clock, progress=slow)
    assert lines == [
        "prefill of 5 tokens", "prefill of 9 tokens",
        "4 decode steps, context 0, batch 1", "4 decode steps, context 0, batch 2",
        "4 decode steps, context 7, batch 1", "4 decode steps, context 7, batch 2",
        f"prompt of {len(TOKENS)} tokens, reply of 6",
    ]  # fmt: skip
    assert max(each for result in done.prefill for each in result.seconds) == 9.0


def test_an_interrupt_ends_the_measuring_at_once(watched: Any) -> None:
    def stop(line: str) -> None:
        if "decode" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(watched, plan(runs=1, warmups=0), workload(), clock=watched.clock, progress=stop)
    assert watched.seconds == 5


def test_more_sequences_than_slots_are_refused(watched: Any) -> None:
    with pytest.raises(ValidationError, match="slot 3"):
        measure(watched, plan(batch=(SLOTS + 1,)), workload(), clock=watched.clock)


def test_synthetic_text_is_the_same_each_time_and_differs_by_stream() -> None:
    load = workload()
    assert load.synthetic(40) == load.synthetic(40)
    assert load.synthetic(40)[:9] == load.synthetic(9)
    assert load.synthetic(40, 1) != load.synthetic(40)
    state = random.getstate()
    load.synthetic(5)
    assert random.getstate() == state
    # a figure of another machine is one of the same tokens
    assert load.synthetic(6) == [168, 151, 84, 51, 102, 80]


def test_synthetic_tokens_are_tokens_of_text(llm: LLM) -> None:
    load = make_workload(llm, "hello")
    tokenizer = llm.loaded.tokenizer
    assert set(load.ordinary) == {*range(256), tokenizer.token_id("AB")}
    assert not {tokenizer.token_id(text) for text in CONTROLS} & set(load.ordinary)
    assert load.blocked == tuple(range(260, ROWS))


def test_the_prompt_goes_through_the_chat_template(llm: LLM) -> None:
    load = make_workload(llm, "hello")
    tokenizer = llm.loaded.tokenizer
    assert tokenizer.decode(load.prompt, skip_special=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_base_model_reads_the_prompt_as_it_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", tiny_model("llama"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text().replace("<|im_", "<|other_")
        (folder / name).write_text(text.replace('"chat_template"', '"unused"'))
    base = LLM(folder, LoadOptions(max_seq=64))
    assert base.loaded.templates is None
    assert make_workload(base, "hello").prompt == tuple(b"hello")
    with pytest.raises(ValidationError, match="no tokens"):
        make_workload(base, "")
