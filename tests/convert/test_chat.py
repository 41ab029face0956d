"""A chat model's tokenizer settings survive import, training and export; so does a tokenizer re-saved by transformers."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from boost.convert.export import export
from boost.convert.vocabulary import end_tokens, merged_tokenizer_config, read_vocabulary
from boost.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from boost.errors import BoostError, DataError
from boost.train.checkpoint import open_checkpoint
from tests import toy
from tests.cli.commands import say
from tests.convert import toys
from tests.convert.toys import GB, give, llama_folder, save

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
MESSAGES = [{"role": "user", "content": "def main"}, {"role": "assistant", "content": "return x"}]
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [301, 0], "pad_token_id": 2}


def chat_folder(path: Path, store: Path, templates: dict[str, str], layout: str) -> Path:
    """A tiny chat model whose folder stores its templates as `layout` says."""
    tokenizer = Tokenizer.from_file(str(store / "tokenizer.json"))
    for text in ("<|im_start|>", "<|im_end|>", "<tool>"):
        tokenizer.add_tokens([AddedToken(text, special=text != "<tool>", normalized=False)])
    size = tokenizer.get_vocab_size()
    llama_folder(path, vocab_size=size, eos_token_id=[301, 0], bos_token_id=None)
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "padding_side": "left",
        "model_input_names": ["input_ids"],
        "model_specific_special_tokens": {"call_token": "<|im_start|>"},
        "response_template": {"defaults": {"role": "assistant"}},
        "added_tokens_decoder": {"300": {"content": "<|im_start|>", "special": True}},
    }
    (path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<|endoftext|>", "eos_token": "<|im_end|>"}))
    if layout == "config":
        config["chat_template"] = (
            templates["default"]
            if len(templates) == 1
            else [{"name": name, "template": text} for name, text in templates.items()]
        )
    else:
        (path / "chat_template.jinja").write_text(templates["default"])
        for name in templates.keys() - {"default"}:
            (path / "additional_chat_templates").mkdir(exist_ok=True)
            (path / "additional_chat_templates" / f"{name}.jinja").write_text(templates[name])
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({**GENERATION, "transformers_version": "4.50.0"}))
    return path


def bring(source: Path, out: Path, tokenizer: Path | None = None) -> Path:
    toys.bring(source, out, tokenizer=tokenizer)
    return out


def files_of(folder: Path) -> dict[str, str]:
    """Files of the folder other than weights and model card."""
    names = [f for f in sorted(folder.rglob("*")) if f.suffix in (".json", ".jinja")]
    return {f.relative_to(folder).as_posix(): f.read_text() for f in names}


def assert_chats(folder: Path, original: Path, templates: dict[str, str]) -> None:
    """transformers applies chat templates as with the original folder."""
    transformers = pytest.importorskip("transformers")
    ours, theirs = (
        transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True) for path in (folder, original)
    )
    assert ours.chat_template == theirs.chat_template == (TEMPLATE if len(templates) == 1 else templates)
    named = {"chat_template": "default" if len(templates) > 1 else None, "return_dict": False}
    said, expected = (t.apply_chat_template(MESSAGES, **named) for t in (ours, theirs))
    assert 300 in said and said == expected
    assert (ours.eos_token, ours.unk_token, ours.padding_side) == ("<|im_end|>", "<|endoftext|>", "left")
    for name in ("model_input_names", "call_token", "response_template"):  # 4.56 has not all
        assert getattr(theirs, name, None) == getattr(ours, name, None), name
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert {key: getattr(generation, key) for key in GENERATION} == GENERATION


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["config", "files"])
@pytest.mark.parametrize(
    "templates", [{"default": TEMPLATE}, {"default": TEMPLATE, "tool_use": TOOLS}], ids=["one", "two"]
)
def test_a_chat_model_comes_back(layout: str, templates: dict[str, str], tmp_path: Path, store: Path) -> None:
    source = chat_folder(tmp_path / "theirs", store, templates, layout)
    out = give(bring(source, tmp_path / "c"), tmp_path / "out")
    assert_chats(out, source, templates)
    again = give(bring(out, tmp_path / "c2"), tmp_path / "out2")
    assert files_of(again) == files_of(out)
    # A tokenizer that is named replaces the folder's, with its settings; generation stays the model's.
    bare = give(bring(source, tmp_path / "c3", store), tmp_path / "out3")
    assert not (bare / "chat_template.jinja").exists()
    assert json.loads((bare / "generation_config.json").read_text())["temperature"] == 0.6


@pytest.mark.slow
def test_a_run_keeps_what_it_starts_from(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Preserved through training, an interruption and another resume."""
    source = chat_folder(tmp_path / "theirs", store, {"default": TEMPLATE}, "files")
    start, run = bring(source, tmp_path / "c"), tmp_path / "run"
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("def main(x):\n    return x + 1\n" * 400)
    words = ["prepare", str(tmp_path / "text"), "--out", str(tmp_path / "data"), "--tokenizer", str(source)]
    code, _, err = say(capsys, *words)
    assert code == 0, err
    train = ["train", "--start-from", str(start), "--data.store", str(tmp_path / "data"), "--run.dir", str(run)]
    train += ["--train.seq_len", "32", "--train.global_batch", "2", "--train.micro_batch", "2", "--run.device", "cpu"]
    for more in (["--train.steps", "1"], ["--train.steps", "2", "--resume", "auto"]):
        code, _, err = say(capsys, *train, *more)
        assert code == 0, err
    assert open_checkpoint(run).position.step == 2
    out = give(run, tmp_path / "out")
    assert (out / "tokenizer.json").read_text() == (give(start, tmp_path / "out0") / "tokenizer.json").read_text()
    assert_chats(out, source, {"default": TEMPLATE})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "start"), [("svd", 300), ("cola", None), ("lax", 300)])
