# SPDX-License-Identifier: Apache-2.0
"""Scores against a dense fp64 reference, their exact zero, and what is counted and refused."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trellisbank.checkpoint import Checkpoint
from trellisbank.errors import ForwardError
from trellisbank.evaluate import scores
from trellisbank.evaluate.scores import Head, score_files, score_tokens
from trellisbank.evaluate.summary import MEASURES, summarize
from trellisbank.safetensors_io import write_tensors


def random_arms(seed, rows=3, length=7, width=16, vocabulary=50, distance=0.2):
    """Two models whose hidden states and heads differ a little."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    hidden = normal(rows, length, width)
    head = normal(vocabulary, width)
    other = (hidden + distance * normal(rows, length, width)).bfloat16()
    other_head = (head + distance * normal(vocabulary, width)).bfloat16()
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    return hidden.bfloat16(), head.bfloat16(), other, other_head, ids


def dense_reference(hidden_a, head_a, hidden_b, head_b, ids):
    """All logits at once in fp64."""
    log_p, log_q = (
        torch.log_softmax(hidden[:, :-1].double() @ head.double().T, dim=-1)
        for hidden, head in ((hidden_a, head_a), (hidden_b, head_b))
    )
    target = ids[:, 1:, None]
    true_p, true_q = log_p.gather(-1, target), log_q.gather(-1, target)
    result = {
        "nll_source": -true_p,
        "nll_release": -true_q,
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "kl_reverse": (log_q.exp() * (log_q - log_p)).sum(-1),
        "agree": log_p.argmax(-1) == log_q.argmax(-1),
        "best_probability": log_p.amax(-1).exp(),
        "best_rank": ((log_q > log_q.gather(-1, log_p.argmax(-1, keepdim=True))).sum(-1) + 1).clamp(
            max=6
        ),
        "rank_source": (log_p > true_p).sum(-1) + 1,
        "rank_release": (log_q > true_q).sum(-1) + 1,
        "p_true_difference": true_q.exp() - true_p.exp(),
    }
    return {name: value.reshape(-1).numpy() for name, value in result.items()}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 3),
    length=st.integers(2, 9),
    width=st.integers(1, 24),
    vocabulary=st.integers(2, 70),
    token_block=st.integers(1, 20),
    vocabulary_block=st.integers(1, 80),
)
def test_agrees_with_a_dense_fp64_reference(
    seed, rows, length, width, vocabulary, token_block, vocabulary_block
):
    arms = random_arms(seed, rows, length, width, vocabulary)
    table = score_tokens(*arms, token_block=token_block, vocabulary_block=vocabulary_block)
    reference = dense_reference(*arms)
    assert len(table) == rows * (length - 1)
    for name in [*MEASURES, "best_probability"]:
        np.testing.assert_allclose(table[name], reference[name], atol=2e-5, err_msg=name)
    # Equal fp64 logits may round apart in fp32 and the other way round; ranks then move by one.
    for name in ("rank_source", "rank_release", "best_rank"):
        assert np.mean(table[name] != reference[name]) <= 0.1, name


def test_ranks_and_agreement_are_exact_where_logits_are():
    generator = torch.Generator().manual_seed(5)

    def whole(*shape):
        return torch.randint(-3, 4, shape, generator=generator).bfloat16()

    arms = whole(4, 30, 8), whole(60, 8), whole(4, 30, 8), whole(60, 8)
    ids = torch.randint(60, (4, 30), generator=generator)
    reference = dense_reference(*arms, ids)
    for token_block, vocabulary_block in ((512, 4096), (7, 11), (1, 1)):
        table = score_tokens(*arms, ids, token_block=token_block, vocabulary_block=vocabulary_block)
        for name in ("agree", "best_rank", "rank_source", "rank_release"):
            np.testing.assert_array_equal(table[name], reference[name], err_msg=name)
        # Whole numbers leave no rounding in the logits: only that of fp64 sums remains.
        for name in MEASURES:
            np.testing.assert_allclose(table[name], reference[name], atol=1e-12, err_msg=name)
    assert table["row"].tolist() == np.repeat(np.arange(4), 29).tolist()
    assert table["position"].tolist() == list(range(1, 30)) * 4
    assert table["token"].tolist() == ids[:, 1:].reshape(-1).tolist()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.integers(2, 300),
    token_block=st.integers(1, 40),
    vocabulary_block=st.integers(1, 300),
)
def test_kl_of_a_model_to_itself_is_exactly_zero(seed, vocabulary, token_block, vocabulary_block):
    hidden, head, _, _, ids = random_arms(seed, rows=4, length=9, width=33, vocabulary=vocabulary)
    table = score_tokens(
        hidden,
        head,
        hidden.clone(),
        Head(vocabulary, lambda ids: head.clone()[ids]),
        ids,
        token_block=token_block,
        vocabulary_block=vocabulary_block,
    )
    assert (table["kl"] == 0).all()
    assert (table["kl_reverse"] == 0).all()
    assert (table["p_true_difference"] == 0).all()
    assert table["agree"].all()
    assert (table["nll_source"] == table["nll_release"]).all()


