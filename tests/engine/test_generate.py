"""The generation loop, driven by a model that recites a fixed script."""

from __future__ import annotations

import time

import pytest
import torch

from hipfire.base.errors import ContextLengthError, InternalError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.engine.generate import Generation
from hipfire.engine.request import Completion, Request
from recital import Recital, recite

GREEDY = SamplingParams(temperature=0.0)
END_ID = 257


def ids(text: str) -> list[int]:
    return recite([0], [0]).tokenizer.encode(text)


def run(
    reply: list[int], generation: GenerationParams | None = None, *, prompt: str = "ask", max_seq: int = 64
) -> tuple[Completion, list[str], Recital]:
    tokens = ids(prompt)
    loaded = recite(tokens, reply, max_seq=max_seq)
    running = Generation(loaded, Request(tuple(tokens), GREEDY, generation or GenerationParams()))
    pieces = list(running)
    assert running.completion is not None
    assert isinstance(loaded.model, Recital)
    return running.completion, pieces, loaded.model


def test_an_end_token_ends_the_reply_and_is_not_shown() -> None:
    completion, pieces, model = run([*ids("yes"), END_ID, *ids("never")])
    assert completion.text == "yes" == "".join(pieces)
    assert completion.finish_reason == "stop"
    assert completion.tokens == (*ids("yes"), END_ID)
    assert completion.prompt_tokens == 3
    # the end token itself is never fed, and every position is fed exactly once
    assert model.fed == list(enumerate([*ids("ask"), *ids("yes")]))


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_max_tokens_is_exact(limit: int) -> None:
    completion, _, model = run(ids("abcdefgh"), GenerationParams(max_tokens=limit))
    assert completion.text == "abcdefgh"[:limit]
    assert len(completion.tokens) == limit
    assert completion.finish_reason == "length"
    # the last token's own cache row is not needed
    assert len(model.fed) == 3 + limit - 1


def test_zero_tokens_reads_the_prompt_only() -> None:
    completion, pieces, model = run(ids("abc"), GenerationParams(max_tokens=0))
    assert (completion.text, completion.tokens, pieces) == ("", (), [])
    assert completion.finish_reason == "length"
    assert len(model.fed) == 3


def test_without_a_limit_the_context_is_the_limit() -> None:
    completion, _, _ = run(ids("x" * 80), max_seq=20)
    assert len(completion.tokens) == 17
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(("limit", "wanted"), [(18, 21), (None, 4)])
def test_what_does_not_fit_is_refused_with_both_numbers(limit: int | None, wanted: int) -> None:
    max_seq = 20 if limit else 3
    loaded = recite(ids("ask"), ids("x"), max_seq=max_seq)
    with pytest.raises(
        ContextLengthError, match=f"{wanted} tokens requested but the context holds {max_seq}"
    ):
        Generation(loaded, Request(tuple(ids("ask")), GREEDY, GenerationParams(max_tokens=limit)))
    assert isinstance(loaded.model, Recital)
    assert loaded.model.fed == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValidationError, match="no tokens"):
        Generation(recite([1], [2]), Request((), GREEDY, GenerationParams()))


@pytest.mark.parametrize("stop", ["lo w", "o", "hello world", "d"])
def test_stop_strings_across_token_borders(stop: str) -> None:
    text = "hello world"
    completion, pieces, _ = run([*ids(text), END_ID], GenerationParams(stop=(stop,)))
    assert completion.text == text[: text.index(stop)] == "".join(pieces)
    assert completion.stop == stop
    assert completion.finish_reason == "stop"


def test_text_held_back_for_a_stop_string_is_given_at_the_end() -> None:
    completion, _, _ = run([*ids("hello w"), END_ID], GenerationParams(stop=("world",)))
    assert completion.text == "hello w"
    assert completion.stop is None


@pytest.mark.parametrize("text", ["🎉 fête", "漢字かな", "👩‍👩‍👧", "🇫🇷"])
def test_characters_split_over_tokens_arrive_whole(text: str) -> None:
    _, pieces, _ = run([*ids(text), END_ID])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_an_unfinished_character_at_the_limit_becomes_one_replacement() -> None:
    completion, _, _ = run(ids("é"), GenerationParams(max_tokens=1))
    assert completion.text == "\ufffd"


def test_ignored_end_tokens_are_never_drawn() -> None:
    completion, _, _ = run([END_ID], GenerationParams(max_tokens=4, ignore_eos=True))
    assert END_ID not in completion.tokens
    assert len(completion.tokens) == 4


