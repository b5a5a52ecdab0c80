"""What a container's header and config say about the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.checkpoint.hfq import HfqFile
from hipfire.checkpoint.hfq_writer import write_hfq
from hipfire.models.family import family_of
from hipfire.runtime.identify import named_checkpoint, read_config


def container(folder: Path, arch_id: int, config: dict[str, Any], **metadata: Any) -> HfqFile:
    path = folder / "m.hfq"
    write_hfq(path, arch_id, {"architecture": "x", "config": config, **metadata}, [], [])
    return HfqFile.open(path)


def tiny(model_type: str, **change: Any) -> dict[str, Any]:
    return {"model_type": model_type, **family_of(model_type).tiny, **change}


def test_the_header_must_agree_with_the_config(tmp_path: Path) -> None:
    assert read_config(container(tmp_path, 1, tiny("qwen3")))[0].arch_id == 1
    with pytest.raises(ArtifactError, match=r"arch_id.*is 5 but qwen3 models have 1"):
        read_config(container(tmp_path, 5, tiny("qwen3")))
    with pytest.raises(ArtifactError, match="is 0 but qwen3 models have 1"):
        read_config(container(tmp_path, 0, tiny("qwen3")))


def test_zero_stands_for_a_family_that_the_original_had_no_number_for(tmp_path: Path) -> None:
    for arch_id in (0, family_of("gemma3").arch_id):
        assert read_config(container(tmp_path, arch_id, tiny("gemma3_text")))[1].sizes.layers == 4


def test_a_container_without_a_usable_model_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="model_type"):
        read_config(container(tmp_path, 0, {}))
    with pytest.raises(UnsupportedError, match="'mamba'"):
        read_config(container(tmp_path, 0, {"model_type": "mamba"}))


@pytest.mark.parametrize("says", [{}, {"tie_word_embeddings": None}])
def test_a_missing_head_is_tied_where_the_config_does_not_say(tmp_path: Path, says: dict[str, Any]) -> None:
    assert read_config(container(tmp_path, 0, tiny("llama", **says)))[1].sizes.tied


@pytest.mark.parametrize(
    ("metadata", "change"),
    [
        ({}, "none"),
        ({"source": "gguf"}, "q_rows"),
        ({"source": "gguf", "row_order": "half_split"}, "none"),
    ],
)
def test_rows_of_containers_that_the_original_made_from_gguf_are_put_back(
    tmp_path: Path, metadata: dict[str, str], change: str
) -> None:
    from_gguf = container(tmp_path, 0, tiny("llama"), **metadata)
    family, config = read_config(from_gguf)
    named = named_checkpoint(from_gguf, family, config)
    rule = next(rule for rule in family.names if "q_proj" in rule.canonical)
    assert rule.change == "q_rows"
    assert named.change_of("model.layers.0.self_attn.q_proj.weight") == change
