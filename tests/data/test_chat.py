"""Which tokens of a formatted conversation count toward the loss: the assistant's, by the template's word or by its prompts."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from boost.data.chat import ChatTemplate, Encoded, Rejected, load_chat_template
from boost.errors import DataError
from boost.text import JsonObject
from tests.data.chats import CHATML, MARKED, chat_tokenizer, conversation

FORGETFUL = CHATML.replace("{{ m['content'] + '<|im_end|>' }}{% else %}",
    "{{ ('<think>' if loop.last else '') + m['content'] + '<|im_end|>' }}{% else %}")  # fmt: skip
"""Formats the last answer differently, as templates do that drop earlier reasoning."""


def counted(template: ChatTemplate, document: Encoded) -> list[str]:
    """The text of each run of counted tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.mask.astype(int), [0]])))
    return [template.text_of(document.ids[start:end]) for start, end in edges.reshape(-1, 2)]


def answers(number: int, end: str) -> list[str]:
    return [m["content"] + end for m in conversation(number) if m["role"] == "assistant"]


@pytest.fixture(scope="module")
def by_prefixes(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate(chat_tokenizer(tmp_path_factory.mktemp("prefixes")))


@pytest.fixture(scope="module")
def by_markers(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate(chat_tokenizer(tmp_path_factory.mktemp("markers"), MARKED))


def test_only_what_the_assistant_says_counts(by_prefixes: ChatTemplate, by_markers: ChatTemplate) -> None:
    assert by_markers.has_markers and not by_prefixes.has_markers
    for number in range(9):
        (ours,), (theirs,) = (each.encode(conversation(number)) for each in (by_prefixes, by_markers))
        assert ours.text == theirs.text
        np.testing.assert_array_equal(ours.ids, theirs.ids)
        assert counted(by_prefixes, ours) == answers(number, "<|im_end|>\n")
        assert counted(by_markers, theirs) == answers(number, "<|im_end|>")
        assert by_prefixes.text_of(ours.ids) == ours.text
        prompt = by_prefixes.encode(conversation(number))[0].ids[: int(np.flatnonzero(ours.mask)[0])]
        assert by_prefixes.text_of(prompt).endswith("<|im_start|>assistant\n")
    assert by_prefixes.straddling == 0


def test_a_template_that_changes_earlier_answers_gives_one_document_for_each(tmp_path: Path) -> None:
    template = ChatTemplate(chat_tokenizer(tmp_path, FORGETFUL))
    documents = template.encode(conversation(2))  # three exchanges
    assert [counted(template, each) for each in documents] == [[f"<think>{a}"] for a in answers(2, "<|im_end|>\n")]
    lengths = [len(each.ids) for each in documents]
    assert lengths == sorted(lengths) and len(set(lengths)) == 3


def test_an_answer_that_begins_within_a_token_is_noticed(tmp_path: Path) -> None:
    template = ChatTemplate(chat_tokenizer(tmp_path, "{% for m in messages %}{{ m['content'] }}{% endfor %}"))
    # "model" is a token; cut in two, its first part is the prompt.
    (document,) = template.encode(
        [{"role": "user", "content": "a mod"}, {"role": "assistant", "content": "el and why"}]
    )
    assert template.straddling == 1
    assert counted(template, document) == [" and why"]


def test_messages_without_weight_do_not_count(by_prefixes: ChatTemplate, by_markers: ChatTemplate) -> None:
    messages = [dict(m) for m in conversation(2)]  # three exchanges
    (whole,) = by_prefixes.encode(messages)
    messages[1]["weight"] = messages[5]["weight"] = 0
    for template, end in ((by_prefixes, "<|im_end|>\n"), (by_markers, "<|im_end|>")):
        (document,) = template.encode(messages)
        np.testing.assert_array_equal(document.ids, whole.ids)
        assert counted(template, document) == [messages[3]["content"] + end]


def test_the_header_of_an_assistant_that_speaks_first_does_not_count(by_prefixes: ChatTemplate) -> None:
    messages = [{"role": "assistant", "content": "a model"}, *conversation(1)]
    (document,) = by_prefixes.encode(messages)
    assert counted(by_prefixes, document)[0] == "a model<|im_end|>\n"


def test_tools_reach_the_template(tmp_path: Path) -> None:
    source = "{% if tools %}[{{ tools[0]['function']['name'] }}]{% endif %}" + CHATML
    template = ChatTemplate(chat_tokenizer(tmp_path, source))
    fields = {"tools": [{"type": "function", "function": {"name": "f"}}], "mood": "x", "tokenize": True}
    messages = [{**message, "tone": "x"} for message in conversation(1)]
    (document,) = template.encode(messages, fields)
    assert document.text.startswith("[f]<|im_start|>user")
    unused = [note.partition(", which the chat template does not use")[0] for note in template.unused(messages, fields)]
    assert unused == ["with 'mood'", "with 'tokenize'", "with 'tone' in a message"]


def test_an_answer_whose_end_does_not_count_is_noticed(tmp_path: Path, by_markers: ChatTemplate) -> None:
    source = MARKED.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}")
    template = ChatTemplate(chat_tokenizer(tmp_path, source))
    (document,) = template.encode(conversation(2))
    assert counted(template, document) == answers(2, "")
    by_markers.encode(conversation(2))
    assert (template.endless, by_markers.endless) == (3, 0)


@pytest.mark.parametrize(
    "source", ["### {{ m['content'] }}\n", "{{ '' if loop.first else '<|im_end|>' }}### {{ m['content'] }}"]
)
def test_an_answer_without_an_end_is_noticed(tmp_path: Path, source: str) -> None:
    prompt = (
        "{% if add_generation_prompt %}" + source.partition("###")[0].replace("loop.first", "false") + "### {% endif %}"
    )
    template = ChatTemplate(chat_tokenizer(tmp_path, "{% for m in messages %}" + source + "{% endfor %}" + prompt))
    template.encode(conversation(2))
    assert template.endless == 3


def test_a_date_in_the_text_is_named(tmp_path: Path) -> None:
    template = ChatTemplate(chat_tokenizer(tmp_path, "{{ date_string or strftime_now('%Y') }}" + CHATML))
    messages = conversation(1)
    assert [*template.unused(messages, {})] == ["in which the chat template may write today's date"]
    assert [*template.unused(messages, {"date_string": "2024"})] == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "rejected by the chat template: roles must alternate"),
        ("{{ messages[0]['none']['none'] }}", "rejected by the chat template"),
        (
            "{% if add_generation_prompt %}>{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "not a prefix of",
        ),
        ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}", "without a token that counts"),
    ],
)
def test_what_a_template_cannot_format(tmp_path: Path, source: str, words: str) -> None:
    template = ChatTemplate(chat_tokenizer(tmp_path, source))
    with pytest.raises(Rejected, match=words):
        template.encode(conversation(1))


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template; add a chat_template.jinja file"):
        ChatTemplate(chat_tokenizer(tmp_path, None))


CALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": ARGUMENTS}</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOTH = "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"


def calls(arguments: object) -> list[dict[str, object]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("source", "noted"),
    [
        ("{{ c.function.arguments | tojson }}", "an object"),
        ("{{ c.function.arguments }}", "text"),
        (BOTH, None),
    ],
)
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}', {}])
def test_tool_call_arguments_are_json_once(tmp_path: Path, source: str, noted: str | None, arguments: object) -> None:
    template = ChatTemplate(chat_tokenizer(tmp_path, CALL.replace("ARGUMENTS", source)))
    (document,) = template.encode(calls(arguments))
    assert f'"arguments": {arguments or "{}"}'.replace("'", '"') in document.text
    given = "text" if isinstance(arguments, str) else "an object"
    notes = list(template.unused(calls(arguments), {}))
    assert bool(notes) == (noted not in (None, given)) and all(f"as {noted}" in note for note in notes)


@pytest.mark.parametrize(
    ("printed", "text", "noted"),
    [
        (
            "{{ m.content }}",
            "",
            None,
        ),  # the word None before transformers 5.2x, which leaves out fields without a value
        ("{{ m.content + '.' }}", ".", True),  # an error
        ("{{ m.content or '' }}", "", False),
    ],
)
def test_null_content_beside_a_tool_call_is_what_the_template_makes_of_it(
    tmp_path: Path, printed: str, text: str, noted: bool | None
) -> None:
    source = CALL.replace("{{ m.content }}", printed).replace("ARGUMENTS", BOTH)
    template = ChatTemplate(chat_tokenizer(tmp_path, source))
    messages = [calls({})[0], calls({})[1] | {"content": None}]
    (document,) = template.encode(messages)
    assert counted(template, document)[0].startswith(f"{text}<tool_call>")
    notes = [note.partition(",")[0] for note in template.unused(messages, {})]
    assert notes == ["with null as content"] * (len(notes) if noted is None else noted)


@pytest.mark.slow
def test_a_field_that_transformers_renames_for_the_template_is_not_called_unused(tmp_path: Path) -> None:
    source = CHATML.replace(
        "{{ m['content'] + '<|im_end|>' }}{% else", "{{ m.reasoning_content }}{{ m['content'] }}{% else"
    )
    template = ChatTemplate(chat_tokenizer(tmp_path, source))
    messages = [conversation(1)[0], {"role": "assistant", "content": "b", "reasoning": "because", "mood": "fine"}]
    is_renamed = "because" in template.encode(messages)[0].text  # since transformers 5.2x
    notes = [note for note in template.unused(messages, {}) if "'reasoning'" in note]
    assert len(notes) == (not is_renamed)
    assert len([*template.unused(messages, {})]) == len(notes) + 1


