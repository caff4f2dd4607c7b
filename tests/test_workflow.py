# SPDX-License-Identifier: Apache-2.0
"""The workflow itself, on a cut of the shipped checkpoint: 2 layers x 4 experts, one panel."""

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cut import cut_checkpoint
from trellisbank.errors import CertificateError
from trellisbank.evaluate.bootstrap import compare_files
from trellisbank.evaluate.certificate import check_certificate
from trellisbank.evaluate.scores import read_table, write_table
from trellisbank.files import blake3_file, digest_json, write_json

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

CONFIG = {
    "run": "cut",
    "calibration": {
        "texts": ["resources/tiny/texts/calibration/*.txt"],
        "window": 64,
        "windows": 8,
        "splits": 2,
    },
    "panels": {
        "code": {"texts": ["resources/tiny/texts/code/*.txt"], "window": 64, "windows": 8},
    },
    "encode": {"experts_per_block": 4},
    "recipes": {"main": {"method": "uniform", "average_rate": 2}},
}


class Clone:
    """A copy of the repository's code with a source of its own, in which things may be changed."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copytree(ROOT / "resources/tiny/texts", folder / "resources/tiny/texts")
        for name in ("Snakefile", "rules", "workflow", "config", "profiles", "report", "envs"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        (folder / "local").symlink_to("profiles/local")
        cut_checkpoint(folder / "source")
        self.rate = 2
        self.recipes = {}

    def snakemake(self, *words: str, code: int = 0) -> str:
        """Run the workflow and return what it printed."""
        config = CONFIG | {"source": "source"}
        config["recipes"] = {"main": {"method": "uniform", "average_rate": self.rate}}
        config["recipes"] |= self.recipes
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        done = subprocess.run(
            [sys.executable, "-m", "snakemake", "--profile", "local", *words]
            + ["--configfile", "config.yaml"],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.folder / "workflow")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == code, done.stdout[-5000:]
        return done.stdout

    def jobs(self) -> dict[str, int]:
        """Jobs that a run would have, by rule."""
        printed = self.snakemake("--dry-run")
        return {
            name: int(count)
            for name, count in re.findall(r"^(\w+) +(\d+)$", printed, re.MULTILINE)
            if name not in ("all", "total")
        }

    def hashes(self, *kinds: str) -> dict[str, str]:
        """Hash of every file of some kinds of results."""
        return {
            str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for kind in kinds
            for path in sorted((self.folder / "results").glob(kind))
            if path.is_file()
        }


def stamps(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        path.name: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.iterdir()
    }


MADE = ("bank/**/*", "cut/encoded/**/*", "cut/plan/*", "cut/receipts/**/*", "cut/release/**/*")
SCORED = ("cut/scores/**/*", "cut/compare/**/*", "cut/report/*", "cut/rows/*", "cut/hessians/*")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A finished run with two jobs at a time."""
    made = Clone(tmp_path_factory.mktemp("two"))
    made.stamps = stamps(made.folder / "source")
    made.snakemake("--cores", "2")
    return made


def test_everything_is_there_and_the_source_is_as_it_was(clone):
    run = clone.folder / "results/cut"
    assert (run / "report/index.html").stat().st_size > 10_000
    assert stamps(clone.folder / "source") == clone.stamps
    report = json.loads((run / "receipts/main/repack-report.json").read_text())
    assert report["dropped"]["tensors"] == 2 * 4 * 6
    compared = json.loads((run / "compare/main/code.json").read_text())["quantities"]
    floor = json.loads((run / "compare/floor/code.json").read_text())["quantities"]
    assert 0 < floor["kl"]["mean"] < compared["kl"]["mean"] / 2
    assert compared["kl"]["low"] > 0
    # States are temporary; what is dear or small stays.
    assert not list(run.glob("forward/**/*.state.safetensors"))
    assert len(list(run.glob("captures/*/*.safetensors"))) == 4
    records = list(run.glob("provenance/**/*.json"))
    jobs = sum(1 for _ in run.glob("benchmarks/**/*.tsv"))
    assert len(records) == jobs > 30


def test_no_path_of_this_machine_is_in_what_is_shipped(clone):
    for path in (clone.folder / "results/cut/release/main").rglob("*"):
        if path.is_file():
            assert str(clone.folder).encode() not in path.read_bytes(), path


