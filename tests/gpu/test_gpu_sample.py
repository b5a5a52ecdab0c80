"""The sampler on a GPU, or interpreted, against its reference and the host's sampler."""

from __future__ import annotations

import pytest
import torch
from gpu_kit import DEVICE, Poisoned, engine

from hipfire.base.sampling import SamplingParams
from hipfire.kernels.gpu import sample, sample_cuts
from hipfire.kernels.sample import (
    NO_TOKEN,
    SampleStages,
    greedy_ref,
    pack_settings,
    penalize,
    sample_ref,
    stages,
)
from hipfire.runtime.sampler import Sampler

PARAMS = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.6),
    "min_p": SamplingParams(min_p=0.1),
    "both": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02),
    "greedy": SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
    "penalties": SamplingParams(repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.2),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a small vocabulary several chunks, the last of them short."""
    monkeypatch.setattr(sample_cuts, "CHUNK", 256)
    monkeypatch.setattr(sample_cuts, "_BLOCK", 256)


def _logits(rows: int, size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, size, generator=generator)


def _run(
    logits: torch.Tensor,
    params: list[SamplingParams],
    draws: list[float] | torch.Tensor,
    history: torch.Tensor | None = None,
    vocabulary: int | None = None,
    needed: SampleStages | None = None,
) -> list[int]:
    scratch = Poisoned()
    ids = sample.sample(
        engine(scratch=scratch),
        logits.to(DEVICE),
        pack_settings(params).to(DEVICE),
        torch.as_tensor(draws, dtype=torch.float32).to(DEVICE),
        None if history is None else history.to(DEVICE),
        vocabulary,
        stages(params) if needed is None else needed,
    )
    scratch.check_guards()
    assert ids.dtype == torch.int64
    return ids.tolist()


def _wanted(
    logits: torch.Tensor,
    params: list[SamplingParams],
    draws: list[float] | torch.Tensor,
    history: torch.Tensor | None = None,
    vocabulary: int | None = None,
) -> list[int]:
    shares = torch.as_tensor(draws, dtype=torch.float32)
    return sample_ref(logits, pack_settings(params), shares, history, vocabulary).tolist()


# draws away from the edges between tokens, where float32 and float64 may part
DRAWS = (0.0, 0.4111, 0.9871)


@pytest.mark.parametrize("name", PARAMS)
def test_draws_are_the_references(name: str) -> None:
    params = [PARAMS[name]] * 3
    logits = _logits(3, 301, seed=len(name))
    history = torch.tensor([[5, 7, 5, 300, NO_TOKEN], [1, 1, 1, 1, 1], [NO_TOKEN] * 5])
    assert _run(logits, params, DRAWS, history) == _wanted(logits, params, DRAWS, history)


@pytest.mark.parametrize("size", [1, 31, 256, 257])
def test_rows_of_different_requests_in_one_batch(size: int) -> None:
    params = [PARAMS[name] for name in ("hot", "top_k", "top_p")]
    logits = _logits(3, size, seed=1)
    draws = torch.linspace(0.03, 0.97, 3)
    needed = SampleStages()
    assert _run(logits, params, draws, needed=needed) == _wanted(logits, params, draws)


def test_a_row_does_not_depend_on_its_neighbors() -> None:
    params = [PARAMS["both"], PARAMS["hot"], PARAMS["both"]]
    logits, draws = _logits(3, 301, seed=2), [0.31, 0.62, 0.31]
    logits[2] = logits[0]
    together = _run(logits, params, draws, needed=SampleStages())
    assert together[0] == together[2]
    for row in range(2):
        one = slice(row, row + 1)
        alone = _run(logits[one], params[one], draws[one], needed=SampleStages())
        assert alone == together[one]


def test_any_top_k() -> None:
    params = [SamplingParams(top_k=top_k, temperature=2.0) for top_k in (-1, 0, 1, 2, 299, 300, 301, 10**9)]
    logits = _logits(1, 300, seed=3, scale=1.0).repeat(8, 1)
    draws = [0.99999] * 8
    drawn = _run(logits, params, draws)
    assert drawn == _wanted(logits, params, draws)
    assert drawn[2] == int(logits[0].argmax())


def test_equal_logits_are_kept_by_the_smaller_id() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 200], logits[0, 3] = -0.0, -1.0
    # ids but 3 are equal: the first hundred of them are 0 .. 100; the last two cuts are in the second chunk
    cases = (
        (SamplingParams(top_k=100), 0.0, 0),
        (SamplingParams(top_k=100), 0.9999, 100),
        (SamplingParams(top_k=100, top_p=0.5), 0.07, 4),
        (SamplingParams(top_k=100, top_p=0.497), 0.9999, 50),
        (SamplingParams(top_k=290), 0.9999, 290),
        (SamplingParams(top_p=0.9307), 0.9999, 279),
    )
    params, draws, tokens = (list(part) for part in zip(*cases, strict=True))
    rows = logits.repeat(len(cases), 1)
    assert _wanted(rows, params, draws) == tokens
    assert _run(rows, params, draws) == tokens


def test_cuts_leave_nothing_else_to_draw() -> None:
    logits = _logits(1, 300, seed=4, scale=1.0)
    order = logits[0].argsort(descending=True)
    weights = logits[0].double().softmax(0)[order].cumsum(0)
    cases = (
        (SamplingParams(top_k=7), 7),
        (SamplingParams(top_p=0.3), int((weights < 0.3).sum()) + 1),
        (SamplingParams(top_p=0.0), 1),
        (SamplingParams(top_k=7, top_p=0.0), 1),
    )
    # the first and the last draw of each case fall on the smallest and the largest id of what is left
    params = [params for params, _ in cases for _ in range(2)]
    drawn = _run(logits.repeat(8, 1), params, [0.0, 0.99999] * 4)
    for case, (_, count) in enumerate(cases):
        kept = order[:count].tolist()
        assert drawn[2 * case : 2 * case + 2] == [min(kept), max(kept)]


def test_greedy_takes_the_smallest_of_equal_ids() -> None:
    logits = _logits(3, 300, seed=5).clamp(max=2.0)
    logits[0, :260] -= 9.0
    wanted = greedy_ref(logits)
    assert wanted[0] >= 260
    scratch = Poisoned()
    assert torch.equal(sample.greedy(engine(scratch=scratch), logits.to(DEVICE)).cpu(), wanted)
    scratch.check_guards()
    params = [
        SamplingParams(temperature=temperature, top_k=2, top_p=0.5, min_p=0.1)
        for temperature in (0.0, 1e-5, 5e-324)
    ]
    assert _run(logits, params, [0.9] * 3, needed=SampleStages()) == wanted.tolist()


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    logits = _logits(2, 300, seed=6)
    logits[:, 260:] = 50.0
    params = [PARAMS["plain"], PARAMS["both"]]
    drawn = _run(logits, params, [0.99999, 0.4], vocabulary=260)
    assert drawn == _wanted(logits, params, [0.99999, 0.4], vocabulary=260)
    assert sample.greedy(engine(), logits.to(DEVICE), 260).tolist() == greedy_ref(logits, 260).tolist()


def test_unusable_rows_say_so_and_the_others_go_on() -> None:
    logits = _logits(5, 200, seed=7)
    logits[0, 150] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 100:] = -torch.inf
    params = [PARAMS["both"]] * 5
    drawn = _run(logits, params, [0.5] * 5)
    assert drawn[:3] == [NO_TOKEN] * 3
    assert drawn == _wanted(logits, params, [0.5] * 5)
    best = sample.greedy(engine(), logits.to(DEVICE)).tolist()
    assert best[:3] == [NO_TOKEN] * 3
    assert best == greedy_ref(logits).tolist()


def test_penalties_count_every_place_of_a_long_history() -> None:
    params = [
        SamplingParams(repeat_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.3),
        SamplingParams(frequency_penalty=-0.3),
    ]
    settings = pack_settings(params)
    logits = _logits(2, 300, seed=8)
    # longer than a program's part of it, with ids that are no tokens, in wider rows
    history = torch.randint(0, 160, (2, 150), generator=torch.Generator().manual_seed(9))
    history[history == 77] = 300
    history[0, 100] = NO_TOKEN
    wanted = logits.double()
    for row in range(2):
        penalize(wanted[row], settings[row].tolist(), history[row, 3:143])
    scratch = Poisoned()
    batch = sample_cuts.Batch(engine(scratch=scratch), logits.to(DEVICE), None)
    got = sample.penalized(batch, settings.to(DEVICE), history.to(DEVICE)[:, 3:143])
    scratch.check_guards()
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-6, atol=1e-6)
    assert (got.cpu() != logits).sum() > 100


def test_rows_with_a_stride() -> None:
    wide = torch.full((2, 310), torch.nan)
    wide[:, 3:304] = _logits(2, 301, seed=10)
    view = wide.to(DEVICE)[:, 3:304]
    params = [PARAMS["both"]] * 2
    ids = sample.sample(
        engine(), view, pack_settings(params).to(DEVICE), torch.tensor([0.3, 0.8]).to(DEVICE), None
    )
    assert ids.tolist() == _wanted(view.cpu().contiguous(), params, [0.3, 0.8])


@pytest.mark.parametrize("name", PARAMS)
def test_the_reference_draws_as_the_hosts_sampler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = _logits(8, 3000, seed=11)
    history = [5, 7, 5, 2999, 5, 100]
    draws = torch.linspace(0.01, 0.99, 8)
    for row in range(8):
        monkeypatch.setattr("hipfire.runtime.sampler.uniform", lambda *_, row=row: float(draws[row]))
        wanted = Sampler(PARAMS[name], 3000).sample(logits[row], history).id
        got = _wanted(logits[row : row + 1], [PARAMS[name]], draws[row : row + 1], torch.tensor([history]))
        assert got == [wanted]


def test_stages_that_a_batch_needs() -> None:
    assert stages([PARAMS["plain"], PARAMS["greedy"]]) == SampleStages(False, False, False)
    assert stages([PARAMS["greedy"], PARAMS["penalties"]]) == SampleStages(True, False, False)
    assert stages([PARAMS["top_k"], PARAMS["plain"]]) == SampleStages(False, True, False)
    assert stages([PARAMS["plain"], PARAMS["top_p"]]) == SampleStages(False, False, True)
