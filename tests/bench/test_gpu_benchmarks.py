"""The GPU benchmarks: what they count, what they say of failures, and whole runs of interpreted kernels."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_bench_kit
import gpu_decode
import gpu_docs
import gpu_faults
import gpu_kernel_cases
import gpu_load
import gpu_load_kit
import gpu_speeds
import kernels
from gpu_bench_kit import Bench, Limits, Report, SameScratch, Timing, random_matrix
from gpu_random_model import Wanted, build_random, request, tensor_infos
from hipfire.base.errors import InternalError, ValidationError
from hipfire.checkpoint.source import open_checkpoint
from hipfire.device.pool import device_pool
from hipfire.kernels.gpu.engine import Arithmetic, GpuEngine, GpuLaunch
from hipfire.kernels.gpu.target import INTERPRETED
from hipfire.quant.packing import PACKINGS
from hipfire.quant.registry import format_of
from hipfire.runtime.gpu_load import GpuModel
from hipfire.runtime.identify import read_config
from hipfire.runtime.parity_steps import Plan
from peers.page import markers, replace_block

DEVICE = "cpu" if INTERPRETED else "gpu"
LIMITS = Limits({1 << 20: 100e9, 1 << 22: 200e9}, 1e12)
TINY = Wanted(shape="tiny", fmt="q8", max_seq=64, chunk=4)
DECODE_FLAGS = ["--device", DEVICE, "--shape", "tiny", "--format", "q8", "--limit", "65536", "--rounds", "1"]


@pytest.fixture
def bench() -> Bench:
    return gpu_bench_kit.find_bench(DEVICE, 1)


def quiet(bench: Bench) -> Report:
    return Report("benchmarks/kernels.py", bench, quiet=True)


# the kit


def test_results_of_a_run_lie_where_those_of_the_last_run_lay(bench: Bench) -> None:
    scratch = SameScratch(bench.device)

    def run() -> list[int]:
        scratch.settle(())
        taken = [scratch.take("a", (4,), torch.float32) for _ in range(2)]
        taken.append(scratch.take("a", (4,), torch.int32))
        return [each.data_ptr() for each in taken]

    first = run()
    assert len(set(first)) == 3
    assert run() == first


@pytest.mark.parametrize("layout", ["u4g256", "u4g128h", "u6g256", "o4g32", "i8g32"])
def test_random_weights_keep_the_size_of_activations(bench: Bench, layout: str) -> None:
    torch.manual_seed(0)
    dense = random_matrix(bench, layout, 64, 512).dense()
    product = torch.randn(256, 512, device=bench.device) @ dense.T
    assert product.std().item() == pytest.approx(1.04, rel=0.06)
    if layout != "o4g32":
        assert abs(dense.mean().item()) < 0.05 * dense.std().item()


def test_memory_of_a_captured_run_lives_as_long_as_its_graph(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stand:
        """Captures nothing; its graphs do nothing."""

        def __init__(self, _: torch.device) -> None:
            self.replay = lambda: None

        def warm_up(self, run: Callable[[], None]) -> None:
            run()

        def capture(self, _: Callable[[], object]) -> Stand:
            return self

    def started() -> tuple[Callable[[], None], weakref.ref[Any]]:
        engine = bench.engine()

        def run() -> None:
            engine.settle()
            engine.empty("a", (4,))

        return gpu_bench_kit.captured(bench, run), weakref.ref(engine)

    monkeypatch.setattr(gpu_bench_kit, "Capturer", Stand)
    replay, engine = started()
    replay()
    assert engine() is not None
    del replay
    assert engine() is None


def test_the_copy_limit_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    seconds = iter((1.0, 2.0, 4.0))

    def fake(_: Bench, run: Callable[[], object]) -> Timing:
        run()
        return Timing(next(seconds), 0.0, 0.0, 1)

    monkeypatch.setattr(gpu_bench_kit, "replayed", fake)
    limits = gpu_bench_kit.measure_limits(bench, (1000, 4000), 8)
    assert limits.copies == {1000: 2000.0, 4000: 4000.0}
    assert (limits.copy, limits.matrix) == (4000.0, 2 * 8**3 / 4)


def test_a_timed_run_reports_median_best_and_worst(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    clock = iter((0.0, 3.0, 10.0, 11.0, 20.0, 22.0))
    monkeypatch.setattr(gpu_bench_kit.time, "perf_counter", lambda: next(clock))
    ran: list[int] = []
    timing = gpu_bench_kit.clocked(dataclasses.replace(bench, rounds=3), lambda: ran.append(1), warm=2)
    assert timing == Timing(2.0, 1.0, 3.0, 3)
    assert len(ran) == 5


def test_a_report_names_no_files(monkeypatch: pytest.MonkeyPatch, bench: Bench, tmp_path: Path) -> None:
    words = ["x", "--json", "a/b.json", "--only", "gemv", "--folder=c/d"]
    monkeypatch.setattr(gpu_bench_kit.sys, "argv", words)
    report = quiet(bench)
    report.parts["rows"] = [1]
    report.write(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["command"] == ["benchmarks/kernels.py", "--only", "gemv"]
    assert written["rows"] == [1]


# kernels.py


class Recording(Bench):
    """A device whose engines are kept, and record."""

    def engine(self, arithmetic: Arithmetic = "int8") -> GpuEngine:
        made = super().engine(arithmetic)
        ENGINES.append(made)
        return made


ENGINES: list[GpuEngine] = []
STREAMS = ("gemv", "gemm", "dense", "dequantize ", "rms norm", "rotation 1x", "greedy 1x", "prepare bf16")


def recorded(case: kernels.Case, bench: Bench) -> tuple[gpu_kernel_cases.Work, list[GpuLaunch]]:
    """Return a case's work and what one run of it launches."""
    ENGINES.clear()
    made = Recording(**{field.name: getattr(bench, field.name) for field in dataclasses.fields(Bench)})
    work = case.build(made)
    engine = ENGINES[0]
    engine.record()
    work.run()
    return work, engine.finish().launches