def test_a_certificate_is_recomputed_and_what_was_changed_is_found(clone, tmp_path):
    run = clone.folder / "results/cut"
    release, folder = run / "release/main", tmp_path / "certificate"
    shutil.copytree(run / "certificate/main", folder)
    (line,) = check_certificate(folder, release=release)
    assert line["equal_scores"] and line["kl"]["low"] < line["kl_again"] < line["kl"]["high"]

    scores = folder / "code/scores.parquet"
    table, names = read_table(scores)
    better = table.assign(kl=table["kl"] / 2)
    write_table(scores, better, release=names["release"], panel=names["panel"])
    with pytest.raises(CertificateError, match=r"(?s)not the one that was certified.*scores"):
        check_certificate(folder)
    restate(folder)
    with pytest.raises(CertificateError, match="does not follow from its score table"):
        check_certificate(folder)
    compare_files(scores, folder / "code/comparison.json", seed=0, draws=200)
    restate(folder)
    (line,) = check_certificate(folder)  # consistent in itself
    with pytest.raises(CertificateError, match="does not give the scores of its certificate"):
        check_certificate(folder, release=release)
    with pytest.raises(CertificateError, match="repack-report"):
        other = tmp_path / "other"
        shutil.copytree(release, other)
        (other / "repack-report.json").write_text("{}")
        check_certificate(folder, release=other)


def restate(folder):
    """What a forger does: new hashes over changed files."""
    path = folder / "certificate.json"
    content = json.loads(path.read_text())
    del content["hash"]
    content["files"] = {name: blake3_file(folder / name) for name in content["files"]}
    write_json(path, content | {"hash": digest_json(content)})


def test_one_job_at_a_time_gives_the_same_bytes(clone, tmp_path):
    alone = Clone(tmp_path)
    alone.snakemake("--cores", "1")
    assert alone.hashes(*MADE, *SCORED) == clone.hashes(*MADE, *SCORED)


def test_second_run_does_nothing(clone):
    assert "Nothing to be done" in clone.snakemake("--dry-run")


def test_comment_reruns_nothing_and_code_reruns_what_it_touches(clone):
    module = clone.folder / "workflow/trellisbank/evaluate/bootstrap.py"
    text = module.read_text()
    module.write_text(text + "\n# A remark.\n")
    assert clone.jobs() == {}
    module.write_text(text + "\nEXTRA = 1\n")
    remade = ("compare", "compare_floor", "judge", "certificate", "report")
    assert clone.jobs() == dict.fromkeys(remade, 1)
    module.write_text(text)
    assert clone.jobs() == {}


def test_another_rate_encodes_only_that_and_going_back_encodes_nothing(clone):
    before, made = clone.hashes("bank/**/*"), clone.hashes(*MADE)
    clone.rate = 3
    clone.snakemake("--cores", "2")
    after = clone.hashes("bank/**/*")
    assert len(after) == 2 * len(before) and before.items() <= after.items()
    written = {path: path.stat().st_mtime_ns for path in (clone.folder / "results/bank").rglob("*")}
    clone.rate = 2
    clone.snakemake("--cores", "2")
    assert written == {
        path: path.stat().st_mtime_ns for path in (clone.folder / "results/bank").rglob("*")
    }
    again = clone.hashes(*MADE)
    assert {name: again[name] for name in made} == made
    assert stamps(clone.folder / "source") == clone.stamps


@pytest.fixture
def planned(clone):
    """Plans of a second recipe beside the finished run; its budget falls and rises again."""
    banks, plans = [set(clone.hashes("bank/**/*"))], []
    for budget in (2.5, 2.25, 2.5):
        recipe = {"method": "exact", "average_rate": budget, "rates": [2, 3, 4, "native"]}
        recipe |= {"layout": "bank-plan", "base_rate": 2, "margin": 1}
        clone.recipes = {"second": recipe}
        clone.snakemake("results/cut/plan/second.json", "--cores", "2")
        banks.append(set(clone.hashes("bank/**/*")))
        plans.append((clone.folder / "results/cut/plan/second.json").read_text())
    yield banks, [json.loads(plan) for plan in plans]
    clone.recipes = {}


