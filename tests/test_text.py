"""Untrusted files and strings: a one-line error for any content."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boost.config import Config, load
from boost.errors import BoostError, ConfigError
from boost.text import brief, prepare_streams, printable

DEEP = 50_000
FILES: dict[str, tuple[bytes, str]] = {
    "deep array": (b"[parallel]\nsplit = " + b"[" * DEEP, "nested too deeply"),
    "deep table": (b"[parallel]\nsplit = " + b"{a=" * DEEP, "nested too deeply"),
    "deep section": (
        b"[" + b"a." * 20_000 + b"a]",
        r"not valid TOML: '(a\.){30}\.\.\. \(40001 characters\)' has 20001 parts; .* 16$",
    ),
    "deep key in a table": (
        b"[model]\nranks = { # ''\n" + b'"=" . \'a"\' .' * 900 + b"a = 1 }",
        "has 1801 parts; keys have at most 16$",
    ),
    "large": (b"#" * (1 << 18) + b"\n", "larger than 262,144 bytes"),
    "5000 digits": (b"[model]\ndim = " + b"9" * 5000, "is not valid TOML: .*digits"),
    "4000 digits": (b"[model]\ndim = " + b"9" * 4000, r"model\.dim = 9+\.\.\. \(4000 characters\) is too large"),
    "5000 hex digits": (
        b"[model]\ndim = 0x" + b"f" * 5000,
        r"model\.dim = an integer with thousands of digits is too large",
    ),
    "4000 digits of a number": (b"[optim]\nlr = " + b"9" * 4000, r"optim\.lr = 9+\.\.\. "),
    "UTF-16": ("[model]\ndim = 64".encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    "UTF-16, no mark": ("[model]\ndim = 64".encode("utf-16-le"), "is UTF-16 text; save it as UTF-8"),
    "UTF-16, big end first": ("[model]\ndim = 64".encode("utf-16-be"), "is UTF-16 text; save it as UTF-8"),
    "UTF-32": ("[model]\ndim = 64".encode("utf-32"), "is UTF-32 text; save it as UTF-8"),
    "latin-1": (b"# \xe9\n", r"is not UTF-8 text \(invalid byte at offset 2\)"),
    "binary": (bytes(range(256)), "is not UTF-8 text"),
    "NUL": (b"[model]\n\0", "is not valid TOML"),
    "NUL in a path": (b'[run]\ndir = "a\\u0000b"', r"run\.dir = 'a\\x00b' contains a NUL character"),
    "NUL in another": (b'[data]\nstore = "a\\u0000b"', r"data\.store = 'a\\x00b' contains a NUL character"),
    "absurd width": (
        b"[model]\ndim = 1_000_000_000_000",
        r"model\.dim = 1000000000000 is too large; largest valid value",
    ),
    "absurd depth": (
        b"[model]\ndim = 1048576\nlayers = 1_000_000\nheads = 8",
        r"model\.layers = 1000000 exceeds 10000; set it to 128 or less",
    ),
    "absurd size": (
        b"[model]\ndim = 1048576\nlayers = 10_000\nheads = 8",
        r"model\.layers = 10000 gives a model of .* parameters, but the maximum .* set model\.layers to 128 or less",
    ),
    "absurd product": (
        b"[model]\nfamily = 'dense'\ndim = 1048576\nffn_dim = 1048576\nlayers = 128",
        r"model\.dim = 1048576",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_configuration_is_one_line_about_it(tmp_path: Path, name: str) -> None:
    content, message = FILES[name]
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(str(tmp_path / "x.toml"))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text", ['"# DOTS"', "'a\"DOTS'", '"""it "is"\n\\""" DOTS"""', "'''it's DOTS\n'''", "'x'  # don't DOTS"]
)
def test_dots_in_strings_and_comments_are_no_parts_of_keys(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.toml").write_text(
        f"[train]\nsample_tokens = 9\nsample_prompts = [{text}\n]".replace("DOTS", "." * 40)
    )
    assert load(str(tmp_path / "x.toml")).train.sample_prompts


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf[model]\ndim = 64\nheads = 2")
    assert load(str(tmp_path / "x.toml")).model.dim == 64


@pytest.mark.parametrize("source", ["a\0b", "x" * 5000, "/", "."])
def test_a_name_that_no_file_can_have(source: str) -> None:
    with pytest.raises(ConfigError, match="no configuration file and no preset named"):
        load(source)


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self/mem").exists(), reason="root reads everything")
def test_a_file_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="/proc/self/mem cannot be read: "):
        load("/proc/self/mem")


@pytest.mark.parametrize(
    "words",
    [
        ["--parallel.split", "[" * DEEP],
        ["--model.dim", "9" * 5000],
        ["--run.dir", "a\0b"],
        ["--model.ranks", f"{{{'a.' * 20_000}a = 1}}"],
        ["--model.ranks.attn" + ".a" * 20_000, "1"],
    ],
)
def test_words_of_the_command_line(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=words[0].removeprefix("--")):
        load(None, words)


def test_what_a_terminal_would_obey_is_shown_instead() -> None:
    assert printable("a\x1b[2J\r\n\x07b\x9b1m\u202ec\udcff é 日") == "a\\x1b[2J\\r\\n\\x07b\\x9b1m\\u202ec\\udcff é 日"
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"
    assert brief("x" * 500) == f"'{'x' * 59}... (502 characters)"
    assert brief(16**5000) == "an integer with thousands of digits"


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates().map(str)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = [f"{section}.{name}" for section, info in Config.model_fields.items() for name in info.annotation.model_fields]  # type: ignore[union-attr]


@pytest.mark.slow
@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=4))
def test_any_values_give_a_configuration_or_a_boost_error(values: dict[str, Any]) -> None:
    from boost.config.load import from_tree

    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    with contextlib.suppress(BoostError):
        from_tree(tree)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_give_a_configuration_or_a_boost_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with contextlib.suppress(BoostError):
        load(str(tmp_path / "x.toml"))


def test_what_an_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1"))
    prepare_streams()
    print("ü 漢", flush=True)
    assert written.getvalue() == b"\xfc \\u6f22\n"
