# SPDX-License-Identifier: Apache-2.0
"""The part of `config.json` that the text forward reads, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from trellisbank.errors import CheckpointError

# No constant of a model comes near it; beyond 1e38 fp32 arithmetic has no answer.
LARGEST = 1e30

LayerKind = Literal["window", "full", "reindex", "reuse"]

MODEL_TYPE = "deepseek_v41"

# Keys whose value is part of the architecture: the forward has one way of doing each.
FIXED = {
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "hc_mult",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "hc_sinkhorn_iters",
    "candidate_block_size",
    "candidate_topk_blocks",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
    "max_position_embeddings",
)

ABOVE_ZERO = ("rope_theta", "compress_rope_theta", "yarn_factor", "yarn_beta_slow")
NOT_NEGATIVE = ("rms_norm_eps", "hc_eps", "swiglu_limit")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of the text model; a field is named as its key in `text_config`.

    `compress_ratios` holds the body layers only. The `yarn_*` fields are `rope_scaling`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    hc_mult: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_block_size: int
    candidate_topk_blocks: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    swiglu_limit: float
    routed_scaling_factor: float
    rms_norm_eps: float
    hc_eps: float
    hc_sinkhorn_iters: int
    rope_theta: float
    compress_rope_theta: float
    yarn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_original_max_position_embeddings: int
    max_position_embeddings: int
    engram_layer_ids: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_num_embeddings: tuple[int, ...]
    engram_compressed_vocab_size: int
    engram_pad_token_id: int

    @property
    def engram_columns(self) -> int:
        """Hashed rows looked up for one token: one for each n-gram length >= 2 and head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


def layer_kind(cfg: ModelConfig, layer: int) -> LayerKind:
    """What a layer's attention does beside its sliding window.

    `window`: nothing. `full`: builds compressed keys and selects from them. `reindex`:
    selects anew from the keys of the last `full` layer. `reuse`: takes keys and selection
    as the layers before left them.
    """
    if cfg.compress_ratios[layer] == 0:
        return "window"
    if layer in cfg.kv_source_layer_ids:
        return "full"
    return "reindex" if layer in cfg.index_source_layer_ids else "reuse"