def test_min_tokens_counts_the_reply_only() -> None:
    completion, _, _ = run([END_ID], GenerationParams(max_tokens=9, min_tokens=3))
    assert len(completion.tokens) == 4
    assert completion.tokens[3] == END_ID
    assert END_ID not in completion.tokens[:3]


def test_surplus_rows_are_never_drawn() -> None:
    tokens = ids("ask")
    loaded = recite(tokens, [262, 261, 262])
    running = Generation(loaded, Request(tuple(tokens), GREEDY, GenerationParams(max_tokens=3)))
    list(running)
    assert running.completion is not None
    assert all(token < 260 for token in running.completion.tokens)


def test_logprobs_name_the_drawn_token_and_the_best_candidates() -> None:
    completion, _, _ = run([*ids("a"), END_ID], GenerationParams(top_logprobs=2))
    first = completion.logprobs[0]
    assert (first.token, first.top[0].token) == (ids("a")[0], ids("a")[0])
    # one logit of 10 among 263 of 0
    expected = 10 - torch.tensor([10.0] + [0.0] * 263).double().logsumexp(0)
    assert first.logprob == pytest.approx(float(expected), abs=1e-9)
    assert len(first.top) == 2


def test_a_seed_repeats_a_draw_and_is_reported() -> None:
    def draw(seed: int | None) -> Completion:
        tokens = ids("ask")
        sampling = SamplingParams(temperature=2.0, seed=seed)
        request = Request(tuple(tokens), sampling, GenerationParams(max_tokens=12, ignore_eos=True))
        running = Generation(recite(tokens, [5] * 12), request)
        list(running)
        assert running.completion is not None
        return running.completion

    first = draw(None)
    assert draw(first.seed).tokens == first.tokens
    assert draw(first.seed + 1).tokens != first.tokens


def test_logits_that_are_not_numbers_end_this_request_only() -> None:
    tokens = ids("ask")
    loaded = recite(tokens, ids("fine"))
    assert isinstance(loaded.model, Recital)
    original = loaded.model.logits
    loaded.model.logits = lambda hidden, step: original(hidden, step) * float("nan")  # type: ignore[method-assign]
    with pytest.raises(InternalError):
        list(Generation(loaded, Request(tuple(tokens), GREEDY, GenerationParams(max_tokens=2))))
    loaded.model.logits = original  # type: ignore[method-assign]
    running = Generation(loaded, Request(tuple(tokens), GREEDY, GenerationParams(max_tokens=4)))
    assert "".join(running) == "fine"


def test_an_abandoned_stream_cannot_go_on_over_another_ones_cache() -> None:
    tokens = ids("ask")
    loaded = recite(tokens, ids("long answer"))
    request = Request(tuple(tokens), GREEDY, GenerationParams(max_tokens=9))
    first = iter(Generation(loaded, request))
    next(first)
    second = Generation(loaded, request)
    assert "".join(second) == "long answ"
    with pytest.raises(ValidationError, match="newer generation"):
        list(first)


def test_a_generation_runs_once() -> None:
    tokens = ids("ask")
    running = Generation(
        recite(tokens, ids("hi")), Request(tuple(tokens), GREEDY, GenerationParams(max_tokens=2))
    )
    assert "".join(running) == "hi"
    with pytest.raises(ValidationError, match="already run"):
        list(running)
    assert running.completion is not None
    assert running.completion.text == "hi"


@pytest.mark.parametrize("bad", [-1, 2.5, True, "7"])
def test_prompts_hold_token_ids_only(bad: object) -> None:
    with pytest.raises(ValidationError, match="not a token id"):
        Request((5, bad))  # type: ignore[arg-type]


def test_ids_beyond_the_vocabulary_are_refused_before_any_work() -> None:
    loaded = recite([1], [2])
    with pytest.raises(ValidationError, match="from 0 to 263"):
        list(Generation(loaded, Request((5, 264), GREEDY, GenerationParams(max_tokens=1))))
    assert isinstance(loaded.model, Recital)
    assert loaded.model.fed == []


def test_the_time_of_a_slow_reader_does_not_count() -> None:
    tokens = ids("ask")
    running = Generation(
        recite(tokens, ids("abcd")), Request(tuple(tokens), GREEDY, GenerationParams(max_tokens=4))
    )
    for _ in running:
        time.sleep(0.1)
    assert running.completion is not None
    assert running.completion.timings.decode < 0.2
    assert running.completion.timings.decode_tokens == 3
