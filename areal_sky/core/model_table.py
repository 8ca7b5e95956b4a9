"""Common models, so that a name is enough: their architectures and what their makers publish about their size.

Architecture: the `config.json` of the Hugging Face repository named as `repo`. Published parameter counts (in
billions, all and active): the model card there, or the paper named in `counts`. tests/core/test_model_table.py holds
each architecture's count against the published one.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache

from areal_sky.core.architecture import Architecture, LatentAttention
from areal_sky.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class KnownModel:
    """`published_b` and `active_b` are billions of parameters; `counts` says where these were published.

    `active_without`: how many of the two embeddings (input first) the published active count leaves out.
    """

    architecture: Architecture
    repo: str
    published_b: float
    active_b: float | None = None
    counts: str = "model card"
    aliases: tuple[str, ...] = ()
    active_without: int = 0

    @property
    def name(self) -> str:
        return self.architecture.name

    @property
    def source(self) -> str:
        return f"huggingface.co/{self.repo}/blob/main/config.json"


def find_model(name: str) -> KnownModel:
    """The model of that name: as in the table, with its maker (`Qwen/Qwen2.5-7B`), or of a tuned variant (`-Instruct`).

    Raises InvalidInput with the nearest known names.
    """
    found = _by_name().get(_squeezed(name))
    if found is not None:
        return found
    names = known_models()
    word = _squeezed(name)
    begun = [n for n in names if word and n.startswith(word)]
    close = list(dict.fromkeys((*begun, *difflib.get_close_matches(word, names, 3, 0.5))))[:3]
    meant = f", did you mean {' or '.join(f'`{c}`' for c in close)}?" if close else f", known are {', '.join(names)}"
    raise InvalidInput(f"no known model `{name[:60]}`, expected one of the table or the path of a config.json{meant}")


def known_models() -> tuple[str, ...]:
    """Every name of the table."""
    return tuple(m.name for m in MODELS)


def is_known(name: str) -> bool:
    return _squeezed(name) in _by_name()


# Endings of variants that share their base's architecture.
_VARIANT = re.compile(
    r"-(?:instruct|base|chat|it|thinking|hf|bf16|fp8|v0\.[1-3]|2507|0528|0324|0905|2409|2501|2503)(?=-|$)"
)


def _squeezed(name: str) -> str:
    """Lower case, without maker, `Meta-` and the endings of variants: what the table is looked up by."""
    text = name.strip().rstrip("/").lower().rpartition("/")[2].removeprefix("meta-").replace("_", "-")
    return _VARIANT.sub("", text)


@cache
def _by_name() -> dict[str, KnownModel]:
    return {_squeezed(n): m for m in MODELS for n in (m.name, m.repo, *m.aliases)}


def _dense(
    name: str, repo: str, published_b: float, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int,
    vocabulary: int, *, head_dim: int = 128, tied: bool = False, qkv_bias: bool = False, aliases: tuple[str, ...] = (),
) -> KnownModel:  # fmt: skip
    made = Architecture(
        name, layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, tied, qkv_bias=qkv_bias
    )
    return KnownModel(made, repo, published_b, aliases=aliases)


def _moe(
    name: str, repo: str, published_b: float, active_b: float, layers: int, hidden: int, intermediate: int, heads: int,
    kv_heads: int, vocabulary: int, experts: tuple[int, int, int], *, shared: int = 0, dense_layers: int = 0,
    head_dim: int = 128, qkv_bias: bool = False, aliases: tuple[str, ...] = (), counts: str = "model card",
    active_without: int = 0,
) -> KnownModel:  # fmt: skip
    """`experts`: how many, how many active, their intermediate size."""
    made = Architecture(
        name, layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, experts=experts[0],
        active_experts=experts[1], expert_intermediate=experts[2], shared_experts=shared,
        moe_layers=layers - dense_layers, qkv_bias=qkv_bias,
    )  # fmt: skip
    return KnownModel(made, repo, published_b, active_b, counts, aliases, active_without)


def _latent(
    name: str, repo: str, published_b: float, active_b: float, layers: int, hidden: int, intermediate: int, heads: int,
    vocabulary: int, experts: tuple[int, int, int], shared: int, dense_layers: int, q_rank: int | None,
    aliases: tuple[str, ...] = (), counts: str = "model card", active_without: int = 0,
) -> KnownModel:  # fmt: skip
    """The DeepSeek family: all have the same latent attention but for the queries' rank."""
    made = Architecture(
        name, layers, hidden, intermediate, heads, heads, 0, vocabulary, experts=experts[0], active_experts=experts[1],
        expert_intermediate=experts[2], shared_experts=shared, moe_layers=layers - dense_layers,
        latent=LatentAttention(kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=q_rank),
    )  # fmt: skip
    return KnownModel(made, repo, published_b, active_b, counts, aliases, active_without)