def last_source(sources: Sequence[int], layer: int) -> int | None:
    """The newest of `sources` at or before `layer`."""
    return max((source for source in sources if source <= layer), default=None)


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse and check a nested `config.json`.

    Args:
        raw: The parsed file.

    Raises:
        CheckpointError: Unknown architecture, a key that is missing or of the wrong type, a
            fixed key with another value, or sizes and layer lists that contradict one another.
    """
    if raw.get("model_type") != MODEL_TYPE:
        raise _bad("The architecture is unknown.", MODEL_TYPE, raw.get("model_type"))
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise _bad("text_config is missing.", "an object", text)
    for key, wanted in FIXED.items():
        if text.get(key, wanted) != wanted:
            raise _bad(f"text_config.{key} is not supported.", wanted, text[key])
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        raise _bad("text_config.rope_scaling is missing.", "an object", scaling)
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise _bad("text_config.rope_scaling has an unknown type.", "yarn", kind)
    flat = dict(text) | {f"yarn_{key}": value for key, value in scaling.items()}
    cfg = ModelConfig(**{f.name: _value(flat, f.name, f.type) for f in fields(ModelConfig)})
    drafts = _value({"num_nextn_predict_layers": 0} | flat, "num_nextn_predict_layers", int)
    layers = cfg.num_hidden_layers
    if len(cfg.compress_ratios) not in (layers, layers + drafts):
        raise _bad(
            "compress_ratios has a wrong length.",
            f"{layers} (body layers) or {layers + drafts} (with the drafts)",
            len(cfg.compress_ratios),
        )
    body = {f.name: getattr(cfg, f.name) for f in fields(ModelConfig)}
    cfg = ModelConfig(**body | {"compress_ratios": cfg.compress_ratios[:layers]})
    _check_sizes(cfg)
    _check_layer_lists(cfg)
    return cfg


def _bad(what: str, expected: object, found: object, fix: str | None = None) -> CheckpointError:
    return CheckpointError(
        what,
        file="config.json",
        expected=expected,
        found=found,
        fix=fix or "take config.json from the checkpoint as released",
    )


def _value(flat: Mapping[str, Any], name: str, kind: object) -> Any:
    """One key, as the type that the field declares."""
    if name not in flat:
        raise _bad(f"text_config.{name} is missing.", "a value", "nothing")
    value = flat[name]

    def is_int(item: object) -> bool:
        return isinstance(item, int) and not isinstance(item, bool)

    if kind == tuple[int, ...]:
        if not isinstance(value, list) or not all(is_int(item) for item in value):
            raise _bad(f"text_config.{name} has a wrong type.", "a list of integers", value)
        return tuple(value)
    if kind is float:
        if not is_int(value) and not isinstance(value, float):
            raise _bad(f"text_config.{name} has a wrong type.", "a number", value)
        if abs(value) > LARGEST:
            raise _bad(f"text_config.{name} is out of range.", f"at most {LARGEST}", value)
        return float(value)
    if not is_int(value):
        raise _bad(f"text_config.{name} has a wrong type.", "an integer", value)
    if value < 0 and name != "candidate_source_layer_id":
        raise _bad(f"text_config.{name} is negative.", "at least 0", value)
    return value


def _check_sizes(cfg: ModelConfig) -> None:
    """Refuse sizes with which a formula of the forward has no meaning."""
    for name in POSITIVE:
        if getattr(cfg, name) < 1:
            raise _bad(f"text_config.{name} is out of range.", "at least 1", getattr(cfg, name))
    rotary = cfg.qk_rope_head_dim
    demands = [
        ("head_dim", cfg.head_dim % 32 == 0, "a multiple of 32, the fake-quant group"),
        ("index_head_dim", cfg.index_head_dim % 32 == 0, "a multiple of 32"),
        (
            "qk_rope_head_dim",
            rotary % 2 == 0 and 0 < rotary <= min(cfg.head_dim, cfg.index_head_dim),
            "even, positive and no wider than a head",
        ),
        (
            "o_groups",
            cfg.num_attention_heads % cfg.o_groups == 0,
            "a divisor of num_attention_heads",
        ),
        (
            "num_experts_per_tok",
            cfg.num_experts_per_tok <= cfg.n_routed_experts,
            "at most n_routed_experts",
        ),
        *((name, getattr(cfg, name) > 0, "above 0") for name in ABOVE_ZERO),
        *((name, getattr(cfg, name) >= 0, "at least 0") for name in NOT_NEGATIVE),
        ("engram_max_ngram_size", cfg.engram_max_ngram_size >= 2, "at least 2"),
        (
            "engram_num_embeddings",
            len(cfg.engram_num_embeddings) == len(cfg.engram_layer_ids),
            "one entry for each of engram_layer_ids",
        ),
    ]
    for name, holds, expected in demands:
        if not holds:
            raise _bad(f"text_config.{name} is inconsistent.", expected, getattr(cfg, name))


def _check_layer_lists(cfg: ModelConfig) -> None:
    """Refuse lists of layers that leave a reader without a writer, or with another's ratio."""
    ratios, kv, index = cfg.compress_ratios, cfg.kv_source_layer_ids, cfg.index_source_layer_ids
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(cfg, name)
        if list(ids) != sorted(set(ids)) or any(i >= cfg.num_hidden_layers for i in ids):
            raise _bad(f"text_config.{name} is wrong.", "ascending body layers", list(ids))
    if not set(kv) <= set(index):
        raise _bad("A layer that builds keys does not index them.", f"{list(kv)} among them", index)
    for layer, ratio in enumerate(ratios):
        if ratio == 0:
            if layer in index:
                raise _bad(f"Layer {layer} indexes without compression.", "a ratio above 0", 0)
            continue
        source = last_source(kv, layer)
        if source is None:
            raise _bad(
                f"Layer {layer} has no compressed keys to read.", "a layer that builds them", kv
            )
        if ratios[source] != ratio:
            raise _bad(
                f"Layer {layer} reads the keys of layer {source} at another ratio.",
                ratios[source],
                ratio,
            )
    pool = cfg.candidate_source_layer_id
    if pool < 0:
        return
    if pool not in index:
        raise _bad("candidate_source_layer_id does not index.", f"one of {list(index)}", pool)
    for layer in index:
        if layer > pool and ratios[layer] != ratios[pool]:
            raise _bad(
                f"Layer {layer} draws from a pool of another ratio.", ratios[pool], ratios[layer]
            )
    surely = (cfg.candidate_topk_blocks - 1) * cfg.candidate_block_size + 1
    if surely < cfg.index_topk:
        # Below this the selection would fill up with positions outside the pool, in no order.
        raise _bad(
            "The candidate pool can be smaller than the selection.",
            f"(candidate_topk_blocks - 1) * candidate_block_size + 1 >= {cfg.index_topk}",
            surely,
        )
