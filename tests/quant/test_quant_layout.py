"""Row by row and flat packing, told apart by size; sizes that fit neither; slices of rows."""

from __future__ import annotations

import numpy as np
import pytest
import quant_reference as slow
import torch

from hipfire.base.errors import ArtifactError, UnsupportedError, ValidationError
from hipfire.base.qtypes import QType, flat_nbytes, packed_nbytes
from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import all_formats, format_of

FLAT = ["HFQ4G128", "HFQ4G256", "HFQ6G256", "Q8F16"]
ROTATED_FLAT = ["MQ4G256", "MQ6G256"]


def weights(rows: int, cols: int) -> np.ndarray:
    rng = np.random.default_rng(rows * 10_000 + cols)
    # each row has a level of its own, so that a group over a row's end cannot pass for a right one
    return (rng.standard_normal((rows, cols)) + 10 * rng.standard_normal((rows, 1))).astype(np.float32)


def blob(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize(("rows", "cols"), [(9, 704), (5, 300), (40, 33), (7, 4), (5, 200)])
def test_old_flat_data_is_read(name: str, rows: int, cols: int) -> None:
    found = format_of(QType[name])
    data = slow.pack_flat(weights(rows, cols), name)
    got = found.decode(blob(data), rows, cols)
    assert np.array_equal(got.numpy(), slow.unpack_flat(data, name, rows, cols))
    assert torch.equal(found.dense(blob(data), rows, cols), got)
    assert found.has_whole_rows(len(data), rows, cols) == (cols % found.group == 0)


@pytest.mark.parametrize("name", FLAT)
def test_row_by_row_data_is_read_without_its_padding(name: str) -> None:
    found = format_of(QType[name])
    values = weights(6, 709)
    data = slow.pack_rows(values, name)
    assert len(data) != flat_nbytes(found.qtype, 6, 709)
    want = np.concatenate(
        [slow.unpack_flat(slow.pack_flat(row, name), name, 1, 709) for row in values.reshape(6, 1, 709)]
    )
    assert np.array_equal(found.decode(blob(data), 6, 709).numpy(), want)
    assert found.has_whole_rows(len(data), 6, 709)


def test_flat_groups_straddle_rows_and_row_by_row_groups_do_not() -> None:
    rng = np.random.default_rng(17)
    values = (rng.uniform(-1, 1, (2, 704)) * [[0.01], [100.0]]).astype(np.float32)
    found = format_of(QType.HFQ4G128)
    assert found.encode is not None
    ours = found.decode(found.encode(torch.from_numpy(values)), 2, 704).numpy()
    old = found.decode(blob(slow.pack_flat(values, "HFQ4G128")), 2, 704).numpy()
    assert np.abs(ours - values)[0].max() < 0.001
    assert np.abs(old - values)[0, :640].max() < 0.001
    assert np.abs(old - values)[0, 640:].max() > 1.0


@pytest.mark.parametrize("name", FLAT)
def test_where_both_packings_have_one_size_ours_is_read(name: str) -> None:
    found = format_of(QType[name])
    cols = found.group - 1
    assert packed_nbytes(found.qtype, 2, cols) == flat_nbytes(found.qtype, 2, cols)
    values = weights(2, cols)
    assert found.encode is not None
    data = found.encode(torch.from_numpy(values))
    got = found.decode(data, 2, cols)
    assert torch.equal(got[1:], found.decode(data[found.group_bytes :], 1, cols))
    assert float((got - torch.from_numpy(values)).abs().max()) < 0.5


@pytest.mark.parametrize("name", FLAT + ROTATED_FLAT)
@pytest.mark.parametrize("cols", [255, 704])
def test_a_vector_of_any_length_is_one_row(name: str, cols: int) -> None:
    found = format_of(QType[name])
    data = slow.pack_flat(weights(1, cols), name)
    want = slow.unpack_flat(data, name, 1, cols, original=found.rotated)
    assert np.array_equal(found.dense(blob(data), 1, cols).numpy(), want)


@pytest.mark.parametrize("name", ROTATED_FLAT)
@pytest.mark.parametrize(("rows", "cols"), [(64, 4), (100, 4), (3, 300)])
def test_flat_rotated_data_is_read_in_the_original_basis_only(name: str, rows: int, cols: int) -> None:
    found = format_of(QType[name])
    values = weights(rows, cols)
    data = slow.pack_flat(values, name)
    got = found.dense(blob(data), rows, cols)
    assert np.array_equal(got.numpy(), slow.unpack_flat(data, name, rows, cols, original=True))
    assert np.linalg.norm(got.numpy() - values) / np.linalg.norm(values) < 0.12
    with pytest.raises(UnsupportedError, match=f"{name} rows of {cols} columns"):
        found.decode(blob(data), rows, cols)


@pytest.mark.parametrize("name", ROTATED_FLAT)
def test_row_by_row_rotated_data_with_short_rows_is_read(name: str) -> None:
    found = format_of(QType[name])
    values = weights(4, 300)
    data = slow.pack_rows(values, name)
    want = [slow.unpack_flat(slow.pack_flat(row, name), name, 1, 300, original=True)[0] for row in values]
    assert np.array_equal(found.dense(blob(data), 4, 300).numpy(), np.array(want))


@pytest.mark.parametrize("name", FLAT + ROTATED_FLAT)
def test_a_size_that_fits_neither_packing_names_both(name: str) -> None:
    found = format_of(QType[name])
    by_row, flat = found.nbytes(9, 700), flat_nbytes(found.qtype, 9, 700)
    assert by_row != flat
    for wrong in (by_row + 1, flat - 1, 0):
        with pytest.raises(ArtifactError) as caught:
            found.dense(torch.zeros(wrong, dtype=torch.uint8), 9, 700)
        for part in (name, "[9, 700]", str(by_row), str(flat), f"{wrong} are stored"):
            assert part in caught.value.line()


@pytest.mark.parametrize("found", all_formats(), ids=lambda found: found.name)
def test_wrong_sizes_are_refused_by_every_format(found: WeightFormat) -> None:
    right = found.nbytes(3, 512)
    for wrong in (right - 1, right + found.group_bytes):
        with pytest.raises(ArtifactError, match=f"takes {right} bytes but {wrong} are stored"):
            found.decode(torch.zeros(wrong, dtype=torch.uint8), 3, 512)
    with pytest.raises(ValidationError, match="float32"):
        found.decode(torch.zeros(right), 3, 512)
    with pytest.raises(ValidationError, match=r"\[-3, -512\]"):
        found.decode(torch.zeros(right, dtype=torch.uint8), -3, -512)


@pytest.mark.parametrize("name", ["MQ4G256V2", "MQ6G256V2", "GGUF_Q4_K", "GGUF_Q8_0"])
def test_formats_of_whole_blocks_refuse_short_rows(name: str) -> None:
    found = format_of(QType[name])
    with pytest.raises(ArtifactError, match=f"blocks of {found.group} weights, which 700 columns are not"):
        found.dense(torch.zeros(found.nbytes(2, 700), dtype=torch.uint8), 2, 700)


def test_data_that_starts_at_an_odd_byte_is_read() -> None:
    for found in all_formats():
        data = torch.arange(found.nbytes(2, 512), dtype=torch.int32).remainder(97).to(torch.uint8)
        shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), data))[1:]
        assert torch.equal(found.decode(shifted, 2, 512), found.decode(data, 2, 512))
