"""The scan that finds formats, their geometry, and the rule that format files do not know each other."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import hipfire.quant
from hipfire.base.errors import InternalError, UnsupportedError
from hipfire.base.qtypes import BLOCKS, QType
from hipfire.quant.registry import all_formats, collect_formats, format_of

BITS = {
    QType.F16: 16,
    QType.F32: 32,
    QType.BF16: 16,
    QType.Q8F16: 8.5,
    QType.HFQ4G256: 4.25,
    QType.HFQ4G128: 4.5,
    QType.HFQ6G256: 6.25,
    QType.MQ4G256: 4.25,
    QType.MQ6G256: 6.25,
    QType.MQ4G256V2: 4.25,
    QType.MQ6G256V2: 6.25,
    QType.GGUF_Q4_1: 5,
    QType.GGUF_Q6_K: 6.5625,
}


def test_every_declared_qtype_has_its_format() -> None:
    assert {found.qtype for found in all_formats()} == {int(qtype) for qtype in QType}
    for qtype in QType:
        found = format_of(qtype)
        assert (found.qtype, found.name) == (int(qtype), qtype.name)
        assert found.block == BLOCKS[qtype]
    assert [found.qtype for found in all_formats()] == sorted(found.qtype for found in all_formats())


def test_rotated_formats_are_the_mq_family() -> None:
    rotated = {QType(found.qtype) for found in all_formats() if found.rotated}
    assert rotated == {QType.MQ4G256, QType.MQ6G256, QType.MQ4G256V2, QType.MQ6G256V2}


@pytest.mark.parametrize("qtype", BITS, ids=lambda qtype: qtype.name)
def test_bits_per_weight(qtype: QType) -> None:
    assert format_of(qtype).bits_per_weight(4, 1024) == BITS[qtype]


def test_padding_counts_as_bits() -> None:
    found = format_of(QType.HFQ4G128)
    assert found.row_nbytes(704) == 6 * 72
    assert found.nbytes(3, 704) == 3 * 432
    assert found.bits_per_weight(3, 704) == 8 * 432 / 704


@pytest.mark.parametrize("number", [0, 4, 14, 42, 43, 130, 255, -1])
def test_formats_that_hipfire_does_not_know_are_named(number: int) -> None:
    with pytest.raises(UnsupportedError, match=f"qtype {number} is not supported; supported formats are F16"):
        format_of(number)


def test_two_owners_of_one_qtype_are_a_fault_of_hipfire() -> None:
    first, second, third = ModuleType("first"), ModuleType("second"), ModuleType("third")
    vars(first)["FORMATS"] = (format_of(QType.F32), format_of(QType.F16))
    vars(second)["FORMATS"] = (format_of(QType.F32),)
    assert list(collect_formats([first, third])) == [QType.F16, QType.F32]
    with pytest.raises(InternalError, match="qtype 2 is claimed by first and second"):
        collect_formats([first, third, second])


def test_format_files_do_not_import_each_other() -> None:
    modules = {
        entry.name: importlib.import_module(f"hipfire.quant.{entry.name}")
        for entry in pkgutil.iter_modules(hipfire.quant.__path__)
    }
    owners = {f"hipfire.quant.{name}" for name, module in modules.items() if hasattr(module, "FORMATS")}
    assert len(owners) >= 15
    for name in owners:
        source = Path(str(importlib.import_module(name).__file__)).read_text(encoding="utf-8")
        imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
        assert not imported & owners
