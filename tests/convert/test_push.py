"""`boost export --push` against a local server that emulates the Hub."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from boost.cli.main import main
from tests import toy
from tests.convert.toys import save

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.slow


class Hub(BaseHTTPRequestHandler):
    """The four requests of an upload; every file is small enough to be part of the commit."""

    created: list[dict[str, object]]
    files: dict[str, bytes]
    tokens: set[str | None]

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else self.chunks()
        self.tokens.add(self.headers.get("Authorization"))
        home = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer({"url": f"{home}/me/toy", "id": "me/toy"})
        elif self.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in names]
            self.answer({"files": files})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{home}/me/toy/commit/1", "commitOid": "1", "success": True})
        else:
            self.answer({}, 200 if self.path.endswith("validate-yaml") else 404)

    def chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def answer(self, content: dict[str, object], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], str]]:
    class Fresh(Hub):
        created, files, tokens = [], {}, set()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Fresh, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def export(path: Path, out: Path, endpoint: str, token: str | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs in a separate process, because huggingface_hub reads its environment on import."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(out.parent / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    settings |= {"HF_TOKEN": token} if token else {}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))} | settings
    command = [sys.executable, "-m", "boost.cli.main", "export", str(path), "--out", str(out), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize("private", [False, True])
def test_the_folder_is_uploaded_as_it_is(
    private: bool, tmp_path: Path, store: Path, hub: tuple[type[Hub], str]
) -> None:
    path, out = save(tmp_path / "c", toy.toy_config("float32"), store / "tokenizer.json"), tmp_path / "out"
    words = ["--push", "me/toy", "--json", *(["--private"] if private else [])]
    done = export(path, out, hub[1], "hf_secret", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pushed"] == f"{hub[1]}/me/toy"
    (created,) = hub[0].created
    assert (created["organization"], created["name"]) == ("me", "toy")
    assert (created.get("private") or created.get("visibility") == "private") is private
    assert hub[0].files == {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    assert "model.safetensors" in hub[0].files
    assert hub[0].tokens == {"Bearer hf_secret"}
    assert "hf_secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--private"], "--private requires --push USER/NAME"),
        (["--push", "toy"], "--push = 'toy' is not a repository name; expected USER/NAME"),
        (["--push", "a b/c"], "--push = 'a b/c' is not a repository name"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    path, out = save(tmp_path / "c", toy.toy_config("float32"), store / "tokenizer.json"), tmp_path / "out"
    assert main(["export", str(path), "--out", str(out), *words]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1) and expected in printed.err
    assert not out.exists()


def test_without_a_login_nothing_is_sent(tmp_path: Path, store: Path, hub: tuple[type[Hub], str]) -> None:
    path, out = save(tmp_path / "c", toy.toy_config("float32"), store / "tokenizer.json"), tmp_path / "out"
    done = export(path, out, hub[1], None, "--push", "me/toy")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "--push = 'me/toy' requires a Hugging Face Hub login; run 'hf auth login'" in done.stderr
    assert not out.exists() and hub[0].tokens == set()


def test_without_a_network_the_folder_stays(tmp_path: Path, store: Path) -> None:
    path, out = save(tmp_path / "c", toy.toy_config("float32"), store / "tokenizer.json"), tmp_path / "out"
    done = export(path, out, "http://127.0.0.1:9", "hf_secret", "--push", "me/toy")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert (
        f"--push = 'me/toy' failed (ConnectError: [Errno 111] Connection refused); '{out}' is complete" in done.stderr
    )
    assert f"run 'hf upload me/toy {out}'" in done.stderr
    assert (out / "model.safetensors").is_file()
