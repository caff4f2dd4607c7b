# SPDX-License-Identifier: Apache-2.0
"""Releases of the `bank-plan` layout: which state an expert is in, and where its tensors lie.

`exl3/plan.json` of a release holds

    {"layers": {"0": "K3"}, "keep_native": {"0": [4]}, "expert_state": {"0": {"17": "K5"}},
     "qdir": "bank:bank"}

An expert's state is `native` if `keep_native` lists it; else what `expert_state` says of it; else
what `layers` says of its layer; else `native`. `qdir` is `bank:` and folders, separated by commas
and relative to the plan's own folder, that are searched in their order: an expert at K3 of layer 7
lies in the first `{folder}/K3/L07.safetensors` that holds it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trellisbank.errors import CheckpointError
from trellisbank.files import read_json
from trellisbank.formats.trellis import PARTS
from trellisbank.safetensors_io import Header, read_header

PLAN = "exl3/plan.json"
"""Where a release keeps its plan."""

NATIVE = "native"
"""The source's own format (MXFP4): nothing is encoded, so there is no error."""

STATE = re.compile("K([2-8])")
NAMED = 6
"""How many cases of a fault are named; all are counted."""

MATRICES = ("w1", "w3", "w2")


@dataclass(frozen=True)
class BankPlan:
    """A plan as read; `folders` are relative to the release."""

    path: Path
    layers: Mapping[int, str]
    keep_native: Mapping[int, frozenset[int]]
    expert_state: Mapping[int, Mapping[int, str]]
    folders: tuple[str, ...]

    def state(self, layer: int, expert: int) -> str:
        """Return `native` or a rate such as `K3`."""
        if expert in self.keep_native.get(layer, ()):
            return NATIVE
        of_layer = self.expert_state.get(layer, {})
        return of_layer.get(expert, self.layers.get(layer, NATIVE))


def bank_file(folder: str, state: str, layer: int) -> str:
    """Return the path of a bank's file, relative to what `folder` is relative to."""
    return f"{folder}/{state}/L{layer:02d}.safetensors"


def read_bank_plan(release: Path) -> BankPlan:
    """Read and check the plan of a release; nothing in it may lead out of the release.

    Raises:
        CheckpointError: Missing or malformed, an unknown state, or a folder outside the release.
    """
    path = release / PLAN
    plan = read_json(path)
    try:
        kind, _, folders = plan["qdir"].partition(":")
        read = BankPlan(
            path,
            {int(layer): _state(state) for layer, state in plan["layers"].items()},
            {int(layer): frozenset(map(int, of)) for layer, of in plan["keep_native"].items()},
            {
                int(layer): {int(expert): _state(state) for expert, state in states.items()}
                for layer, states in plan["expert_state"].items()
            },
            tuple(_inside(folder) for folder in folders.split(",")),
        )
        if kind != "bank":
            raise ValueError(f"qdir {plan['qdir']!r}")
    except (KeyError, ValueError, TypeError, AttributeError) as trouble:
        raise CheckpointError(
            "The plan of a bank-plan release is malformed.",
            file=path,
            expected="layers, keep_native, expert_state with states K2 to K8 or native; qdir "
            "`bank:` and folders inside the release",
            found=repr(trouble),
            fix="restore the file from the release's origin, or make the release again",
        ) from trouble
    return read


def _state(state: Any) -> str:
    if state != NATIVE and not STATE.fullmatch(state):
        raise ValueError(f"state {state!r}")
    return str(state)


def _inside(folder: str) -> str:
    parts = PurePosixPath(folder).parts
    if not parts or folder.startswith("/") or ".." in parts or "\0" in folder:
        raise ValueError(f"folder {folder!r}")
    return str(PurePosixPath(PLAN).parent / folder)


def locate(
    plan: BankPlan, release: Path, experts: Mapping[int, int], native: Iterable[str]
) -> tuple[dict[str, str], dict[str, Header]]:
    """Find the EXL3 tensors of every expert that the plan does not keep native.

    Args:
        plan: The release's plan.
        release: Its folder.
        experts: Layer -> routed experts.
        native: Names of the tensors in the native shards.

    Returns:
        Tensor name -> bank file (relative to the release), and the headers that were read.

    Raises:
        CheckpointError: An expert is in no bank, a bank holds another rate than the plan's, or an
            expert is native (or EXL3) where the plan says otherwise.
    """
    shards = set(native)
    headers: dict[str, Header] = {}
    found: dict[str, str] = {}
    missing, wrong, mixed = [], [], []
    for layer, count in sorted(experts.items()):
        for expert in range(count):
            state = plan.state(layer, expert)
            stems = [f"layers.{layer}.ffn.experts.{expert}.{matrix}" for matrix in MATRICES]
            place = f"layer {layer} expert {expert} {state}"
            if any((f"{stem}.weight" in shards) != (state == NATIVE) for stem in stems):
                mixed.append(place)
                continue
            if state == NATIVE:
                continue
            file = _search(plan, release, layer, state, stems[0], headers)
            names = [f"{stem}.{part}" for stem in stems for part in PARTS]
            if file is None or not headers[file].tensors.keys() >= set(names):
                missing.append(place)
                continue
            rates = {headers[file].tensors[f"{stem}.trellis"].shape[-1:] for stem in stems}
            if rates != {(16 * int(state[1:]),)}:
                wrong.append(place)
            found.update(dict.fromkeys(names, file))
    for what, places, fix in (
        ("An expert is native where the plan says otherwise.", mixed, "make the release again"),
        ("An expert is in no bank of the release.", missing, "complete the download of the banks"),
        ("A bank holds another rate than the plan says.", wrong, "restore the bank's files"),
    ):
        if places:
            raise CheckpointError(
                what,
                file=plan.path,
                expected="every expert where and as the plan says",
                found=f"{len(places)} experts: {', '.join(places[:NAMED])}"
                + (" and more" if len(places) > NAMED else ""),
                fix=fix,
            )
    return found, headers


def _search(
    plan: BankPlan, release: Path, layer: int, state: str, stem: str, headers: dict[str, Header]
) -> str | None:
    """Return the first bank file that holds the expert."""
    for folder in plan.folders:
        file = bank_file(folder, state, layer)
        if file not in headers:
            if not os.path.exists(release / file):
                continue
            headers[file] = read_header(release / file)
        if f"{stem}.trellis" in headers[file].tensors:
            return file
    return None
