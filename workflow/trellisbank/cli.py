# SPDX-License-Identifier: Apache-2.0
"""The command line: one checkpoint, one layer or one matrix at a time, outside the workflow.

Exit codes: 0 done, 1 the input cannot be used (one message says why), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trellisbank import __version__
from trellisbank.errors import ForwardError, TrellisbankError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: Words after the program's name; those of the process by default.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except TrellisbankError as trouble:
        print(f"{type(trouble).__name__}: {trouble}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output went away
        return 1
    except OSError as trouble:
        print(f"{trouble.strerror}: {trouble.filename}", file=sys.stderr)
        return 1
    return 0


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _layers(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range such as 0-5") from None


def _device(text: str) -> str:
    import torch

    try:
        kind = torch.device(text).type
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no torch device") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("this machine, or this build of torch, has no CUDA device")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trellisbank", description=__doc__)
    parser.add_argument("--version", action="version", version=f"trellisbank {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    added = command("inspect", _inspect, "Check a checkpoint's headers and say what it holds.")
    added.add_argument("checkpoint", type=Path, help="folder of a source or release")
    added.add_argument("--json", action="store_true", help="print the whole manifest as JSON")

    added = command("forward", _forward, "Run rows of tokens through a checkpoint, layer by layer.")
    added.add_argument("checkpoint", type=Path, help="folder of a source or release")
    added.add_argument("rows", type=Path, help="safetensors file with input_ids [rows, tokens]")
    added.add_argument("out", type=Path, help="folder for L07.state.safetensors, final.safetensors")
    added.add_argument("--layers", type=_layers, help="first and last layer, such as 0-5")
    added.add_argument(
        "--from", dest="state", type=Path, help="state file to go on from; its next layer is first"
    )
    added.add_argument(
        "--device", type=_device, default="cpu", help="torch device (default: %(default)s)"
    )

    added = command("encode", _encode, "Encode one matrix as EXL3.")
    added.add_argument("input", type=Path, help="safetensors with W (in, out), optionally H, count")
    added.add_argument("output", type=Path, help="gets trellis, suh, svh, mul1")
    added.add_argument("--rate", type=int, required=True, help="bits a weight, 1 to 8")
    added.add_argument("--name", help="name of the matrix, from which its signs are drawn")
    added.add_argument("--signs", type=Path, help="safetensors whose suh, svh give the signs")

    added = command("decode", _decode, "Decode one EXL3 matrix.")
    added.add_argument("input", type=Path, help="safetensors with trellis, suh, svh, mul1")
    added.add_argument("output", type=Path, help="gets inner (fp16) and weight (fp32), (in, out)")

    added = command("compare", _compare, "Compare two encodings of one layer on the same rows.")
    added.add_argument("source", type=Path, help="folder of the source")
    added.add_argument("first", type=Path, help="folder of one release")
    added.add_argument("second", type=Path, help="folder of the other")
    added.add_argument("captures", type=Path, nargs="+", help="captures of the layer")
    added.add_argument("--layer", type=int, required=True, help="body layer of the captures")

    added = command("score", _score, "Compare two checkpoints on the same rows, KL(A || B).")
    added.add_argument("a", type=Path, help="folder of the source")
    added.add_argument("b", type=Path, help="folder of the release")
    added.add_argument("rows", type=Path, help="safetensors file with input_ids [rows, tokens]")
    added.add_argument("out", type=Path, help="folder for scores.parquet and summary.json")
    added.add_argument(
        "--device", type=_device, default="cpu", help="torch device (default: %(default)s)"
    )

    added = command("certificate", _certificate, "Recompute what a KL certificate states.")
    added.add_argument("action", choices=["check"], help="check: recompute and compare")
    added.add_argument("folder", type=Path, help="the certificate")
    added.add_argument(
        "--release", type=Path, help="folder of the release, to run it and score it again"
    )
    added.add_argument(
        "--device", type=_device, default="cpu", help="torch device (default: %(default)s)"
    )

    added = command("plan", _plan, "Choose rates from ledgers under a budget.")
    added.add_argument(
        "ledger", type=Path, nargs="+", help="encoded/*/L??.B??.json of a run, or a table (.csv)"
    )
    added.add_argument(
        "--stats", type=Path, nargs="+", default=[], help="forward/source/*/L??.stats.json"
    )
    added.add_argument("--method", choices=["gain", "exact", "measured", "random"], default="exact")
    added.add_argument(
        "--probes", type=Path, nargs="+", default=[], help="probes/*/L??.json, for measured"
    )
    added.add_argument("--layout", choices=["cuda-exl3", "bank-plan"], default="cuda-exl3")
    added.add_argument(
        "--rates", type=_rate, nargs="+", default=[], help="bits a weight, or native (bank-plan)"
    )
    budget = added.add_mutually_exclusive_group(required=True)
    budget.add_argument("--target-bpw", help="average bits of payload a weight")
    budget.add_argument("--stored-bpw", help="average stored bits a weight, with scales, markers")
    budget.add_argument("--bytes", type=int, help="stored bytes of the routed experts")
    budget.add_argument("--rank-gib", type=float, help="GiB of weights that a rank may hold")
    budget.add_argument("--loss", type=float, help="the smallest plan with at most this loss")
    budget.add_argument("--curve", action="store_true", help="predicted loss against size")
    added.add_argument("--tensor-parallel", type=int, default=1, help="ranks, for --rank-gib")
    added.add_argument(
        "--other-bytes", type=int, default=0, help="bytes of a rank that are no routed experts"
    )
    added.add_argument("--seed", type=int, default=0, help="order of the random method")
    added.add_argument("--margin", type=int, default=0, help="next-best steps listed each way")
    added.add_argument("--json", action="store_true", help="print everything as JSON")

    added = command("release-diff", _release_diff, "Say what B has that A has not.")
    added.add_argument("a", type=Path, help="folder of a release")
    added.add_argument("b", type=Path, help="folder of another release of the same source")
    added.add_argument("--patch", type=Path, help="new folder for what makes B of A")
    added.add_argument("--json", action="store_true", help="print everything as JSON")

    added = command("release-patch", _release_patch, "Make B from A and a patch, checked.")
    added.add_argument("a", type=Path, help="folder of the release that the patch was made for")
    added.add_argument("patch", type=Path, help="folder that release-diff wrote")
    added.add_argument("out", type=Path, help="new folder for B")

    added = command("release-pack", _release_pack, "Split the large files of a release.")
    added.add_argument("release", type=Path, help="folder of a release; only read")
    added.add_argument("out", type=Path, help="new folder, with reassemble.sh")
    added.add_argument("--part-bytes", type=int, default=40 * 10**9, help="default: %(default)s")
    return parser


def _release_diff(options: argparse.Namespace) -> None:
    from trellisbank.release.diff import diff_releases, write_patch

    if options.patch:
        diff = write_patch(options.a, options.b, options.patch)
    else:
        diff = diff_releases(options.a, options.b)
    if options.json:
        print(json.dumps(diff, indent=1, sort_keys=True))
        return
    for item in diff["experts"]:
        before, after = (
            " ".join(f"{group} {rate}" for group, rate in (item[side] or {}).items()) or "absent"
            for side in ("before", "after")
        )
        print(f"L{item['layer']:02d} E{item['expert']:03d}: {before} -> {after}")
    print(
        f"{len(diff['experts'])} experts changed; {diff['bytes_to_ship']:,} of {diff['bytes']:,} "
        f"bytes to ship; {len(diff['removed'])} files gone"
    )


def _release_patch(options: argparse.Namespace) -> None:
    from trellisbank.release.diff import apply_patch

    diff = apply_patch(options.a, options.patch, options.out)
    print(f"{options.out}: {len(diff['files'])} files, each with the hash of the patch")


def _release_pack(options: argparse.Namespace) -> None:
    from trellisbank.release.pack import pack_release

    split = pack_release(options.release, options.out, options.part_bytes)
    print(f"{options.out}: {len(split)} files in parts; join them with reassemble.sh")


def _rate(text: str) -> int | str:
    if text == "native":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate such as 3 or native") from None


def _plan(options: argparse.Namespace) -> None:
    from trellisbank.plan.explore import load_table, plan_below, plan_curve, plan_within
    from trellisbank.plan.solve import rank_bytes

    table = load_table(
        options.ledger,
        statistics=options.stats,
        probes=options.probes,
        method="exact" if options.method == "random" else options.method,
        layout=options.layout,
        rates=options.rates,
    )
    if options.curve:
        found = plan_curve(table)
    elif options.loss is not None:
        found = plan_below(table, options.loss)
    else:
        size = options.bytes
        if options.rank_gib is not None:
            size = rank_bytes(options.rank_gib, options.tensor_parallel, options.other_bytes)
        kinds = {
            "average_rate": options.target_bpw,
            "stored_bits": options.stored_bpw,
            "bytes": size,
        }
        budget = {kind: amount for kind, amount in kinds.items() if amount is not None}
        found = plan_within(table, options.method, budget, options.seed, options.margin)
    if options.json:
        print(json.dumps(found, indent=1, sort_keys=True))
    elif options.curve:
        print("average_rate  stored_bits          stored_bytes  loss")
        for point in found["curve"]:
            print(
                f"{point['average_rate']:12.4f}  {point['stored_bits_per_weight']:11.4f}"
                f"  {point['stored_bytes']:20,}  {point['cost']:.6g}"
            )
    else:
        print(
            f"{found['average_rate']:.4f} bits of payload, "
            f"{found['stored_bits_per_weight']:.4f} stored bits a weight, "
            f"{found['stored_bytes']:,} bytes"
        )
        print(f"predicted loss {found['loss']:.6g}", end="")
        if found["bound"] is not None:
            print(f", proven bound {found['bound']:.6g}, greedy {found['greedy_loss']:.6g}", end="")
        print(f"; {len(found['protected'])} slots protected by a failed measurement")
        for rate in sorted(set(found["rates"].values()), key=str):
            names = [name for name, chosen in found["rates"].items() if chosen == rate]
            print(f"{rate if rate == 'native' else f'K{rate}'}: {len(names)}: {' '.join(names)}")


def _inspect(options: argparse.Namespace) -> None:
    from trellisbank.checkpoint import open_checkpoint
    from trellisbank.source import inspect

    manifest = inspect(open_checkpoint(options.checkpoint))
    if options.json:
        print(json.dumps(manifest, indent=1, sort_keys=True))
        return
    print(
        f"{manifest['architecture']}: {manifest['tensor_count']} tensors, "
        f"{manifest['tensor_bytes']:,} bytes in {len(manifest['shards'])} shards"
    )
    print(
        f"{len(manifest['layers'])} layers x {manifest['routed_experts']} routed experts of "
        f"{manifest['hidden_size']} x {manifest['moe_intermediate_size']}, "
        f"{manifest['experts_per_token']} a token; stored as {manifest['expert_formats']}"
    )
    for dtype, row in manifest["census"].items():
        print(f"{dtype:8} {row['tensors']:8} tensors {row['bytes']:16,} bytes")
    for layer, kind in enumerate(manifest["layers"]):
        engram = ", Engram" if layer in manifest["engram_layers"] else ""
        print(f"L{layer:02d} {kind}{engram}")


def _forward(options: argparse.Namespace) -> None:
    from trellisbank.model.forward import forward_files

    forward_files(
        options.checkpoint,
        options.rows,
        options.out,
        options.layers,
        options.state,
        options.device,
        _progress,
    )


def _encode(options: argparse.Namespace) -> None:
    from trellisbank.quantize.matrix_file import encode_file

    _progress(f"encoding {options.input} at {options.rate} bits a weight")
    print(
        json.dumps(
            encode_file(options.input, options.output, options.rate, options.name, options.signs)
        )
    )


def _decode(options: argparse.Namespace) -> None:
    from trellisbank.quantize.matrix_file import decode_file

    decode_file(options.input, options.output)


def _compare(options: argparse.Namespace) -> None:
    from trellisbank.quantize.compare import compare_encodings

    compared = compare_encodings(
        source=options.source,
        first=options.first,
        second=options.second,
        layer=options.layer,
        captures=options.captures,
        progress=_progress,
    )
    print(json.dumps(compared, indent=1))


def _score(options: argparse.Namespace) -> None:
    from trellisbank.checkpoint import open_checkpoint
    from trellisbank.evaluate.scores import score_files
    from trellisbank.model.config import model_config
    from trellisbank.model.forward import check_rows
    from trellisbank.model.streamed import forward_rows
    from trellisbank.rows import read_ids

    ids = read_ids(options.rows)
    for checkpoint in (options.a, options.b):
        check_rows(model_config(open_checkpoint(checkpoint).config), ids, options.rows)
    if ids.shape[1] < 2:
        raise ForwardError(
            "Rows of one token leave nothing to score.",
            file=options.rows,
            expected="at least 2 tokens a row",
            found=list(ids.shape),
            fix="build longer rows",
        )
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        finals = [Path(scratch) / f"{label}.safetensors" for label in "ab"]
        for checkpoint, final in zip((options.a, options.b), finals, strict=True):
            forward_rows(
                checkpoint=checkpoint,
                rows=options.rows,
                hidden=final,
                device=options.device,
                progress=_progress,
            )
        summary = score_files(
            finals[0],
            options.a,
            finals[1],
            options.b,
            options.rows,
            options.out / "scores.parquet",
            options.out / "summary.json",
            release_name=options.b.name,
            panel=options.rows.stem,
        )
    print(json.dumps(summary, indent=1, sort_keys=True))


def _certificate(options: argparse.Namespace) -> None:
    from trellisbank.evaluate.certificate import check_certificate

    checked = check_certificate(
        options.folder, release=options.release, device=options.device, progress=_progress
    )
    print(json.dumps(checked, indent=1))


if __name__ == "__main__":
    sys.exit(main())
