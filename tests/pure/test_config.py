"""Settings: every layer's place in the order, what a bad entry does, and the rules of each key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hipfire.base.config import Config, generation_defaults, load_config, require_key
from hipfire.base.config_keys import KEYS, Key
from hipfire.base.errors import ValidationError

TAG = "smollm2:135m"
LAYERS = ("cli", "env", "model", "global", "card", "model_file", "default")
# one value per layer, all different, so that the winner tells its layer
VALUES = {"cli": 0.9, "env": 0.8, "model": 0.7, "global": 0.6, "card": 0.5, "model_file": 0.4, "default": 0.3}


def make_config(tmp_path: Path, *, config: str = "", catalog: str = "", **variables: str) -> Config:
    if config:
        (tmp_path / "config.toml").write_text(config, encoding="utf-8")
    if catalog:
        (tmp_path / "models.toml").write_text(catalog, encoding="utf-8")
    return load_config({"HIPFIRE_HOME": str(tmp_path), **variables})


def config_with_layers(tmp_path: Path, present: tuple[str, ...]) -> Config:
    return make_config(
        tmp_path,
        config=f"[generation]\ntemperature = {VALUES['global']}\n" if "global" in present else "",
        catalog=f'[models."{TAG}".generation]\ntemperature = {VALUES["model"]}\n'
        if "model" in present
        else "",
        **({"HIPFIRE_TEMPERATURE": str(VALUES["env"])} if "env" in present else {}),
    )


@pytest.mark.parametrize("strongest", range(len(LAYERS)))
def test_each_layer_beats_all_below_it(tmp_path: Path, strongest: int) -> None:
    present = LAYERS[strongest:]
    config = config_with_layers(tmp_path, present)
    layers = {
        name: {"generation.temperature": VALUES[name]} if name in present else None
        for name in ("cli", "card", "model_file")
    }
    found = config.resolve("generation.temperature", model=TAG, **layers)
    assert found.value == VALUES[LAYERS[strongest]]
    assert tuple(each.origin for each in (found.winner, *found.shadowed)) == present
    assert [each.value for each in found.shadowed] == [VALUES[name] for name in present[1:]]


def test_explicit_global_value_beats_the_registry_card(tmp_path: Path) -> None:
    config = make_config(tmp_path, config="[generation]\ntop_k = 7\n")
    assert config.resolve("top_k", card={"top_k": 40}).value == 7
    assert make_config(tmp_path / "empty").resolve("top_k", card={"top_k": 40}).value == 40


def test_override_of_one_model_leaves_another_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path, catalog=f'[models."{TAG}".memory]\nkv_cache = "q8"\n')
    assert config.resolve("memory.kv_cache", model=TAG).value == "q8"
    assert config.resolve("memory.kv_cache", model="gemma3:270m").value == "auto"
    assert config.resolve("memory.kv_cache").value == "auto"


def test_flat_and_dotted_names_are_the_same_key_everywhere(tmp_path: Path) -> None:
    config = make_config(tmp_path, config='kv_cache = "bf16"\n"generation.top_p" = 0.5\n')
    assert config.warnings == ()
    assert config.resolve("kv_cache").value == config.resolve("memory.kv_cache").value == "bf16"
    assert config.resolve("top_p", cli={"top_p": 0.25}).value == 0.25
    assert config.resolve("top_p").value == 0.5


def test_bad_entries_are_left_out_with_one_warning_each(tmp_path: Path) -> None:
    text = "schema_version = 1\nmagic = 1\n[generation]\ntemperature = 9\ntop_k = true\nmin_p = 0.1\n"
    config = make_config(tmp_path, config=text, catalog=f'[models."{TAG}".hardware]\nthreads = 4\n')
    assert config.values == {"generation.min_p": 0.1}
    assert config.resolve("temperature").winner.origin == "default"
    assert len(config.warnings) == 4
    for part in ("magic", "generation.temperature: 9", "generation.top_k: True", "hardware.threads"):
        assert sum(part in line for line in config.warnings) == 1
    assert all("\n" not in line and str(tmp_path) in line for line in config.warnings)


@pytest.mark.parametrize(
    ("text", "part"),
    [("a = = 1", "line 1"), ("schema_version = 2", "schema_version 2"), ("a = '\udcff'", "config")],
)
def test_unusable_file_is_an_error_that_names_it(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "config.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValidationError, match=re.escape(str(tmp_path / "config.toml"))) as caught:
        load_config({"HIPFIRE_HOME": str(tmp_path)})
    assert part in caught.value.line()


def test_bad_environment_value_names_the_variable_and_only_its_key_fails(tmp_path: Path) -> None:
    config = make_config(tmp_path, HIPFIRE_TOP_K="many", HIPFIRE_MIN_P="")
    with pytest.raises(ValidationError, match="HIPFIRE_TOP_K"):
        config.resolve("top_k")
    assert config.resolve("min_p").winner.origin == "default"


def test_models_file_names_paths_and_refuses_unsafe_names(tmp_path: Path) -> None:
    text = (
        '[models.mine]\npath = "/data/model.gguf"\n[models."../evil"]\npath = "/x"\n[models.odd]\npath = 3\n'
    )
    config = make_config(tmp_path, catalog=text)
    assert config.models["mine"].path == Path("/data/model.gguf")
    assert "../evil" not in config.models
    assert any("'..'" in line or "'/'" in line for line in config.warnings)
    assert any("path is not text" in line for line in config.warnings)


def test_catalog_path_variable_moves_the_models_file(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere.toml"
    other.write_text('[models.mine]\npath = "/data/model.gguf"\n', encoding="utf-8")
    assert "mine" in make_config(tmp_path, HIPFIRE_MODELS_CATALOG_PATH=str(other)).models


def test_generation_config_gives_only_values_that_the_rules_allow() -> None:
    theirs = {"temperature": 0.6, "top_k": 0, "repetition_penalty": 1.1, "eos_token_id": 2, "top_p": "high"}
    assert generation_defaults(theirs) == {"generation.temperature": 0.6, "generation.repeat_penalty": 1.1}
    assert generation_defaults({"do_sample": False, "temperature": 0.6})["generation.temperature"] == 0.0


def test_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(ValidationError, match="temperature"):
        require_key("temprature")


def test_every_key_is_named_once_and_its_default_obeys_its_rule() -> None:
    names = [name for key in KEYS for name in (key.name, key.flat)]
    assert len(set(names)) == len(names)
    assert len({key.env for key in KEYS}) == len(KEYS)
    for key in KEYS:
        assert key.env.startswith("HIPFIRE_")
        assert key.check(key.stored(key.default), source="default") == key.default


def _numeric(kind: str) -> list[Key]:
    return [key for key in KEYS if key.kind == kind]


@pytest.mark.parametrize("key", _numeric("int") + _numeric("float"), ids=lambda key: key.name)
def test_bounds_of_numbers(key: Key) -> None:
    number = int if key.kind == "int" else float
    assert key.parse(str(number(key.high)), source="test") == key.high
    for text in (
        str(number(key.high) + 1),
        str(number(key.low) - 1),
        "nan",
        "inf",
        "1e999",
        "abc",
        "",
        "true",
    ):
        with pytest.raises(ValidationError, match=re.escape(key.name)):
            key.parse(text, source="test")
    if key.low_open:
        with pytest.raises(ValidationError):
            key.parse(str(key.low), source="test")
    else:
        assert key.parse(str(number(key.low)), source="test") == key.low


@pytest.mark.parametrize(("word", "value"), [("on", True), ("YES", True), ("0", False), ("off", False)])
def test_truth_words(word: str, value: bool) -> None:
    assert require_key("prompt.normalize").parse(word, source="test") is value


def test_template_must_exist_and_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    key = require_key("chat_template")
    with pytest.raises(ValidationError, match="no file"):
        key.parse("chat.j2", source="test")
    (tmp_path / "chat.j2").write_text("x", encoding="utf-8")
    assert key.parse("chat.j2", source="test") == str(tmp_path / "chat.j2")


def test_auto_is_accepted_only_where_there_is_an_automatic_value() -> None:
    assert require_key("threads").parse("auto", source="test") is None
    with pytest.raises(ValidationError):
        require_key("top_k").parse("auto", source="test")
