"""The text for worth.sh: English documentation from Debian packages, deduplicated. Needs Debian's apt-get and dpkg-deb, not root.

    python -m benchmarks.gpu.corpus build/corpus       downloads the packages in corpus.toml; writes build/corpus/text.jsonl
    boost prepare build/corpus/text.jsonl --tokenizer train:32000 --out data/worth
    tar -c -C data/worth . | xz --lzma2=preset=6,dict=192MiB,lc=3,lp=1,pb=1 > build/worth.tar.xz       to travel

Each document is one file of a package, without markup. Only paragraphs of English prose that no earlier file contains are kept;
case, digits and punctuation do not count. Of 100 random paragraphs, 96 were prose. 280 MB in 47,243 documents, 64.1M tokens,
47.6 MiB to travel (54M tokens would fit in 40 MiB), 5 seconds to unpack.
`--latest` downloads the versions that apt offers, and rewrites corpus.toml.
"""

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

LIST = Path(__file__).with_name("corpus.toml")
SUFFIXES = (
    ".html",
    ".htm",
    ".xhtml",
    ".txt",
    ".rst",
    ".md",
    ".info",
    ".pod",
    ".dict",
    *(f".{n}" for n in range(1, 9)),
    "",
)
ENGLISH = re.compile(r"\b(?:the|of|and|to|is|in|that|for|with|are)\b", re.IGNORECASE)
LEAST_ENGLISH = 0.08
"""Least fraction of a paragraph's words that are among the most frequent ones of English."""
LETTER = re.compile("[A-Za-z ,.'\u2019]")
LEAST_LETTERS = 0.85
"""Least fraction of a paragraph's characters that are letters, spaces or marks of a sentence: code and tables have fewer."""
LEAST, LONGEST = 500, 100_000
"""Characters of a document."""
SHORTEST = 40
"""Characters of the shortest paragraph that is kept: shorter ones are headings, menus and code."""


def texts(folder: Path) -> Iterator[tuple[Path, str]]:
    """The text files in an unpacked package, decompressed."""
    for path in sorted(folder.rglob("*")):
        name = Path(path.stem) if path.suffix in (".gz", ".dz") else path
        if path.is_symlink() or not path.is_file() or name.suffix.lower() not in SUFFIXES:
            continue
        if "_sources" in path.parts:  # Sphinx's copy of what its pages say
            continue
        if "changelog" in name.name.lower() or "copyright" in name.name.lower():
            continue
        data = path.read_bytes()
        if path.suffix in (".gz", ".dz"):
            data = gzip.decompress(data)
        if b"\0" in data[:4096]:
            continue
        yield path, data.decode("utf-8", errors="ignore")


def prose(name: str, text: str) -> str:
    """The text without HTML, POD or troff markup; a dictionary with one paragraph per entry."""
    if re.search(r"\.x?html?(?:\.gz)?$", name):
        text = re.sub(r"(?is)<(script|style|nav|head)\b.*?</\1>|<!--.*?-->", " ", text)
        text = re.sub(r"(?i)</?(?:p|div|li|tr|h\d|dt|dd|pre|br|table|ul|ol|section|td)\b[^>]*>", "\n\n", text)
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
    elif re.search(r"\.\d(?:\.gz)?$", name):
        text = re.sub(r"(?m)^\.(?:B|I|BR|IR|RB|RI|Nm|Fl|Ar) ", "", text)
        text = re.sub(r"(?m)^[.'].*$", "\n", text)
        text = re.sub(r"\\(?:[*f]?\(..|[*f].|s[-+]?\d|&|-)", lambda match: "-" if match[0] == r"\-" else "", text)
    elif name.endswith(".pod"):
        text = re.sub(r"[A-Z]<+ ?([^<>]*?) ?>+", r"\1", text)
    elif re.search(r"\.dict(?:\.dz)?$", name):
        text = re.sub(r"\n(?=\S)", "\n\n", re.sub(r"\[[^]]*\]", "", text))
    return text


def paragraphs(text: str) -> Iterator[str]:
    """Its paragraphs, each on one line."""
    for part in re.split(r"\n\s*\n", text):
        line = " ".join(part.split())
        if len(line) >= SHORTEST:
            yield line


def is_prose(text: str) -> bool:
    """Whether a paragraph is English prose that ends with a sentence, not a heading, code, a table or another language."""
    return (
        text.rstrip("*`'\"\u2019\u201d)]").endswith((".", "!", "?", ":"))
        and len(LETTER.findall(text)) >= LEAST_LETTERS * len(text)
        and len(ENGLISH.findall(text)) >= LEAST_ENGLISH * len(text.split())
    )


def documents(folder: Path, seen: set[bytes]) -> Iterator[str]:
    """The documents of an unpacked package: what no earlier one contains. A long file, such as a dictionary, becomes several."""
    for path, text in texts(folder):
        lines, size = [], 0
        for line in paragraphs(prose(path.name, text)):
            letters = re.sub(r"[^a-z]+", "", line.lower())  # a page exists in several formats
            digest = hashlib.blake2b(letters.encode(), digest_size=8).digest()
            if digest not in seen and is_prose(line):
                seen.add(digest)
                lines.append(line)
                size += len(line)
                if size >= LONGEST:
                    yield "\n\n".join(lines)
                    lines, size = [], 0
        if size >= LEAST:
            yield "\n\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--latest", action="store_true", help="download the versions that apt offers, and rewrite corpus.toml"
    )
    args = parser.parse_args()
    packages = dict(tomllib.loads(LIST.read_text(encoding="utf-8"))["packages"])
    args.folder.mkdir(parents=True, exist_ok=True)
    seen, size = set[bytes](), 0
    with (args.folder / "text.jsonl").open("w", encoding="utf-8") as out:
        for name in packages:
            if not (found := list(args.folder.glob(f"{name}_*.deb"))):
                wanted = name if args.latest else f"{name}={packages[name]}"
                subprocess.run(["apt-get", "download", "--quiet", wanted], cwd=args.folder, check=True)
                found = list(args.folder.glob(f"{name}_*.deb"))
            facts = subprocess.run(
                ["dpkg-deb", "--field", found[0], "Version"], check=True, capture_output=True, text=True
            )
            packages[name] = facts.stdout.strip()
            unpacked = args.folder / name
            if not unpacked.exists():
                subprocess.run(["dpkg-deb", "--extract", found[0], unpacked], check=True)
            before = size
            for text in documents(unpacked, seen):
                size += len(text)
                out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            print(f"{name} {packages[name]}: {(size - before) / 1e6:.1f} MB", flush=True)
    if args.latest:
        head = LIST.read_text(encoding="utf-8").partition("[packages]")[0]
        lines = [f'"{name}" = "{version}"' for name, version in packages.items()]
        LIST.write_text("\n".join([f"{head}[packages]", *lines, ""]), encoding="utf-8")
    print(f"{size / 1e6:.0f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
