# SPDX-License-Identifier: Apache-2.0
"""The CUDA encoder's own part, with a stand-in on the CPU for the two functions of exllamav3.

The stand-in keeps exllamav3's conventions (seeding, records, returned arguments) and encodes with
our own CPU code, so a wrong sign, record or order shows in the decoded weights. What exllamav3
itself gives is compared on a GPU by benchmarks/check_cuda.py.
"""

import sys
import time
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from trellisbank.errors import QuantizeError
from trellisbank.formats import trellis
from trellisbank.quantize import decode_torch, encode_exllamav3
from trellisbank.quantize.backend import choose_backend
from trellisbank.quantize.encode_cpu import search_scale, tile_encoder
from trellisbank.quantize.expert import Options, Work, encode_group, random_signs
from trellisbank.quantize.hessian import (
    Hessian,
    accumulate,
    block_ldl,
    empty,
    finalize,
    rotate,
)
from trellisbank.quantize.ldlq import refit, regularize, round_with_feedback, transform

K, N, RATE = 128, 128, 2


class StandIn:
    """Records what it is asked for."""

    def __init__(self):
        self.calls = []

    def one(self, weight, record, arguments, return_weight_q):
        self.calls.append(("one", 1))
        return None, 0.0, self._encode(weight, record, arguments)

    def batch(self, weights, records, arguments):
        assert len({id(record) for record in records}) > 1, "exllamav3 would concatenate"
        self.calls.append(("batch", len(weights)))
        results = {}
        found = []
        for weight, record, own in zip(weights, records, arguments, strict=True):
            # Copies in free places give what they are copies of.
            place = (weight.double().sum().item(), record["su"].data_ptr())
            if place not in results:
                results[place] = self._encode(weight.float(), record, own), own["g_scale"]
            own["g_scale"] = results[place][1]
            found.append((0.0, results[place][0]))
        return found

    def _encode(self, weight, record, arguments):
        assert weight.dtype == torch.float32 and arguments["mul1"] and record["finalized"]
        torch.manual_seed(arguments["seed"])
        drawn = (torch.randn(weight.shape[1]).sign() + 1e-5).sign()
        values = trellis.codebook("mul1").astype(np.float32)
        encode = tile_encoder(arguments["K"])
        kept = weight.clone()
        signs = record["su"].flatten()
        regular, su, sv = regularize(weight, signs, drawn, arguments["apply_out_scales"])
        g = arguments["g_scale"] = search_scale(regular.numpy(), arguments["K"], encode, values)
        factor = None if record["q_fallback"] else record["L"].to(weight.device)
        found, states = round_with_feedback(regular * g, factor, encode, values)
        su = su / g
        if factor is not None and not arguments["no_refit"]:
            damped = signs[:, None] * transform(record["H"]) * signs
            su, sv = refit(kept, su[:, None] * transform(found) * sv, damped, su, sv)
        return {
            "trellis": torch.from_numpy(trellis.pack(states, arguments["K"])),
            "suh": su.half(),
            "svh": sv.half(),
            "mul1": torch.from_numpy(trellis.marker("mul1")),
        }