def test_values_that_are_not_finite_are_counted_and_never_left_out():
    hidden, head, other, other_head, ids = random_arms(3)
    other[1, 2, 0] = float("nan")
    other[2, 4, 0] = float("inf")
    table = score_tokens(hidden, head, other, other_head, ids)
    bad = table[~np.isfinite(table["kl"])]
    assert bad[["row", "position"]].values.tolist() == [[1, 3], [2, 5]]
    assert not bad["agree"].any()
    assert (bad["best_rank"] == 0).all()
    assert (bad["rank_release"] == 0).all() and (bad["rank_source"] > 0).all()
    summary = summarize(table)
    assert summary["non_finite_tokens"] == 2
    assert summary["kl"]["mean"] is None and summary["kl"]["p99"] is None
    assert summary["nll"]["source"] is not None and summary["nll"]["release"] is None
    json.dumps(summary, allow_nan=False)


def test_negative_values_are_counted_and_never_clamped():
    table = score_tokens(*random_arms(4))
    table.loc[2, "kl"] = -1e-9
    summary = summarize(table)
    assert summary["negative_tokens"]["kl"] == 1
    assert summary["kl"]["mean"] == table["kl"].mean()


def test_summary():
    table = score_tokens(*random_arms(6))
    summary = summarize(table)
    assert (summary["windows"], summary["tokens"]) == (3, 18)
    assert summary["perplexity"]["ratio"] == pytest.approx(
        summary["perplexity"]["release"] / summary["perplexity"]["source"]
    )
    assert summary["kl"]["median"] == pytest.approx(np.median(table["kl"]))
    assert summary["kl"]["max"] == table["kl"].max()
    assert summary["top1_agreement"] == table["agree"].mean()
    shares = list(summary["best_among_top"].values())
    assert shares == sorted(shares) and shares[0] == (table["best_rank"] == 1).mean()


def test_buckets_part_the_tokens():
    table = score_tokens(*random_arms(6, rows=4, length=40))
    summary = summarize(table)
    for name in ("by_position", "by_confidence"):
        lines = summary[name]
        assert sum(line["tokens"] for line in lines) == summary["tokens"]
        mean = sum(line["kl"] * line["tokens"] for line in lines) / summary["tokens"]
        assert mean == pytest.approx(summary["kl"]["mean"])
        assert [line["below"] for line in lines[:-1]] == [line["from"] for line in lines[1:]]
    assert [line["tokens"] for line in summary["by_position"]] == [4 * 15, 4 * 24]
    early = table[table["position"] < 16]
    assert summary["by_position"][0]["top1_agreement"] == early["agree"].mean()


