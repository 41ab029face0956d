"""`boost verify` as a command."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from boost.config import section
from boost.config.families import ModelConfig
from tests.cli.commands import Capture, done, refused

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("only", ["collectives links", pytest.param("machines step", marks=pytest.mark.nightly)])
def test_the_sections_of_processes_pass_here(only: str, tmp_path: Path, capfd: Capture) -> None:
    out = tmp_path / "verify.json"
    words = ("--only", *only.split(), "--nproc", "2")
    text = done(capfd, "verify", *words, "--out", out)
    facts = json.loads(out.read_text())
    assert facts["verdict"] == "ok"
    sections = {check["section"] for check in facts["checks"]}
    assert len(sections) == 2, sections
    assert {check["verdict"] for check in facts["checks"]} <= {"ok", "note"}, text
    assert ("bitwise equal" if "links" in only else "tok/s per device") in text


@pytest.mark.nightly
def test_layouts_pass_here_compiled_too(tmp_path: Path, capfd: Capture) -> None:
    text = done(capfd, "verify", "--only", "layouts", "--nproc", "2", "--out", tmp_path / "verify.json")
    for words in ("btp-sp", "FSDP", "blocks compiled"):
        assert words in text


@pytest.mark.nightly
def test_whole_runs_pass_here(tmp_path: Path, capfd: Capture) -> None:
    text = done(capfd, "verify", "--only", "runs", "--nproc", "2", "--out", tmp_path / "verify.json")
    for words in ("bitwise equal", "rank 1 killed", "FSDP over 2", "rank 1 reported", "saved step"):
        assert words in text


def test_the_users_configuration_comes_first(tmp_path: Path, capfd: Capture) -> None:
    config = tmp_path / "own.toml"
    config.write_text(
        '[model]\ndim = 64\nffn_dim = 96\nheads = 4\nlayers = 2\nrank = 16\nvocab_size = 128\n[parallel]\nlayout = "btp-cp"\n'
        'tp = 2\n[train]\nmicro_batch = 2\nglobal_batch = 2\nseq_len = 32\n[run]\ndevice = "cpu"\n'
    )
    out = tmp_path / "verify.json"
    text = done(capfd, "verify", config, "--only", "step", "machines", "--out", out)
    assert "cola, btp-cp, d 64" in text and "tok/s per device" in text
    err = refused(capfd, "verify", config, "--nproc", "3", "--out", out)
    assert "--nproc = 3 must equal" in err and "valid value: 2" in err


def test_a_family_is_chosen_by_its_name(capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an installed package, too, whose module is imported when it is asked for."""
    monkeypatch.setattr(ModelConfig, "choices", dict(ModelConfig.choices))
    monkeypatch.setattr(section, "load_plugins", section.load_plugins.__wrapped__)
    err = refused(capfd, "verify", "--family", "narrow", "--nproc", "0")
    assert "model.family = 'narrow'" in err and "dense, svd, cola, lax" in err
    (tmp_path / "verify_plugin.py").write_text(
        "from typing import Literal\nfrom boost.families import CoLAConfig\n"
        "class Narrow(CoLAConfig):\n    family: Literal['narrow'] = 'narrow'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    points = [metadata.EntryPoint("narrow", "verify_plugin", section.PLUGINS)]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    assert "--nproc = 0 is too small" in refused(capfd, "verify", "--family", "narrow", "--nproc", "0")


def test_no_process_checks_nothing(capfd: Capture) -> None:
    assert "--nproc = 0 is too small; smallest valid value: 1" in refused(capfd, "verify", "--nproc", "0")