def test_text_that_the_tokenizer_drops_is_rejected(tmp_path: Path) -> None:
    """After a dropped character, offsets are those of other characters, so that the mask would be wrong."""
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate("abcst:\n")}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(source.replace("m.role[:1]", "'a' if m.role == 'assistant' else 'b'"))
    template = ChatTemplate(tmp_path)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cb"}]
    (document,) = template.encode(messages)
    assert [text.replace(" ", "") for text in counted(template, document)] == ["cb\n"]
    with pytest.raises(Rejected, match="characters that the tokenizer has no token for"):
        template.encode([{"role": "user", "content": "xab"}, messages[1]])


def test_tool_calls_that_cannot_be_learned(tmp_path: Path) -> None:
    template = ChatTemplate(chat_tokenizer(tmp_path / "a", CALL.replace("ARGUMENTS", BOTH)))
    with pytest.raises(Rejected, match="arguments that are not JSON"):
        template.encode(calls("{x"))
    with pytest.raises(Rejected, match="with a tool call as the answer"):
        ChatTemplate(chat_tokenizer(tmp_path / "b")).encode(calls({}))


def test_parts_go_to_a_template_that_reads_them_and_reasoning_is_never_the_answer(tmp_path: Path) -> None:
    parts = [{"type": "reasoning", "text": "hidden"}, {"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]
    messages: list[JsonObject] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]
    plain = ChatTemplate(chat_tokenizer(tmp_path / "a"))
    (document,) = plain.encode(messages)
    assert counted(plain, document) == ["Hi you<|im_end|>\n"]
    (unused,) = plain.unused(messages, {})
    assert unused.startswith("with content of type 'reasoning', which")
    read = "{% for p in m['content'] if p.type == 'text' %}({{ p.text | trim }}){% endfor %}"
    source = CHATML.replace(
        "{{ m['content'] + '<|im_end|>' }}{% else %}",
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        + read
        + "{% endif %}{{ '<|im_end|>' }}{% else %}",
    )
    template = ChatTemplate(chat_tokenizer(tmp_path / "b", source))
    (document,) = template.encode(messages)
    assert counted(template, document) == ["(Hi)(you)<|im_end|>\n"]
    with pytest.raises(Rejected, match="with an empty answer"):
        plain.encode([messages[0], {"role": "assistant", "content": parts[:1]}])


def test_text_goes_to_a_template_that_reads_only_parts(tmp_path: Path) -> None:
    """As that of Idefics and SmolVLM, which drops text without an error."""
    text = "{% for p in m['content'] if p['type'] == 'text' and not m['tool_calls'] %}{{ p['text'] }}{% endfor %}"
    read = f"{text}{{{{ '<|im_end|>' }}}}"
    folder = chat_tokenizer(tmp_path, CHATML.replace("{{ m['content'] + '<|im_end|>' }}", read))
    template, messages = ChatTemplate(folder), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with contextlib.suppress(Rejected):  # an answer that is not shown decides nothing for others
        template.encode([messages[0], {**messages[1], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}])
    (document,) = template.encode(messages)
    assert counted(template, document) == ["b<|im_end|>\n"] and "user\na<|im_end|>" in document.text
    (note,) = template.unused(messages, {})
    assert note.startswith("with text as content, passed to the chat template as parts")
    prompt = load_chat_template(folder)
    assert prompt is not None and "user\na<|im_end|>" in prompt(messages[:1], {})[0]


def test_roles_that_a_template_leaves_out_are_named(tmp_path: Path) -> None:
    source = CHATML.replace("for m in messages", "for m in messages if m['role'] != 'system'")
    template = ChatTemplate(chat_tokenizer(tmp_path, source))
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}"
    other = ChatTemplate(chat_tokenizer(tmp_path / "strict", strict + CHATML))
    (note,) = template.unused(conversation(3), {})
    assert "role 'system'" in note and "does not use" in note
    for number in (3, 1):  # one that it rejects says nothing of others
        assert not list(other.unused(conversation(number), {}))


def test_markers_are_those_of_the_template_in_use(tmp_path: Path) -> None:
    """An unmarked template for tools next to a marked default one, and the reverse."""
    messages, tools = conversation(1), {"tools": [{"type": "function", "function": {"name": "f"}}]}
    for number, (default, other) in enumerate(((MARKED, CHATML), (CHATML, MARKED))):
        folder = chat_tokenizer(tmp_path / str(number), default)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(f"{{# tools #}}{other}")
        template = ChatTemplate(folder)
        for fields, source in (({}, default), (tools, other)):
            (document,) = template.encode(messages, fields)
            assert counted(template, document) == answers(1, "<|im_end|>" if source == MARKED else "<|im_end|>\n")