def test_a_folder_saved_again_keeps_its_tokenizer(
    family: str, start: int | None, tmp_path: Path, store: Path, transformers: Any
) -> None:
    original = Tokenizer.from_file(str(store / "tokenizer.json"))
    original.add_special_tokens(["<s>"] if start else [])
    original.save(str(tmp_path / "tokenizer.json"))
    config = toy.toy_config("float32", model={"family": family, "vocab_size": 304})
    fingerprint = tokenizer_fingerprint(load_tokenizer(tmp_path / "tokenizer.json"))
    path = save(tmp_path / "c", config, tmp_path / "tokenizer.json", fingerprint=fingerprint, bos=start)
    first = give(path, tmp_path / "first")
    tokenizer = transformers.AutoTokenizer.from_pretrained(first, trust_remote_code=True)
    # This sets padding and truncation, which are saved too.
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=8)
    transformers.AutoModelForCausalLM.from_pretrained(first, trust_remote_code=True).save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    back = bring(tmp_path / "saved", tmp_path / "imported")
    assert open_checkpoint(back).require_tokenizer() == fingerprint
    assert read_vocabulary(tmp_path / "saved").fingerprint == fingerprint
    data = open_checkpoint(back).data
    assert (data["eos"], data["bos"]) == (0, start)
    last = give(back, tmp_path / "last")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((last / name).read_text()) == json.loads((first / name).read_text()), name


def test_a_folder_where_only_the_model_was_saved_again(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama_folder(tmp_path / "theirs", vocab_size=300, eos_token_id=0)
    code, _, err = say(capsys, "import", str(tmp_path / "theirs"), "--out", str(tmp_path / "a"))
    assert (code, err.count("\n")) == (0, 1)
    assert "has no tokenizer.json" in err
    assert "--tokenizer PATH" in err
    (tmp_path / "theirs" / "tokenizer.model").write_bytes(b"x")
    code, _, err = say(capsys, "import", str(tmp_path / "theirs"), "--out", str(tmp_path / "b"))
    assert (code, err.count("\n")) == (0, 1)
    assert "has tokenizer.model but no tokenizer.json" in err
    code, _, err = say(
        capsys, "import", str(tmp_path / "theirs"), "--out", str(tmp_path / "d"), "--tokenizer", str(store)
    )
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", '{"chat_template": 3}', "is not a valid template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "is not a valid template"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {"content": "<new>"}}}', "adds token 7 = '<new>'"),
        ("tokenizer_config.json", "[", "tokenizer_config.json' cannot be read"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "../../PWNED", "template": "x"}]}',
            r"tokenizer_config.json': name of a chat_template = '../../PWNED' is not a valid file name \(it contains a path sep",
        ),
        ("chat_template.jinja", b"\xff\xfe\xff", "chat_template.jinja' cannot be read"),
    ],
)
def test_damaged_settings_are_named(file: str, content: str | bytes, message: str, tmp_path: Path, store: Path) -> None:
    llama_folder(tmp_path / "theirs", vocab_size=300)
    (tmp_path / "theirs" / "tokenizer.json").write_text((store / "tokenizer.json").read_text())
    (tmp_path / "theirs" / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BoostError, match=message) as caught:
        bring(tmp_path / "theirs", tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../../PWNED", "/PWNED", "..\\..\\PWNED", "C:PWNED", "..", "", "a\0b", "\ud800", "n" * 250]
)
def test_a_template_of_a_checkpoint_writes_nothing_outside(
    name: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """state.json of a checkpoint may come from a stranger, too."""
    templates = {"default": TEMPLATE, name: "outside"}
    config = toy.toy_config("float32", model={"vocab_size": 300})
    path = save(tmp_path / "in" / "c", config, store / "tokenizer.json")
    checkpoint = replace(open_checkpoint(path), data={"eos": 0, "hub": {"chat_templates": templates}})
    (tmp_path / "in" / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "in" / "tmp"))
    before = {file for file in tmp_path.rglob("*") if not file.is_relative_to(path)}
    with pytest.raises(DataError, match=r"state\.json': hub\.chat_templates = .* is not a valid file") as caught:
        export(checkpoint, tmp_path / "in" / "out", None, True, GB)
    assert "\n" not in str(caught.value)
    assert {file for file in tmp_path.rglob("*") if not file.is_relative_to(path)} == before


def test_settings_of_a_checkpoint_name_no_code() -> None:
    hub = {"tokenizer": {"auto_map": {"AutoTokenizer": ["them/code--file.Class", None]}, "eos_token": "<e>"}}
    assert merged_tokenizer_config({}, hub) == {"eos_token": "<e>"}


def test_end_tokens_are_those_of_the_checkpoint_and_of_the_folder_it_comes_from() -> None:
    assert end_tokens({"eos": None}) == []
    assert end_tokens({"eos": 0}) == [0]
    assert end_tokens({"eos": 3, "hub": {"generation": {"eos_token_id": 5}}}) == [3, 5]
    assert end_tokens({"eos": 5, "hub": {"generation": {"eos_token_id": [4, 5]}}}) == [4, 5]
