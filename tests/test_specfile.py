"""Files that cannot be specs are refused with one clear mistake."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from areal_sky.errors import SpecError
from areal_sky.specfile import read_spec


def refusal(path: Path | str) -> str:
    with pytest.raises(SpecError) as refused:
        read_spec(path)
    assert len(refused.value.mistakes) == 1
    return str(refused.value)


def test_a_file_is_read_and_names_the_cluster(tmp_path: Path) -> None:
    path = tmp_path / "my run.yaml"
    path.write_bytes(b"\xef\xbb\xbfresources: {accelerators: V100:8}\r\n")  # as Windows' editors save it
    assert read_spec(path).name == "my-run"


def test_a_missing_file_says_which_one_was_near(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("resources: {}")
    assert f"{tmp_path}/a.yml:1:1: no such file" in refusal(tmp_path / "a.yml")
    assert "did you mean" in refusal(tmp_path / "a.yml") and "a.yaml" in refusal(tmp_path / "a.yml")
    assert "did you mean" not in refusal(tmp_path / "b.yml")


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path)
    assert "cannot be read" in refusal("a\0b")
    assert "more than 1,048,576 bytes" in refusal("/dev/zero")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("# ok\nname: caf\u00e9".encode("latin-1"))
    assert f"{latin}:2:10: not UTF-8 text" in refusal(latin)
    empty = tmp_path / "empty.yaml"
    empty.touch()
    assert f"{empty}:1:1: the file is empty" in refusal(empty)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("resources: {}")
    path.chmod(0)
    assert "may not be read by this user" in refusal(path)


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"name: a\nreplicas: 2\n")))
    assert refusal("-").startswith("<stdin>:2:1: unknown key `replicas`")
