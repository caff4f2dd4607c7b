# SPDX-License-Identifier: Apache-2.0
"""config.json: what is read, and what is refused."""

import copy
from typing import Any

import pytest

from model_a import checkpoint, config
from trellisbank.errors import CheckpointError
from trellisbank.model.config import layer_kind, model_config


def changed(**text: Any) -> dict[str, Any]:
    raw = copy.deepcopy(checkpoint().config)
    raw["text_config"].update(text)
    return raw


def test_reads_the_body_layers_with_or_without_drafts() -> None:
    assert config().compress_ratios == (0, 2, 2, 1, 1, 1)
    assert model_config(changed(compress_ratios=[0, 2, 2, 1, 1, 1])) == config()
    assert config().yarn_factor == 4.0 and config().engram_columns == 6


def test_layer_kinds() -> None:
    kinds = [layer_kind(config(), layer) for layer in range(6)]
    assert kinds == ["window", "full", "reuse", "full", "reindex", "reuse"]


def test_layer_kinds_of_the_release() -> None:
    cfg = model_config(
        changed(
            num_hidden_layers=40,
            compress_ratios=[0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
            num_nextn_predict_layers=3,
            kv_source_layer_ids=[2, 8, 14, 20],
            index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
            candidate_source_layer_id=20,
        )
    )
    of_kind = {
        kind: [layer for layer in range(40) if layer_kind(cfg, layer) == kind]
        for kind in ("window", "full", "reindex")
    }
    assert of_kind == {"window": [0, 1], "full": [2, 8, 14, 20], "reindex": [24, 28, 32, 36]}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_size": "256"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"swiglu_limit": None}, "swiglu_limit"),
        ({"head_dim": 48}, "head_dim"),
        ({"o_groups": 3}, "o_groups"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 31}, "qk_rope_head_dim"),
        ({"compress_ratios": [0, 2, 2, 1]}, "compress_ratios"),
        ({"compress_ratios": [2, 2, 2, 1, 1, 1]}, "Layer 0 has no compressed keys"),
        ({"compress_ratios": [0, 2, 1, 1, 1, 1]}, "Layer 2 reads the keys of layer 1"),
        ({"compress_ratios": [0, 2, 2, 1, 0, 1]}, "Layer 4 indexes without compression"),
        ({"kv_source_layer_ids": [1, 2, 3]}, "does not index"),
        ({"kv_source_layer_ids": [3, 1]}, "kv_source_layer_ids"),
        ({"index_source_layer_ids": [1, 3, 6]}, "index_source_layer_ids"),
        ({"candidate_source_layer_id": 2}, "candidate_source_layer_id"),
        ({"candidate_source_layer_id": 1}, "pool of another ratio"),
        ({"candidate_topk_blocks": 2}, "smaller than the selection"),
        ({"engram_num_embeddings": [1362]}, "engram_num_embeddings"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
        ({"rope_scaling": None}, "rope_scaling"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"compress_rope_theta": 0}, "compress_rope_theta"),
    ],
)
def test_refuses(text: dict[str, Any], part: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_config(changed(**text))
    message = str(caught.value)
    assert part in message
    assert {"file", "expected", "fix"} <= set(caught.value.fields)


@pytest.mark.parametrize("key", ["hidden_size", "engram_pad_token_id", "compress_rope_theta"])
def test_refuses_a_missing_key(key: str) -> None:
    raw = changed()
    del raw["text_config"][key]
    with pytest.raises(CheckpointError, match=key):
        model_config(raw)


def test_refuses_another_architecture() -> None:
    with pytest.raises(CheckpointError, match="architecture"):
        model_config(changed() | {"model_type": "llama"})
    with pytest.raises(CheckpointError, match="text_config"):
        model_config({"model_type": "deepseek_v41"})