def _gpt_oss(name: str, repo: str, published_b: float, active_b: float, layers: int, experts: int) -> KnownModel:
    """Every second layer looks at the last 128 tokens only."""
    made = Architecture(
        name, layers, 2880, 2880, 64, 8, 64, 201088, experts=experts, active_experts=4, expert_intermediate=2880,
        moe_layers=layers, all_bias=True, window=128, window_layers=layers // 2,
    )  # fmt: skip
    counts = "gpt-oss model card, arXiv 2508.10925, table 1"
    return KnownModel(made, repo, published_b, active_b, counts, active_without=1)


QWEN, QWEN_LARGE, LLAMA3 = 151936, 152064, 128256  # vocabularies

MODELS: tuple[KnownModel, ...] = (
    _dense("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 0.49, 24, 896, 4864, 14, 2, QWEN, head_dim=64, tied=True,
           qkv_bias=True),
    _dense("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", 1.54, 28, 1536, 8960, 12, 2, QWEN, tied=True, qkv_bias=True,
           aliases=("qwen2.5-math-1.5b", "qwen2.5-coder-1.5b")),
    _dense("qwen2.5-3b", "Qwen/Qwen2.5-3B", 3.09, 36, 2048, 11008, 16, 2, QWEN, tied=True, qkv_bias=True),
    _dense("qwen2.5-7b", "Qwen/Qwen2.5-7B", 7.61, 28, 3584, 18944, 28, 4, QWEN_LARGE, qkv_bias=True,
           aliases=("qwen2.5-math-7b", "qwen2.5-coder-7b", "deepseek-r1-distill-qwen-7b")),
    _dense("qwen2.5-14b", "Qwen/Qwen2.5-14B", 14.7, 48, 5120, 13824, 40, 8, QWEN_LARGE, qkv_bias=True,
           aliases=("deepseek-r1-distill-qwen-14b",)),
    _dense("qwen2.5-32b", "Qwen/Qwen2.5-32B", 32.5, 64, 5120, 27648, 40, 8, QWEN_LARGE, qkv_bias=True,
           aliases=("qwq-32b", "qwen2.5-coder-32b", "deepseek-r1-distill-qwen-32b")),
    _dense("qwen2.5-72b", "Qwen/Qwen2.5-72B", 72.7, 80, 8192, 29568, 64, 8, QWEN_LARGE, qkv_bias=True),
    _dense("deepseek-r1-distill-qwen-1.5b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.78, 28, 1536, 8960, 12, 2,
           QWEN, qkv_bias=True),
    _dense("qwen3-0.6b", "Qwen/Qwen3-0.6B", 0.6, 28, 1024, 3072, 16, 8, QWEN, tied=True),
    _dense("qwen3-1.7b", "Qwen/Qwen3-1.7B", 1.7, 28, 2048, 6144, 16, 8, QWEN, tied=True),
    _dense("qwen3-4b", "Qwen/Qwen3-4B", 4.0, 36, 2560, 9728, 32, 8, QWEN, tied=True),
    _dense("qwen3-8b", "Qwen/Qwen3-8B", 8.2, 36, 4096, 12288, 32, 8, QWEN),
    _dense("qwen3-14b", "Qwen/Qwen3-14B", 14.8, 40, 5120, 17408, 40, 8, QWEN),
    _dense("qwen3-32b", "Qwen/Qwen3-32B", 32.8, 64, 5120, 25600, 64, 8, QWEN),
    _moe("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 30.5, 3.3, 48, 2048, 6144, 32, 4, QWEN, (128, 8, 768),
         aliases=("qwen3-coder-30b-a3b",)),
    _moe("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 235, 22, 94, 4096, 12288, 64, 4, QWEN, (128, 8, 1536)),
    _moe("qwen3-coder-480b-a35b", "Qwen/Qwen3-Coder-480B-A35B-Instruct", 480, 35, 62, 6144, 8192, 96, 8, QWEN,
         (160, 8, 2560)),
    _dense("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 1.23, 16, 2048, 8192, 32, 8, LLAMA3, head_dim=64, tied=True),
    _dense("llama-3.2-3b", "meta-llama/Llama-3.2-3B", 3.21, 28, 3072, 8192, 24, 8, LLAMA3, tied=True),
    _dense("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 8.03, 32, 4096, 14336, 32, 8, LLAMA3,
           aliases=("llama-3-8b", "deepseek-r1-distill-llama-8b")),
    _dense("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 70.6, 80, 8192, 28672, 64, 8, LLAMA3,
           aliases=("llama-3-70b", "llama-3.3-70b", "deepseek-r1-distill-llama-70b")),
    _dense("llama-3.1-405b", "meta-llama/Llama-3.1-405B", 405, 126, 16384, 53248, 128, 8, LLAMA3),
    _dense("mistral-7b", "mistralai/Mistral-7B-v0.1", 7.24, 32, 4096, 14336, 32, 8, 32000),
    _dense("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", 23.6, 40, 5120, 32768, 32, 8, 131072),
    _dense("phi-4", "microsoft/phi-4", 14.7, 40, 5120, 17920, 40, 10, 100352),
    _moe("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 46.7, 12.9, 32, 4096, 14336, 32, 8, 32000, (8, 2, 14336),
         counts="Mixtral of Experts, arXiv 2401.04088: 47B and 13B; card 46.7B, 12.9B"),
    _moe("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", 141, 39, 56, 6144, 16384, 48, 8, 32000, (8, 2, 16384)),
    _moe("glm-4.5-air", "zai-org/GLM-4.5-Air", 106, 12, 46, 4096, 10944, 96, 8, 151552, (128, 8, 1408), shared=1,
         dense_layers=1, qkv_bias=True, counts="GLM-4.5, arXiv 2508.06471, table 1", active_without=2),
    _moe("glm-4.5", "zai-org/GLM-4.5", 355, 32, 92, 5120, 12288, 96, 8, 151552, (160, 8, 1536), shared=1,
         dense_layers=3, qkv_bias=True, counts="GLM-4.5, arXiv 2508.06471, table 1", active_without=2),
    _latent("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 15.7, 2.4, 27, 2048, 10944, 16, 102400,
            (64, 6, 1408), 2, 1, None, active_without=1),
    _latent("deepseek-v2", "deepseek-ai/DeepSeek-V2", 236, 21, 60, 5120, 12288, 128, 102400, (160, 6, 1536), 2, 1,
            1536, counts="DeepSeek-V2, arXiv 2405.04434"),
    _latent("deepseek-v3", "deepseek-ai/DeepSeek-V3", 671, 37, 61, 7168, 18432, 128, 129280, (256, 8, 2048), 1, 3,
            1536, aliases=("deepseek-r1", "deepseek-v3.1", "deepseek-r1-zero"),
            counts="DeepSeek-V3, arXiv 2412.19437: without the 14B of multi-token prediction"),
    _latent("kimi-k2", "moonshotai/Kimi-K2-Base", 1040, 32.6, 61, 7168, 18432, 64, 163840, (384, 8, 2048), 1, 1, 1536,
            counts="Kimi K2, arXiv 2507.20534, table 2: 1.04T, 32.6B"),
    _gpt_oss("gpt-oss-20b", "openai/gpt-oss-20b", 20.91, 3.61, 24, 32),
    _gpt_oss("gpt-oss-120b", "openai/gpt-oss-120b", 116.83, 5.13, 36, 128),
)  # fmt: skip
