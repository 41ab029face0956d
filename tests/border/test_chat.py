"""Random conversations under several templates: tokens and mask are those of `apply_chat_template`, or the difference is named."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from boost.data.chat import ChatTemplate, Rejected
from boost.data.report import PrepareReport
from boost.data.sources import FilesSource
from tests.data.chats import MARKED, TEXT, chat_tokenizer

CALLS = (
    '{% for c in m.tool_calls or [] %}<call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}</call>{% endfor %}"
)
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content if p.type == 'text' %}"
    "[{{ p.text | trim }}]{% endfor %}{% endif %}"
)
FULL = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}\n{% if m.role == 'assistant' %}{% generation %}"
    f"{{% if m.reasoning_content %}}<think>{{{{ m.reasoning_content }}}}</think>{{% endif %}}{PARTS}{CALLS}<|im_end|>"
    f"{{% endgeneration %}}{{% else %}}{PARTS}<|im_end|>{{% endif %}}\n{{% endfor %}}"
)
OBJECT = FULL.replace(CALLS, CALLS.replace("c.function.arguments if c.function.arguments is string else ", ""))
STRING = FULL.replace(CALLS, CALLS.replace(" if c.function.arguments is string else c.function.arguments | tojson", ""))
TEMPLATES = {"full": FULL, "object": OBJECT, "string": STRING, "text only": MARKED}


def draw_record(rng: random.Random) -> dict[str, Any]:
    words = TEXT.split()

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 5)))

    def content() -> Any:
        kinds = ["text", "text", "reasoning"]
        return rng.choice(
            [text(), [{"type": rng.choice(kinds), "text": f" {text()} "} for _ in range(rng.randint(1, 3))]]
        )

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": content()} | ({"name": "Ada"} if rng.random() < 0.2 else {}))
        if rng.random() < 0.5:
            arguments: Any = {
                rng.choice("abc"): rng.choice([1, "x", [1, "é"], {"d": True}]) for _ in range(rng.randint(0, 2))
            }
            arguments = json.dumps(arguments) if rng.random() < 0.5 else arguments
            call = {"type": "function", "id": "1", "function": {"name": rng.choice("fg"), "arguments": arguments}}
            messages.append({"role": "assistant", "content": rng.choice(["", text()]), "tool_calls": [call]})
            messages.append({"role": "tool", "content": text(), "tool_call_id": "1"})
        answer = {"role": "assistant", "content": content()}
        messages.append(answer | ({"reasoning_content": text()} if rng.random() < 0.2 else {}))
    record: dict[str, Any] = {"messages": messages}
    if rng.random() < 0.5:
        record["tools"] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]
    return record


def through_file(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """What we read from a file with this record: JSON lines, or Parquet with messages as JSON or as text."""
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(record) + "\n")
    elif path.stem == "text":
        table = pyarrow.table({name: [json.dumps(value)] for name, value in record.items()})
        pyarrow.parquet.write_table(table, path)
    else:
        kind = pyarrow.json_()
        columns = {
            name: pyarrow.array([[json.dumps(item) for item in value]], pyarrow.list_(pyarrow.string())).cast(
                pyarrow.list_(kind)
            )
            for name, value in record.items()
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    (document,) = FilesSource(path, chat=True).documents(PrepareReport())
    content: dict[str, Any] = json.loads(document.text)
    return content


def check_all(folder: Path, seeds: range) -> None:
    templates = {name: ChatTemplate(chat_tokenizer(folder / name, source)) for name, source in TEMPLATES.items()}
    equal = 0
    for seed in seeds:
        rng = random.Random(seed)
        record, name = draw_record(rng), rng.choice(list(TEMPLATES))
        template, owner = templates[name], templates[name]._tokenizer
        ours = through_file(record, folder / rng.choice(["a.jsonl", "text.parquet", "json.parquet"]))
        named = list(template.unused(ours["messages"], ours["template"])) if name != "text only" else []
        try:
            (document,) = template.encode(ours["messages"], ours["template"])
        except Rejected as problem:
            if not str(problem).startswith(("with a tool call as the answer", "with an empty answer")):
                raise
            continue
        if name == "text only" or any("passed to the chat template as" in note for note in named):
            assert "{" + chr(92) not in document.text, seed  # JSON is encoded once
            continue
        theirs = owner.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        np.testing.assert_array_equal(document.ids, theirs["input_ids"], err_msg=f"seed {seed}, {name}")
        np.testing.assert_array_equal(document.mask, np.array(theirs["assistant_masks"], bool), err_msg=f"seed {seed}")
        equal += 1
    assert equal > len(seeds) // 4


@pytest.mark.slow
def test_conversations_are_those_of_transformers(tmp_path: Path) -> None:
    check_all(tmp_path, range(60))


@pytest.mark.nightly
def test_conversations_are_those_of_transformers_in_many_draws(tmp_path: Path) -> None:
    first = int(os.environ.get("BORDER_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"BORDER_SEED={first}")
    check_all(tmp_path, range(first, first + 2000))
