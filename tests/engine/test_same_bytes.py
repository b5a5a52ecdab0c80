"""Equal requests give equal bytes: alone, in company, in chunks of any size, and on rows that others left.

Random models on the compiled engine; every comparison is with a cold run on a core of its own.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.engine.core import CoreLimits, EngineCore
from hipfire.engine.turn import Delta, Event, Ready, Started, TurnKey, TurnRequest
from hipfire.runtime.load import LoadedModel, LoadOptions, load_model
from tiny_models import KINDS, tiny_model, write_folder

WINDOW = 8  # of the sliding layers of the gemma3 kind
MODES = {"llama": "bf16", "qwen3": "q8", "gemma3": "bf16", "qwen3_5": "bf16"}
# whose states stand where checkpoints were taken, and not at every position
RECURRENT = ("qwen3_5",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {kind: write_folder(base / kind, tiny_model(kind, intermediate_size=512)) for kind in KINDS}


def load(folders: dict[str, Path], kind: str, *, slots: int = 4, chunk: int = 64) -> LoadedModel:
    options = LoadOptions(
        kv_cache=MODES[kind], max_seq=300, slots=slots, threads=1, prefill_chunk=chunk, residency="panels"
    )
    return load_model(folders[kind], options)


class Company:
    """A core and the replies that it gave."""

    def __init__(self, loaded: LoadedModel, chunk: int = 64) -> None:
        self.core = EngineCore(loaded, CoreLimits(prefill_chunk=chunk))
        self.events: dict[str, list[Event]] = {}

    def submit(self, name: str, prompt: str, *, tokens: int = 10, **sampling: float) -> None:
        self.events[name] = []
        params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        request = TurnRequest(
            TurnKey(name, 1),
            prompt=prompt,
            sampling=params,
            generation=GenerationParams(max_tokens=tokens, ignore_eos=True, top_logprobs=0),
        )
        self.core.submit(request, self.events[name].append)

    def run(self, *, commit: bool = True) -> None:
        while self.core.step():
            pass
        for name in self.events:
            if commit:
                self.core.commit(TurnKey(name, 1))
        self.core.integrity_check()

    def said(self, name: str) -> tuple[str, tuple[float, ...]]:
        """The text and, more telling, the probability of every token to the last bit."""
        deltas = [event for event in self.events[name] if isinstance(event, Delta)]
        scores = tuple(score.logprob for delta in deltas for score in delta.logprobs)
        return "".join(delta.text for delta in deltas), scores

    def cached(self, name: str) -> int:
        [started] = [event for event in self.events[name] if isinstance(event, Started)]
        return started.cached_tokens

    def ask(self, name: str, prompt: str, **fields: float) -> tuple[str, tuple[float, ...]]:
        self.submit(name, prompt, **fields)  # type: ignore[arg-type]
        self.run()
        return self.said(name)

    def cold(self, prompt: str, **fields: float) -> tuple[str, tuple[float, ...]]:
        """The reply on empty slots."""
        self.core.reset()
        said = self.ask(f"cold {len(self.events)}", prompt, **fields)
        self.core.reset()
        return said


def text(length: int, seed: int = 0) -> str:
    chance = random.Random(seed)
    return "".join(chance.choice("abcdefgh ,.") for _ in range(length))


@pytest.mark.parametrize("kind", KINDS)
def test_company_and_chunks_change_nothing(folders: dict[str, Path], kind: str) -> None:
    prompts = [text(length, seed) for seed, length in enumerate((90, 3, 64, 131, 17))]
    loaded = load(folders, kind)
    alone = Company(loaded)
    want = [alone.cold(prompt) for prompt in prompts]
    assert len(set(want)) == len(prompts)
    for chunk in (7, 33, 64):
        company = Company(loaded, chunk)
        company.core.reset()
        for number, prompt in enumerate(prompts):
            company.submit(str(number), prompt)
            for _ in range(number):
                company.core.step()
        company.run()
        for number in range(4):
            company.core.commit(TurnKey(str(number), 1))
        company.run()
        assert [company.said(str(number)) for number in range(5)] == want


@pytest.mark.parametrize("kind", KINDS)
def test_reused_rows_change_nothing_at_any_length(folders: dict[str, Path], kind: str) -> None:
    company = Company(load(folders, kind, slots=2))
    first, last = text(60, 1), text(20, 2)
    # over the edge of a window where a layer has one, and over a chunk's
    windowed = range(2, WINDOW + 52, 7) if kind == "gemma3" else ()
    for shared in [1, *windowed, WINDOW - 1, WINDOW, WINDOW + 1, 32, 33, 60]:
        prompt = first[:shared] + last
        want = company.cold(prompt)
        company.ask(f"first {shared}", first)
        assert company.ask(f"again {shared}", prompt) == want
        assert company.cached(f"again {shared}") >= shared or kind in RECURRENT


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_within_what_is_cached_is_answered_from_fresh_logits(
    folders: dict[str, Path], kind: str
) -> None:
    company = Company(load(folders, kind, slots=1))
    whole = text(50, 3)
    prompts = [whole, whole[:49], whole[:20], whole[:1]]
    want = [company.cold(prompt) for prompt in prompts]
    company.ask("fill", whole + " and more", tokens=30)
    for number, prompt in enumerate(prompts):
        assert company.ask(str(number), prompt) == want[number]
        cached = company.cached(str(number))
        assert cached == len(prompt) - 1 or (kind in RECURRENT and cached < len(prompt))


def test_a_growing_prompt_is_read_from_where_it_was_left(folders: dict[str, Path]) -> None:
    company = Company(load(folders, "llama", slots=2))
    prompts = [text(30, 4)]
    for turn in range(4):
        prompts.append(prompts[-1] + text(14, 5 + turn))
    want = [company.cold(prompt) for prompt in prompts]
    cached = []
    for prompt, said in zip(prompts, want, strict=True):
        assert company.ask(prompt, prompt) == said
        result = next(event.result for event in company.events[prompt] if isinstance(event, Ready))
        assert result.usage.cached == company.cached(prompt)
        cached.append(company.cached(prompt))
    assert cached == [0, *(len(prompt) for prompt in prompts[:-1])]


def test_more_conversations_than_slots_never_see_one_anothers_rows(folders: dict[str, Path]) -> None:
    chance = random.Random(7)
    loaded = load(folders, "qwen3", slots=3)
    stems = [text(24, seed) for seed in range(3)]
    prompts = [stem + text(chance.randrange(1, 40), 50 + n) for n, stem in enumerate(stems * 3)]
    alone = Company(loaded)
    want = {prompt: alone.cold(prompt, tokens=5) for prompt in prompts}
    company, reused = Company(loaded), 0
    for round_ in range(25):
        chosen = [chance.choice(prompts) for _ in range(chance.randrange(1, 4))]
        names = [f"{round_} {number}" for number in range(len(chosen))]
        for name, prompt in zip(names, chosen, strict=True):
            company.submit(name, prompt, tokens=5)
            for _ in range(chance.randrange(3)):
                company.core.step()
        company.run(commit=False)
        for name, prompt in zip(names, chosen, strict=True):
            assert company.said(name) == want[prompt]
            reused += company.cached(name)
            # some clients vanish, whose rows must not be reused
            end = company.core.commit if chance.random() < 0.7 else company.core.abort
            end(TurnKey(name, 1))
        company.core.integrity_check()
    assert reused > 500


def test_penalties_count_cached_and_fresh_prompt_tokens_alike(folders: dict[str, Path]) -> None:
    company = Company(load(folders, "llama", slots=2))
    prompt = text(40, 9)
    penalties = {"repeat_penalty": 1.5, "frequency_penalty": 0.5, "penalty_window": -1}
    want = company.cold(prompt, **penalties)
    assert want[0] != company.cold(prompt)[0]
    company.ask("fill", prompt[:30])
    assert company.ask("warm", prompt, **penalties) == want
    assert company.cached("warm") == 30


def test_a_seeded_draw_is_the_same_in_company(folders: dict[str, Path]) -> None:
    loaded = load(folders, "llama")
    company = Company(loaded)
    want = company.cold(text(20), temperature=1.5, seed=3)
    for number in range(3):
        company.submit(str(number), text(20, number), temperature=1.5)
    company.submit("seeded", text(20), temperature=1.5, seed=3)
    company.run()
    assert company.said("seeded") == want


def test_two_cores_of_one_file_agree(folders: dict[str, Path]) -> None:
    one, two = (Company(load(folders, "llama", slots=slots)) for slots in (1, 4))
    assert one.ask("a", text(70)) == two.ask("a", text(70))
