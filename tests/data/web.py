"""C4's form on a small scale, and a web server on loopback whose connections break."""

import gzip
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORDS = ["the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they"]


def c4_texts(split: str, shard: int, documents: int) -> list[str]:
    """Documents of one shard, the same on every call."""
    rng = random.Random(f"{split} {shard}")
    return [
        f"{split} {shard}.{i} " + " ".join(rng.choices(WORDS, k=rng.randrange(5, 60))) + "\n" for i in range(documents)
    ]


def write_c4(folder: Path, shards: int = 3, documents: int = 40) -> Path:
    """A folder like the one of C4's `en` configuration: json.gz shards of both splits, with text, timestamp and url."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", shards), ("validation", 1)):
        for shard in range(count):
            rows = [
                {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": f"https://example.org/{shard}/{i}"}
                for i, text in enumerate(c4_texts(split, shard, documents))
            ]
            content = "".join(json.dumps(row) + "\n" for row in rows).encode()
            name = f"c4-{split}.{shard:05}-of-{count:05}.json.gz"
            (folder / name).write_bytes(gzip.compress(content, mtime=0))
    return folder


class Breaks:
    """Truncates a server's answers: the first `times` for each file whose name contains one of `names`."""

    def __init__(self, *names: str) -> None:
        self.names, self.times, self.broken = names, 0, 0
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def next(self, path: str) -> bool:
        """Counts one answer; returns whether it is truncated."""
        with self._lock:
            breaks = any(name in path for name in self.names) and self._asked[path] < self.times
            self._asked[path] += bool(self.times)
            self.broken += breaks
            return breaks


@contextmanager
def serve(folder: Path, breaks: Breaks) -> Iterator[str]:
    """Serves the files of a folder, including ranges; yields the server's address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(head=True)

        def do_GET(self) -> None:
            self._answer(head=False)

        def _answer(self, head: bool) -> None:
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                self.send_error(404)
                return
            data, status = path.read_bytes(), 200
            total = len(data)
            if asked := self.headers.get("Range"):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                data, status = data[int(first) : int(last or total - 1) + 1], 206
            self.send_response(status)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(data)))
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{total}")
            self.end_headers()
            if head:
                return
            if breaks.next(self.path):
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                return
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