def test_statistics_of_llama_perplexity_by_their_definitions():
    table = score_tokens(*random_arms(9, rows=5, length=20))
    found = summarize(table)["llama_perplexity"]
    own, base = table["nll_release"], table["nll_source"]
    value = {name: figure["value"] for name, figure in found.items()}
    error = {name: figure.get("error") for name, figure in found.items()}
    assert value["Mean PPL(Q)"] == pytest.approx(np.exp(own.mean()))
    assert value["Mean PPL(Q)/PPL(base)"] == pytest.approx(np.exp((own - base).mean()))
    assert value["Cor(ln(PPL(Q)), ln(PPL(base)))"] == pytest.approx(100 * own.corr(base))
    assert error["Mean ln(PPL(Q)/PPL(base))"] == pytest.approx((own - base).sem())
    # By linear propagation, which the difference of two small errors must agree with.
    gradient = np.exp(own.mean()) * (own - own.mean()) - np.exp(base.mean()) * (base - base.mean())
    assert error["Mean PPL(Q)-PPL(base)"] == pytest.approx(gradient.sem())
    assert error["Mean KLD"] == pytest.approx(table["kl"].sem())
    assert value["Median KLD"] == pytest.approx(table["kl"].median())
    assert value["99.9% KLD"] == pytest.approx(table["kl"].quantile(0.999))
    change = 100 * table["p_true_difference"]
    assert value["0.1% Δp"] == pytest.approx(change.quantile(0.001))
    assert value["RMS Δp"] == pytest.approx(np.sqrt((change**2).mean()))
    assert error["RMS Δp"] == pytest.approx((change**2).sem() / (2 * value["RMS Δp"]))
    assert value["Same top p"] == pytest.approx(100 * table["agree"].mean())
    assert error["Same top p"] == pytest.approx(100 * table["agree"].sem())
    assert len(found) == 6 + 12 + 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0][:, :-1], *a[1:]), "source's hidden states"),
        (lambda a: (*a[:2], a[2][:-1], *a[3:]), "release's hidden states"),
        (lambda a: (*a[:3], a[3][:-1], a[4]), "different vocabularies"),
        (lambda a: (*a[:4], a[4] + 40), "outside the vocabulary"),
        (lambda a: (*a[:4], a[4][:, :1]), "at least two tokens"),
    ],
)
def test_what_does_not_belong_together_is_refused(change, message):
    with pytest.raises(ForwardError, match=message):
        score_tokens(*change(random_arms(7)))


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """Files of two models as the forward leaves them, and their checkpoints."""
    hidden, head, other, other_head, ids = random_arms(8)
    reference = dense_reference(hidden, head, other, other_head, ids)
    for name, states, weight in (("source", hidden, head), ("release", other, other_head)):
        nll = torch.from_numpy(reference[f"nll_{name}"]).reshape(3, 6).float()
        write_tensors(tmp_path / f"{name}.hidden.safetensors", {"final_hidden": states, "nll": nll})
        (tmp_path / name).mkdir()
        write_tensors(tmp_path / name / "one.safetensors", {"head.weight": weight})
    write_tensors(tmp_path / "rows.safetensors", {"input_ids": ids})
    monkeypatch.setattr(
        scores,
        "open_checkpoint",
        lambda path: Checkpoint(path, {}, {"head.weight": "one.safetensors"}),
    )

    def run(name, release="release"):
        return score_files(
            tmp_path / "source.hidden.safetensors",
            tmp_path / "source",
            tmp_path / f"{release}.hidden.safetensors",
            tmp_path / release,
            tmp_path / "rows.safetensors",
            tmp_path / f"{name}.parquet",
            tmp_path / f"{name}.json",
            release_name="mix <3>",
            panel="code",
        )

    return tmp_path, run, (hidden, head, other, other_head, ids)


def test_files_give_the_same_bytes_and_read_back(scored):
    folder, run, arms = scored
    summary = run("one")
    run("two")
    assert (folder / "one.parquet").read_bytes() == (folder / "two.parquet").read_bytes()
    assert (folder / "one.json").read_bytes() == (folder / "two.json").read_bytes()
    assert json.loads((folder / "one.json").read_text()) == summary
    table, names = scores.read_table(folder / "one.parquet")
    assert (names["release"], names["panel"]) == ("mix <3>", "code")
    assert table.equals(score_tokens(*arms))
    assert summary["forward_nll_difference"]["source"] < 1e-4


def test_source_against_itself_from_files(scored):
    _, run, _ = scored
    summary = run("self", release="source")
    assert summary["kl"]["max"] == 0.0 and summary["kl"]["mean"] == 0.0
    assert summary["top1_agreement"] == 1.0


def test_hidden_states_of_other_rows_are_refused(scored):
    folder, run, arms = scored
    write_tensors(folder / "rows.safetensors", {"input_ids": arms[-1].flip(0)})
    with pytest.raises(ForwardError, match="not the one that the forward wrote"):
        run("wrong")


def test_a_parquet_file_that_is_no_score_table_is_refused(scored):
    folder, run, arms = scored
    score_tokens(*arms).to_parquet(folder / "other.parquet")
    with pytest.raises(ForwardError, match="no score table"):
        scores.read_table(folder / "other.parquet")