def test_bytes_of_kernels_are_those_of_what_they_read_and_write(bench: Bench) -> None:
    seen = set()
    for case in kernels.cases(kernels.TINY):
        name = f"{case.kernel} {case.name}"
        kind = next((each for each in STREAMS if name.startswith(each)), None)
        if kind is None or kind in seen:
            continue
        seen.add(kind)
        work, launches = recorded(case, bench)
        used = launches[: len(launches) // work.count]
        assert len(launches) == work.count * len(used), name
        nbytes = {t.data_ptr(): t.nbytes for launch in used for t in (*launch.reads, *launch.writes)}
        # small vectors such as a norm's weights and sums of units are not counted
        assert work.nbytes == pytest.approx(sum(nbytes.values()), rel=0.45 if "norm" in name else 0.15), name
    assert seen == set(STREAMS)


def test_products_go_through_different_matrices(bench: Bench) -> None:
    case = next(each for each in kernels.cases(kernels.TINY) if each.kernel == "gemv")
    work, launches = recorded(case, bench)
    codes = {launch.arguments["codes_ptr"].data_ptr() for launch in launches}
    assert len(codes) == work.count == kernels.TINY.matrices
    assert work.operations == 2 * 8 * 32
    full = gpu_kernel_cases._count(kernels.FULL, gpu_kernel_cases.PACKED_LAYOUTS["u4g256"].nbytes(4096, 4096))
    assert full >= 20
    assert full * gpu_kernel_cases.PACKED_LAYOUTS["u4g256"].nbytes(4096, 4096) >= kernels.FULL.working_set


def test_a_row_sets_one_piece_against_the_limits(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr(kernels, "timed", lambda *_: Timing(8e-6, 4e-6, 9e-6, 3))
    case = kernels.Case("gemv", "x", lambda _: gpu_kernel_cases.Work(lambda: None, 4, 200_000, 1_000_000))
    row = kernels.timed_case(bench, case, LIMITS)
    assert row["us"] == pytest.approx(2.0)
    assert row["of_copy"] == pytest.approx(0.5)
    assert row["of_matrix"] == pytest.approx(0.5)
    assert kernels.cells(row) == ["gemv", "x", "2.00", "100", "0.500", "0.5", "0.500"]


def test_a_kernel_that_fails_has_a_row_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Bench) -> gpu_kernel_cases.Work:
        raise RuntimeError("no such luck\nat 0x1234")

    def two(_: kernels.Sizes) -> Iterator[kernels.Case]:
        yield kernels.Case("broken", "case", broken)
        yield kernels.Case("sound", "case", lambda _: gpu_kernel_cases.Work(lambda: None, 1, 1))

    monkeypatch.setattr(kernels, "cases", two)
    flags = ["--device", DEVICE, "--tiny", "--rounds", "1", "--json", str(tmp_path / "k.json")]
    assert kernels.main(flags) == 1
    rows = json.loads((tmp_path / "k.json").read_text())["rows"]
    assert [row.get("error") for row in rows] == ["RuntimeError: no such luck", None]
    assert "| sound" in capsys.readouterr().out
    assert kernels.main([*flags, "--only", "sound"]) == 0


def test_every_kind_of_kernel_runs(bench: Bench) -> None:
    report = quiet(bench)
    kernels.measure(
        report, kernels.TINY, r"^(gemm i|decode attention bf16 depth 20$|prefill attention q8|sample 1x70 t)"
    )
    rows = report.parts["rows"]
    assert [row for row in rows if "error" in row] == []
    assert {row["kernel"] for row in rows} == {"gemm", "decode attention", "prefill attention", "sample"}


# models with random weights


@pytest.mark.parametrize(("fmt", "layout"), [("hf4", "u4g256"), ("mq4", "u4g128h")])
def test_a_random_model_has_the_sizes_of_a_file(fmt: str, layout: str) -> None:
    wanted = request(Wanted(shape="qwen3-8b", fmt=fmt))
    infos = tensor_infos(wanted.config, fmt)
    weights = sum(info.numel for info in infos.values() if len(info.shape) == 2)
    assert weights == pytest.approx(8.19e9, rel=0.001)
    for name, info in infos.items():
        assert info.nbytes == format_of(info.qtype).nbytes(*info.rows_cols), name
    packing = PACKINGS[infos["lm_head.weight"].qtype]
    assert packing.layout.name == layout
    assert wanted.named.require("lm_head.weight", (151936, 4096)).info == infos["lm_head.weight"]


@pytest.fixture(scope="module")
def warm() -> Iterator[gpu_speeds.Measured]:
    """Give a model whose decode step of one sequence is replayed, after a prompt of two tokens."""
    bench = gpu_bench_kit.find_bench(DEVICE, 1)
    model = build_random(bench, TINY)
    settings = gpu_speeds.Settings(2, 4, 1, (2,), 10, 4, 2)
    run = gpu_speeds.Measured(Report("x", bench), settings, model, LIMITS)
    model.runner.prefill(0, run.prompt(2))
    for _ in range(2):
        run.serve(1, 2, 1)
    yield run
    model.close()
    assert model.loaded.counters().live == 0


def test_tokens_fed_on_the_device_are_those_that_are_read(warm: gpu_speeds.Measured) -> None:
    served = [ids[0] for ids in warm.serve(1, 2, 3)]
    step, back = warm.feeder(1, 2)
    recorded = warm.recorded(1)
    recorded.inputs.ids.fill_(1)
    back()
    fed = []
    for _ in served:
        step()
        fed.append(int(recorded.inputs.ids[0]))
    assert fed == served
    assert len(set(served)) > 1
    assert recorded.inputs.rows.tolist() == [[0, 2 + len(served)]]


def test_a_step_is_set_against_the_bytes_of_its_weights(
    monkeypatch: pytest.MonkeyPatch, warm: gpu_speeds.Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    model = warm.model
    # o takes the 64 columns of two heads; q, k and v have 64, 32 and 32 rows; gate, up, down; the head
    assert (model.body, model.head) == (32 * 64 + 128 * 32 + 3 * 32 * 32, 40 * 32)
    assert model.prefill_operations(3) == 2 * (3 * model.body + model.head)
    times = iter((2e-3, 1e-3))
    monkeypatch.setattr(gpu_speeds, "clocked", lambda *_: Timing(next(times), 0.0, 0.0, 1))
    monkeypatch.setattr(gpu_speeds, "replayed", lambda *_: Timing(5e-5, 0.0, 0.0, 1))
    monkeypatch.setattr(warm, "serve", lambda *_: [])
    found = warm.speed(1, 2)
    floor = model.step_nbytes / 200e9
    # Q8 holds 34 bytes for 32 weights
    assert model.step_nbytes == (model.body + model.head) // 32 * 34
    assert (found["served_tok_s"], found["fed_tok_s"]) == (pytest.approx(5000), pytest.approx(10000))
    assert found["ratio_fed"] == pytest.approx(floor * 10 / 1e-3)
    assert found["ratio_step"] == pytest.approx(floor / 5e-5)
    assert f"{found['launches']} launches of {found['kernels']} kernels" in capsys.readouterr().out


def test_a_part_that_fails_is_told_and_the_others_go_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise InternalError("no graph")

    report = Report("x", bench)
    gpu_decode._attempt(report, "profile", broken)
    assert report.parts["failed"] == {"profile": "InternalError: no graph"}
    assert "profile FAILED" in capsys.readouterr().out


def test_launches_of_a_kernel_are_told_apart_by_their_sizes() -> None:
    x, out = torch.zeros(2, 64), torch.zeros(2, 8)
    options: dict[str, Any] = {"constants": {}, "options": {}, "kernel": None, "grid": (1,)}
    gemv = GpuLaunch("_gemv", arguments={"rows": 8, "units": 2}, reads=(x,), writes=(out,), **options)
    assert gpu_speeds._label(gemv) == "gemv 8x64 -> 2x8"
    timing = Timing(1e-6, 0.0, 0.0, 1)
    row = gpu_speeds._share("gemv 8x64 -> 2x8", [gemv, gemv], timing, LIMITS)
    assert row["of_copy"] == pytest.approx(2 * (x.nbytes + out.nbytes) / 1e-6 / 200e9)
    chosen = dataclasses.replace(gemv, arguments={"ids_ptr": x})
    assert gpu_speeds._share("dequantize", [chosen], timing, LIMITS)["gb_s"] is None


def test_the_tape_of_a_random_model_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "d.json"
    flags = ["--parts", "tape", "--depth", "9", "--chunk", "4", "--positions", "2", "--json", str(path)]
    assert gpu_decode.main([*DECODE_FLAGS, *flags]) == 0
    found = json.loads(path.read_text())["tape"]
    assert [each["contracts"]["faults"] for each in found] == [[], []]
    assert found[0]["sequence_hash"] != found[1]["sequence_hash"]
    assert found[0]["sequence_hash"] in capsys.readouterr().out


def test_a_difference_between_arms_is_told() -> None:
    arm = {"eager": {"logits": {"bytes": 4}, "kv": {"bytes": 8}}}
    found: dict[str, Any] = {"exact": False, "equal": {"kv": False}, "arms": arm, "route_proven": True}
    found |= {"guard": {"eager": {"equal": False}}, "first_divergence": {"position": 3}}
    text = gpu_decode._verdict(Plan(), found)
    assert "DIFFERENT" in text
    assert "guards CHANGED" in text
    assert "'position': 3" in text


@pytest.mark.parametrize("flags", [["--parts", "decode,speed"], ["--format", "q2"]])
def test_unknown_parts_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_decode.main([*DECODE_FLAGS, *flags])


# gpu_load.py


def test_a_synthetic_file_holds_a_model_of_finite_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.hfq"
    size = gpu_load_kit.write_model(path, gpu_load_kit.TINY.small, "q8")
    with open_checkpoint(path) as checkpoint:
        _, config = read_config(checkpoint)
        assert config.sizes.vocab_size == 40
        assert size > sum(info.nbytes for info in checkpoint.tensors.values())
        for name, info in checkpoint.tensors.items():
            data = torch.frombuffer(bytearray(checkpoint.raw(name)), dtype=torch.uint8)
            values = format_of(info.qtype).decode(data, *info.rows_cols)
            assert values.isfinite().all(), name
            assert 0.5 < values.std() * info.rows_cols[1] ** 0.5 < 2, name


def test_a_copy_moves_every_byte_of_a_file(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "m.hfq"
    gpu_load_kit.write_model(path, gpu_load_kit.TINY.small, "q8")
    monkeypatch.setattr(gpu_load, "PIECE_BYTES", 100)
    targets: list[torch.Tensor] = []

    class Kept(gpu_load.Measured):
        def _send(self, data: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
            if not targets or targets[-1] is not target:
                targets.append(target)
            super()._send(data, target, *rest)

    Kept(quiet(bench), gpu_load_kit.TINY, "q8", tmp_path)._copy(path)
    with open_checkpoint(path) as checkpoint:
        stored = [bytes(checkpoint.raw(name)) for name in checkpoint.tensors]
    assert [bytes(target.cpu().numpy()) for target in targets] == stored


def test_loads_are_set_against_copies(monkeypatch: pytest.MonkeyPatch, bench: Bench, tmp_path: Path) -> None:
    loads = gpu_load.Measured(quiet(dataclasses.replace(bench, rounds=3)), gpu_load_kit.TINY, "q8", tmp_path)
    copies, seconds = iter((1.0, 9.0, 2.0)), iter((5.0, 4.0, 3.0))
    monkeypatch.setattr(loads, "_copy", lambda _: next(copies))
    monkeypatch.setattr(loads, "_load", lambda _: (next(seconds), 0.1))
    loads.rate(100_000)
    found = loads.report.parts["rate"]
    assert found["ratio"] == pytest.approx(0.5)
    assert found["nbytes"] == pytest.approx(100_000, rel=0.15)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind_by_failed_loads(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = gpu_load.Measured(quiet(bench), gpu_load_kit.TINY, "q8", tmp_path)
    # the capture is a case of its own
    monkeypatch.setattr(gpu_faults.Faults, "_captures", lambda *_: [])
    gpu_faults.Faults(loads).run()
    found = loads.report.parts["injection"]
    assert found["pass"]
    kinds = {row["constructor"]: row["sites"] for row in found["rows"]}
    assert kinds["load of a damaged tensor"] == 14
    assert kinds["load, caches in one piece"] > 40
    assert len(found["rows"]) == sum(kinds.values())


def test_a_load_that_keeps_memory_fails_its_rows(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = gpu_load.Measured(quiet(bench), gpu_load_kit.TINY, "q8", tmp_path)
    path, pool = tmp_path / "m.hfq", device_pool(bench.device)
    gpu_load_kit.write_model(path, gpu_load_kit.TINY.small, "q8")
    kept: list[object] = []

    def leaking(*arguments: Any) -> Any:
        kept.append(pool.take(1000))
        return build(*arguments)

    build = gpu_load_kit.build
    with open_checkpoint(path) as checkpoint, torch.inference_mode():
        monkeypatch.setattr(gpu_load_kit, "build", leaking)
        rows = gpu_faults.Faults(loads)._damages(checkpoint, pool)
    assert not any(row["pass"] for row in rows)
    assert gpu_faults._summary(rows)[0][2] == "0 of 14"


def test_counters_after_cycles_are_compared(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = gpu_load.Measured(quiet(bench), gpu_load_kit.TINY, "q8", tmp_path)
    monkeypatch.setattr(loads, "use", lambda _: [])
    loads.cycles(3)
    found = loads.report.parts["cycles"]
    assert found["pass"]
    assert found["cycles"][2]["pool_live"] == 0 < found["cycles"][2]["pool_live_bytes_while_loaded"]
    # a model that is not closed is seen
    monkeypatch.setattr(GpuModel, "close", lambda self: None)
    loads.cycles(3)
    assert not loads.report.parts["cycles"]["pass"]


# gpu_docs.py


def reports(bench: Bench) -> list[dict[str, Any]]:
    """Return a made-up report of each program."""
    row = {"kernel": "gemv", "case": "8x32", "us": 1.25, "gb_s": 100.0, "of_copy": 0.5}
    decode = {"batch": 1, "depth": 512, "fed_tok_s": 700.4, "served_tok_s": 650.0, "ratio_fed": 0.654}
    decode |= {"launches": 300, "kernels": 12}
    made: dict[str, dict[str, Any]] = {
        "kernels.py": {"rows": [row]},
        "gpu_decode.py": {
            "model": {"shape": "qwen3-8b", "format": "hf4"},
            "decode": decode,
            "batch": {**decode, "batch": 32, "times_one_fed": 12.5},
            "parity": [{"exact": True}, {"exact": False}],
        },
        "gpu_load.py": {"injection": {"rows": [{"pass": True}, {"pass": False}]}},
    }
    found = []
    for program, parts in made.items():
        report = Report(f"benchmarks/{program}", bench, quiet=True)
        report.parts = {"limits": LIMITS.as_json(), **parts}
        found.append(report.as_json())
    return found


def test_reports_become_blocks_of_the_page(bench: Bench, tmp_path: Path) -> None:
    page, files = tmp_path / "page.md", []
    begin, end = markers(gpu_docs.KERNELS)
    page.write_text(f"before\n\n{begin}\nold\n{end}\n\n" + "\n".join(markers(gpu_docs.MODELS)) + "\nafter\n")
    for index, report in enumerate(reports(bench)):
        files.append(tmp_path / f"{index}.json")
        files[-1].write_text(json.dumps(report))
    assert gpu_docs.main([*map(str, files), "--page", str(page)]) == 0
    text = page.read_text()
    assert "| gemv | 8x32 | 1.2 | 100 | 0.50 |  |  |" in text
    assert "| decode, batch 1, depth 512, share of a copy of the weights | 0.65 |" in text
    assert "| decode, batch 32, depth 512, times batch 1 | 12.50 |" in text
    assert "| three ways of running a step | different |" in text
    assert "| injected faults that left nothing behind | 1 of 2 |" in text
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    replace_block(page, "again", gpu_docs.KERNELS)


def test_a_table_with_a_failed_kernel_is_not_published(bench: Bench) -> None:
    broken = reports(bench)[0]
    broken["rows"].append({"kernel": "gemm", "case": "x", "error": "RuntimeError: no"})
    with pytest.raises(ValidationError, match="gemm x failed"):
        gpu_docs.blocks([broken])


def test_other_files_are_no_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    assert gpu_docs.main([str(path), "--page", str(tmp_path / "page.md")]) == 1
    assert "is not a report" in capsys.readouterr().err
