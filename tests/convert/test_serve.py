"""Serving an export: transformers' continuous batching gives the text of `boost generate`, and so does its server."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from boost.convert.export import export
from boost.data.tokenizer import load_tokenizer
from boost.train.generate import Sampling, generate_batch
from tests import toy
from tests.convert.toys import CASES, loaded, save

transformers = pytest.importorskip("transformers")

GB = 10**9
PROMPTS = [[5, 9, 33, 2, 7, 41, 8], [11, 3, 60], [4], [9, 8]]


def exported(name: str, folder: Path, store: Path, **model: Any) -> tuple[Any, Path]:
    """Our decoder and the folder of its export."""
    sizes, merge, _ = CASES[name]
    config = toy.toy_config("float32", model={"init_std": 0.5, **sizes, **model})
    decoder, checkpoint = loaded(save(folder / "c", config, store / "tokenizer.json", eos=1))
    export(checkpoint, folder / "out", None, merge, GB)
    return decoder, folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cola", "cola-gqa", "svd", "lax-tensor"])
def test_continuous_batching_gives_the_text_of_each_prompt_alone(name: str, tmp_path: Path, store: Path) -> None:
    decoder, folder = exported(name, tmp_path, store)
    expected: list[list[int]] = [[] for _ in PROMPTS]
    for new in generate_batch(decoder, PROMPTS, 9, Sampling(0.0), batch=4):
        expected[new.prompt].append(new.token)
    assert len({token for text in expected for token in text}) > 4, "text that says one word would show little"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    settings = transformers.GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(num_blocks=16, block_size=32, max_batch_tokens=64)
    outputs = model.generate_batch(
        PROMPTS, generation_config=settings, continuous_batching_config=batching, progress_bar=False
    )
    found = sorted(outputs.values(), key=lambda output: PROMPTS.index(list(output.prompt_ids)))
    assert [output.generated_tokens for output in found] == expected


@pytest.mark.nightly
def test_transformers_serve(tmp_path: Path, store: Path) -> None:
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)
    decoder, folder = exported("cola", tmp_path, store, vocab_size=300)
    tokenizer = load_tokenizer(store / "tokenizer.json")
    texts = ["def ", "import os", "class Toy", "x"]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    expected: list[list[int]] = [[] for _ in prompts]
    for new in generate_batch(decoder, prompts, 8, Sampling(0.0), 1, batch=4):
        expected[new.prompt].append(new.token)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--trust-remote-code"]
    words += ["--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "256", "--device", "cpu"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        wait_for(server, f"http://127.0.0.1:{port}/health", tmp_path / "log")
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda text: complete(port, str(folder), text), texts))
    finally:
        server.terminate()
        server.wait()
    assert found == [tokenizer.decode(tokens) for tokens in expected]


def wait_for(server: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    """Until the server answers."""
    while True:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=5).read()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
        else:
            return


def complete(port: int, model: str, prompt: str) -> str:
    """What the server continues a prompt with, greedily."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    answer = json.loads(urllib.request.urlopen(request, timeout=120).read())
    return str(answer["choices"][0]["text"])
