"""config.json files: found, read, and refused with a reason."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from areal_sky.core.model_table import MODELS, find_model
from areal_sky.errors import InvalidInput
from areal_sky.run import modelfiles
from areal_sky.spec import load_text

CONFIG = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936,
}  # fmt: skip


def test_a_file_or_its_folder_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(CONFIG))
    for text in ("mine", "mine/config.json", str(tmp_path / "mine")):
        read, source = modelfiles.architecture(text, tmp_path)
        assert read.parameters == find_model("qwen2.5-0.5b").architecture.parameters
        assert read.name == "mine" and source == str(tmp_path / "mine" / "config.json")
    assert modelfiles.architecture("Qwen/Qwen2.5-0.5B", tmp_path)[1].startswith("huggingface.co/Qwen/")


def test_a_spec_names_files_relative_to_itself(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    text = "models: [{name: a, config: ./c.json}, {name: b, config: gone.json}, {name: c, config: qwen3-8b}, {name: d}]"
    spec = load_text(text, "x.yaml", 0.0)
    assert set(modelfiles.architectures(spec, tmp_path)) == {"a"}


HUGE = '{"vocab_size": 1' + "0" * 5000 + "}"


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "{}", "\x00", "[" * 100_000, HUGE])
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"expected|has no"):
        modelfiles.read_architecture(tmp_path / "c.json")


@pytest.mark.parametrize("text", ["\0", "x" * 5000, "~nobody-here/x", "/dev/null/x"])
def test_a_path_that_cannot_be_is_no_file(tmp_path: Path, text: str) -> None:
    assert modelfiles.config_file(text, tmp_path) is None


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_an_architecture_survives_being_kept_with_a_cluster(model: object) -> None:
    architecture = model.architecture  # type: ignore[attr-defined]
    assert modelfiles.from_dict(json.loads(json.dumps(asdict(architecture)))) == architecture
