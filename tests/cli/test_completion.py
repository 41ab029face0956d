"""Completion scripts, the one for bash in a real bash."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from boost.cli.completion import SHELLS
from boost.config.load import fields
from tests.cli.commands import say

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
"$(complete -p boost | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import contextlib
    import io

    from boost.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["completion", "bash"]) == 0
    path = tmp_path_factory.mktemp("completion") / "boost.bash"
    path.write_text(printed.getvalue())
    return path


def candidates(script: Path, folder: Path, *words: str) -> list[str]:
    """Completions of a real bash for the last of `words`, in `folder`."""
    command = ["bash", "--norc", "-c", COMPLETE, "bash", str(script), "boost", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, timeout=60).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_presets_and_keys(script: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "runs").mkdir()

    def complete(*words: str) -> list[str]:
        return candidates(script, tmp_path, *words)

    assert {"train", "plan", "completion"} <= set(complete(""))
    assert complete("gen") == ["generate"]
    assert complete("plan", "c") == ["calibrate"]
    assert complete("plan", "calibrate", "--qu") == ["--quick"]
    assert complete("plan", "--gpu") == ["--gpus", "--gpu"]
    assert {"demo", "mine.toml", "runs"} <= set(complete("train", ""))
    assert "notes.txt" not in complete("train", "")
    assert complete("train", "demo", "--optim.na") == ["--optim.name"]
    assert set(complete("train", "--parallel.shard", "")) == {"none", "optimizer", "full"}
    assert complete("train", "demo", "--data.isolate_documents", "t") == ["true"]
    assert complete("eval", "--device", "cu") == ["cuda"]
    assert complete("eval", "ru") == ["runs"]
    assert complete("eval", "--train.s") == []


def test_every_shell_gets_every_key_quickly(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        begun = time.process_time()
        code, text, _ = say(capsys, "completion", shell)
        assert code == 0
        assert time.process_time() - begun < 5
        for key, _ in fields():
            assert key in text, (shell, key)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        say(capsys, "completion", "cmd")
    assert leaving.value.code == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
