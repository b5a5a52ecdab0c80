import pytest
from text_kit import gguf_bpe, gguf_spm, json_assets, json_bpe
from tokenizers import AddedToken

from hipfire.base.errors import ValidationError
from hipfire.base.types import TextAssets
from hipfire.text.template import CHATML, ChatTemplate, choose_template

OWN = {"tool": "T", "default": "D"}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "over.j2").write_text("OVERRIDE", encoding="utf-8")
    users = tmp_path / "templates"
    users.mkdir()
    (users / "model-1.5b.mq4.j2").write_text("USER é", encoding="utf-8")
    return tmp_path


def test_the_order_of_sources(files):
    assets = TextAssets(gguf=gguf_bpe(), chat_templates=OWN)
    options = {"user_dir": files / "templates", "model_stem": "model-1.5b.mq4"}
    over = choose_template(assets, override_file=files / "over.j2", **options)
    assert (over.source, "over.j2" in over.origin) == ("OVERRIDE", True)
    user = choose_template(assets, **options)
    assert (user.source, "model-1.5b.mq4.j2" in user.origin) == ("USER é", True)
    own = choose_template(assets, user_dir=files / "templates", model_stem="another")
    assert (own.source, "'default'" in own.origin) == ("D", True)
    fallback = choose_template(TextAssets(gguf=gguf_bpe()), user_dir=files / "missing", model_stem="m")
    assert (fallback.source, "ChatML" in fallback.origin) == (CHATML, True)
    assert choose_template(TextAssets(gguf=gguf_spm(prefix=False)), **options | {"model_stem": ""}) is None


@pytest.mark.parametrize(
    ("templates", "name", "want"),
    [
        (OWN, "tool", "T"),
        (OWN, None, "D"),
        (OWN, "missing", "D"),
        ({"b": "B", "a": "A"}, None, "B"),
        ({"b": "B", "a": "A"}, "a", "A"),
    ],
)
def test_named_then_default_then_first(templates, name, want):
    assert choose_template(TextAssets(chat_templates=templates), name=name).source == want


@pytest.mark.parametrize("controls", [["<|im_start|>"], ["<|im_end|>"], []])
def test_no_chatml_without_both_of_its_tokens(controls):
    assert choose_template(TextAssets(gguf=gguf_bpe(controls=controls))) is None
    engine = json_bpe([AddedToken(text, special=True) for text in controls])
    assert choose_template(json_assets(engine)) is None


def test_chatml_for_a_tokenizer_json_with_its_tokens():
    engine = json_bpe([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    assert choose_template(json_assets(engine)).source == CHATML


def test_the_chatml_text():
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    want = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML).render(messages).text == want
    bare = ChatTemplate(CHATML).render(messages, add_generation_prompt=False).text
    assert bare == want.removesuffix("<|im_start|>assistant\n")


def test_files_that_cannot_be_read_are_refused_by_name(files):
    (files / "latin.j2").write_bytes(b"caf\xe9")
    for name in ("latin.j2", "missing.j2", "templates"):
        with pytest.raises(ValidationError, match=name):
            choose_template(TextAssets(), override_file=files / name)