@pytest.fixture
def stand_in(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(encode_exllamav3, "load", lambda: (stand_in.one, stand_in.batch))
    monkeypatch.setattr(encode_exllamav3, "GROUP", 3)
    return stand_in


def work(expert, tokens=600, group=("w1", "w3"), rate=RATE):
    g = torch.Generator().manual_seed(expert)
    hessian = empty(K)
    accumulate(hessian, torch.randn(tokens, K, generator=g) * torch.linspace(0.2, 2, K))
    weights = {name: torch.randn(K, N, generator=g).bfloat16() / 8 for name in group}
    return Work(f"layers.3.ffn.experts.{expert}", weights, hessian, rate)


def encode(works, options=None):
    found = list(encode_exllamav3.encode_many(iter(works), options or Options(), 16))
    return {(w.stem, w.rate): matrices for w, matrices in found}


def same(a, b):
    return all(torch.equal(a.tensors[part], b.tensors[part]) for part in a.tensors)


@pytest.mark.parametrize("scaled", [False, True])
def test_signs_measures_and_quality_are_those_of_the_cpu_encoder(stand_in, scaled):
    works = [work(expert) for expert in range(3)]
    options = Options(scaled_hessian=scaled)
    for (stem, _), matrices in encode(works, options).items():
        own = next(w for w in works if w.stem == stem)
        expected = encode_group(
            own.weights, own.hessian.matrix, own.hessian.count, RATE, stem, options
        )
        for name, matrix in matrices.items():
            for part, side in (("suh", "w1+w3/in"), ("svh", f"{name}/out")):
                drawn = random_signs(f"{stem}.{side}", len(matrix.tensors[part]))
                drawn = -drawn if part == "suh" else drawn
                assert torch.equal(matrix.tensors[part].float().sign(), drawn)
            assert matrix.proxy_error == pytest.approx(expected[name].proxy_error, rel=0.02)
            assert matrix.relative_frobenius == pytest.approx(
                expected[name].relative_frobenius, rel=0.02
            )
            assert matrix.output_energy == pytest.approx(expected[name].output_energy, rel=1e-5)
            assert matrix.stored_bits == expected[name].stored_bits
            assert matrix.fallback is None and matrix.notes == ()


def test_groups_have_always_as_many_places_and_neighbours_do_not_matter(stand_in):
    works = [work(expert) for expert in range(4)]
    whole = encode(works)
    assert stand_in.calls == [("batch", 6), ("batch", 6)]
    alone = encode(works[1:2])
    assert stand_in.calls[2:] == [("batch", 6)]
    for name, matrix in alone[works[1].stem, RATE].items():
        assert same(matrix, whole[works[1].stem, RATE][name])


def test_scaled_hessians_give_each_matrix_its_factor(stand_in):
    own = work(0)
    own.weights["w3"] *= torch.linspace(0.1, 10, K)[:, None]  # other input scales than those of w1
    ready = encode_exllamav3._make_ready(own, Options(), 16)
    plain = encode_exllamav3._make_ready(own, Options(scaled_hessian=False), 16)
    assert torch.equal(plain[0].record["L"], plain[1].record["L"])
    assert not torch.allclose(ready[0].record["L"], ready[1].record["L"], atol=1e-3)
    signs, damped = ready[1].record["su"].flatten(), finalize(own.hessian.matrix, 600).damped
    weight, out = own.weights["w3"].float(), random_signs(f"{own.stem}.w3/out", N)
    _, su, _ = regularize(weight, signs, out, True)
    factor, _ = block_ldl(rotate(damped, su), 0.025)
    assert torch.allclose(ready[1].record["L"], factor, atol=1e-4)


def test_the_next_group_is_made_ready_while_one_is_encoded(stand_in, monkeypatch):
    """And not sooner: its Hessians would lie there for the time of a group."""
    drawn, events = [], []
    batch = stand_in.batch

    def slow(weights, records, arguments):
        if len(stand_in.calls) == 0:
            deadline = time.monotonic() + 30
            while len(drawn) < 6 and time.monotonic() < deadline:
                time.sleep(0.01)
        events.append(("encoded", len(drawn)))
        return batch(weights, records, arguments)

    def works():
        for expert in range(9):
            drawn.append(expert)
            yield work(expert)

    monkeypatch.setattr(stand_in, "batch", slow)
    found = []
    for one, _ in encode_exllamav3.encode_many(works(), Options(), 16):
        found.append(one.stem[-1])
        events.append((one.stem[-1], len(drawn)))
    assert "".join(found) == "012345678"
    assert events[0] == ("encoded", 6)
    # The third group is drawn only when the first has been handed out.
    assert all(count == 6 for name, count in events if name in ("0", "1", "2"))


def test_a_failing_group_ends_the_encoding(stand_in, monkeypatch):
    def failing(weights, records, arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(stand_in, "batch", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        encode([work(expert) for expert in range(6)])


def test_what_is_being_encoded_when_the_next_cannot_be_made_ready_is_not_lost(stand_in):
    works = [work(expert) for expert in range(5)]
    works[4].weights["w1"][3, 4] = float("inf")
    found = []
    with pytest.raises(QuantizeError, match="experts.4.w1"):
        found.extend(one.stem for one, _ in encode_exllamav3.encode_many(works, Options(), 16))
    assert found == [one.stem for one in works[:3]]


def test_works_are_grouped_by_rate_and_matrices(stand_in):
    works = [
        one
        for expert in range(2)
        for one in (
            work(expert),
            work(expert, rate=1),
            replace(work(expert, group=("w2",)), stem=f"layers.4.ffn.experts.{expert}"),
        )
    ]
    assert len(encode(works)) == 6
    assert sorted(stand_in.calls) == [("batch", 3), ("batch", 6), ("batch", 6)]


@pytest.mark.parametrize("tokens", [0, 3])
def test_few_tokens_go_without_feedback_as_on_the_cpu(stand_in, tokens):
    few, many = work(0, tokens), work(1)
    found = encode([few, many])
    assert stand_in.calls == [("one", 1), ("one", 1), ("batch", 6)]
    expected = encode_group(few.weights, few.hessian.matrix, tokens, RATE, few.stem, min_tokens=16)
    for name, matrix in found[few.stem, RATE].items():
        assert matrix.fallback == expected[name].fallback is not None
        assert (matrix.proxy_error is None) == (tokens == 0)
        assert same(matrix, expected[name])
    assert all(matrix.fallback is None for matrix in found[many.stem, RATE].values())


def test_a_hessian_that_cannot_be_factored_is_named(stand_in):
    broken = replace(work(0), hessian=Hessian(torch.eye(K) - 0.5 * torch.ones(K, K), 600))
    for matrix in encode([broken])[broken.stem, RATE].values():
        assert matrix.fallback == "factorization failed after 10 retries"


def test_a_matrix_of_zeros_is_stored_exactly(stand_in):
    own = work(0)
    own.weights["w3"].zero_()
    found = encode([own])[own.stem, RATE]
    assert found["w3"].relative_frobenius == 0 and found["w3"].notes == ("all weights are zero",)
    assert found["w3"].fallback is None and found["w1"].proxy_error < 0.1


def test_input_channels_of_zeros_are_stored_exactly(stand_in):
    own = work(0)
    for weight in own.weights.values():
        weight *= 0.01
        weight[3:9] = 0
    for matrix in encode([own])[own.stem, RATE].values():
        assert bool((matrix.tensors["suh"][3:9] == 0).all()) and matrix.notes == ()
        assert matrix.relative_frobenius < 0.4


def test_weights_that_cannot_be_stored_are_refused(stand_in):
    own = work(0)
    own.weights["w1"][3, 4] = float("inf")
    with pytest.raises(QuantizeError, match="layers.3.ffn.experts.0.w1"):
        encode([own])


def test_decoding_in_torch_is_the_same_decoding():
    draw = np.random.default_rng(0)
    for rate in trellis.RATES:
        packed = draw.integers(-(1 << 15), 1 << 15, (16, 8, 16 * rate)).astype(np.int16)
        tensors = {
            "trellis": torch.from_numpy(packed),
            "suh": torch.from_numpy(draw.normal(0, 1, 256).astype(np.float16)),
            "svh": torch.from_numpy(draw.normal(0, 1, 128).astype(np.float16)),
        }
        inner = decode_torch.decode_inner(tensors["trellis"], "mul1").numpy()
        assert np.array_equal(inner, trellis.decode_inner(packed))
        ours = decode_torch.decode(tensors, "mul1").numpy()
        theirs = trellis.decode(packed, tensors["suh"].numpy(), tensors["svh"].numpy())
        assert np.allclose(ours, theirs, rtol=0, atol=1e-5)


def test_choice_of_the_encoder(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for choice in ("cpu", "auto"):
        chosen = choose_backend(choice, Options(), 16, 1)
        assert (chosen.encoder, chosen.device) == ("cpu", "cpu")
    with pytest.raises(QuantizeError, match="needs a CUDA device"):
        choose_backend("exllamav3", Options(), 16, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(encode_exllamav3, "package_version", lambda: None)
    assert choose_backend("auto", Options(), 16, 1).encoder == "cpu"
    with pytest.raises(QuantizeError, match="package is missing"):
        choose_backend("exllamav3", Options(), 16, 1)


def test_an_extension_that_fails_without_a_word(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(encode_exllamav3, "package_version", lambda: "1.6.5")
    monkeypatch.setitem(sys.modules, "exllamav3", SilentlyBroken("exllamav3"))
    with pytest.raises(QuantizeError, match="cannot be loaded"):
        encode_exllamav3.load()


class SilentlyBroken(ModuleType):
    @property
    def __path__(self):
        raise RuntimeError


def test_keys_name_package_and_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(encode_exllamav3, "package_version", lambda: "1.6.5")
    monkeypatch.setattr(encode_exllamav3, "load", lambda: None)
    chosen = choose_backend("auto", Options(), 16, 1)
    assert chosen.encoder == "exllamav3-1.6.5" and chosen.device == "cuda:0"
    assert chosen.device_class == "cuda-nvidia-h200-9.0"


@pytest.mark.parametrize("axis", [0, 1])
def test_matrices_on_other_devices_turn_whatever_their_layout(axis):
    transposed = torch.empty(256, 384, device="meta").T
    assert decode_torch.turn(transposed, axis).shape == (384, 256)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_product_turns_as_the_butterflies(axis):
    matrix = torch.randn(384, 256, generator=torch.Generator().manual_seed(2))
    turned = decode_torch.turn(matrix, axis)
    blocks = torch.block_diag(*[decode_torch.hadamard(matrix.device)] * (matrix.shape[axis] // 128))
    product = blocks @ matrix if axis == 0 else matrix @ blocks
    assert torch.allclose(turned, product, atol=1e-5)