def test_a_measured_recipe_encodes_only_what_is_missing(clone, planned):
    banks, plans = planned
    assert all(before <= after for before, after in itertools.pairwise(banks))
    run = clone.folder / "results/cut"

    def wanted(name):
        lists = (json.loads(path.read_text()) for path in run.glob(f"wanted/{name}/*.json"))
        return {tuple(entry.values()) for one in lists for entry in one["entries"]}

    # Base: two groups of one expert a layer at two rates more than the base rate.
    base, draft = wanted("base2-234"), wanted("second.draft")
    assert len(base) == 2 * 4 * 2 + 2 * 2 * 2 and not base & draft
    # Encoded was what the lists name and the bank lacked, nothing else; going back, nothing.
    lists = [*run.glob("encoded/base2-234/*.json"), *run.glob("encoded/second.draft/*.json")]
    keys = [entry["key"] for path in lists for entry in json.loads(path.read_text())["entries"]]
    named = {f"results/bank/{key[:2]}/{key[2:]}.safetensors" for key in keys}
    assert len(named) == len(base | draft) and not named <= banks[0]
    assert banks[1] == banks[0] | named
    assert banks[3] == banks[2]
    assert plans[0] == plans[2]
    for plan, budget in zip(plans[:2], (2.5, 2.25), strict=True):
        assert plan["average_rate"] <= budget
        assert plan["predicted"]["bound"] <= plan["predicted"]["loss"]
        rates = {(slot["layer"], slot["expert"]): slot["rate"] for slot in plan["slots"]}
        assert len(rates) == 8 and set(rates.values()) <= {2, 3, 4, "native"}
        read = {item["path"].split("/")[0] for item in plan["read"]}
        assert read == {"encoded", "forward"}
    # Single experts: the draft names some of a layer, with both their groups.
    assert len(draft) % 2 == 0 and 0 < len(draft) < 2 * 2 * 4 * 2
    # What is left to do is the second release's own: the first is neither spliced nor scored.
    jobs = clone.jobs()
    shards = len(list((clone.folder / "source").glob("*.safetensors")))
    assert (jobs["splice_shard"], jobs["verify_release"], jobs["score"]) == (shards, 1, 1)
    assert "encode" not in jobs and "capture" not in jobs
    clone.snakemake("release", "--cores", "2")
    assert json.loads((run / "receipts/second/verify.json").read_text())["findings"] == []


def test_probes_run_on_calibration_rows_and_are_shared(clone):
    recipe = {"method": "measured", "average_rate": 2.5, "rates": [2, 3], "base_rate": 2}
    clone.recipes = {"third": recipe, "fourth": recipe | {"layout": "bank-plan"}}
    run = clone.folder / "results/cut"
    plans = [f"results/cut/plan/{name}.json" for name in clone.recipes]
    clone.snakemake(*plans, "--cores", "2")
    lists = {path.parent.name for path in run.glob("probes/*/*.json")}
    assert lists == {"base2-23", "third.draft"}
    for path in plans:
        plan = json.loads((clone.folder / path).read_text())
        assert plan["average_rate"] == 2.5 and plan["predicted"]["loss"] > 0
        folders = {item["path"].split("/")[0] for item in plan["read"]}
        assert folders == {"encoded", "probes"}
    # The rows are among those of the splits, the states stay, and no panel was read.
    picked = json.loads((run / "rows/probe.json").read_text())
    splits = sorted(run.glob("rows/split*.safetensors"))
    assert picked["of"] == [blake3_file(path) for path in splits]
    assert [path.name for path in run.glob("probes/base2-23/*.safetensors")] == [
        "L00.state.safetensors"
    ]
    assert not list(run.glob("forward/**/*.state.safetensors"))
    for path in run.glob("provenance/probe_slots/*.json"):
        inputs = [item["path"] for item in json.loads(path.read_text())["inputs"]]
        assert inputs and not any("/code" in path for path in inputs)
    clone.recipes = {}


def test_named_target_release_stops_before_scoring(clone, tmp_path):
    assert "Nothing to be done" in clone.snakemake("release", "--dry-run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": {}}, "known keys here"),
        ({"source": "nowhere"}, "cannot be read"),
        ({"source": "partial"}, "1 of them missing"),
        ({"panels": {"code": {"texts": ["nothing*"], "window": 64, "windows": 8}}}, "texts"),
    ],
    ids=["unknown key", "no source", "missing shard", "no text"],
)
def test_configurations_that_are_refused(clone, tmp_path, change, message):
    if not (clone.folder / "partial").exists():
        shutil.copytree(clone.folder / "source", clone.folder / "partial")
        next((clone.folder / "partial").glob("*.safetensors")).unlink()
    (clone.folder / "bad.yaml").write_text(yaml.safe_dump(CONFIG | {"source": "source"} | change))
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", "local", "--configfile", "bad.yaml", "-n"],
        cwd=clone.folder,
        env=os.environ | {"PYTHONPATH": str(clone.folder / "workflow")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_damaged_shard_stops_with_one_message_and_leaves_nothing(tmp_path):
    broken = Clone(tmp_path)
    shard = next((tmp_path / "source").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-3])
    printed = broken.snakemake("results/cut/source/manifest.json", code=1)
    assert "size that its header states" in printed and shard.name in printed
    assert not (tmp_path / "results/cut/source/manifest.json").exists()
