# SPDX-License-Identifier: Apache-2.0
"""What holds for the repository as a whole: licence headers, locks, nothing of one machine."""

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PINNED = re.compile(r"^([a-z0-9-]+)==([^ ;\\\n]+)", re.MULTILINE)
LICENCE = re.compile(r"(#|//) SPDX-License-Identifier: Apache-2\.0")
SOURCE_NAMES = {"Snakefile", "Makefile", "run"}
SOURCE_SUFFIXES = {".py", ".smk", ".sh", ".sbatch", ".yaml", ".yml", ".toml", ".cu", ".cuh", ".in"}
# Texts that the small checkpoint was trained on are quoted as they are.
DATA = ("resources/tiny/texts/", "tests/data/")
ELSEWHERE = {
    "registry": re.compile(
        r"\b(pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.org|debian\.org|anaconda\.org)\b"
    ),
    "machine path": re.compile(r"(?<![\w.])/(root|home|opt|work|mnt|Users|scratch)/\w"),
    "index option": re.compile(r"^\s*--(extra-)?index-url|^\s*--find-links", re.MULTILINE),
}


@cache
def tracked() -> list[Path]:
    """Files under version control that exist, links left out."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def written_here() -> list[Path]:
    return [p for p in tracked() if not p.relative_to(ROOT).as_posix().startswith(DATA)]


def pins(name: str) -> dict[str, str]:
    return dict(PINNED.findall((ROOT / "envs" / name).read_text()))


def project() -> dict[str, dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def wanted(*sets: str) -> list[Requirement]:
    """What pyproject.toml asks for, of `project` and of extras and groups by name."""
    metadata = project()
    listed = {
        "project": metadata["project"]["dependencies"],
        **metadata["project"]["optional-dependencies"],
        **metadata["dependency-groups"],
    }
    return [Requirement(line) for name in sets for line in listed[name]]


def test_every_source_file_names_its_licence() -> None:
    sources = [p for p in written_here() if p.suffix in SOURCE_SUFFIXES or p.name in SOURCE_NAMES]
    assert len(sources) > 20
    without = [
        str(path.relative_to(ROOT))
        for path in sources
        if not any(LICENCE.fullmatch(line) for line in path.read_text().splitlines()[:2])
    ]
    assert without == []


def test_nothing_of_one_machine_or_registry_is_tracked() -> None:
    found = []
    for path in written_here():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}: {kind}: {match[0]}"
            for kind, pattern in ELSEWHERE.items()
            for match in [pattern.search(text)]
            if match
        ]
    assert found == []


@pytest.mark.parametrize("name", ["build", "cpu", "cuda", "dev"])
def test_a_lock_holds_exact_versions_with_hashes(name: str) -> None:
    text = (ROOT / "envs" / f"{name}.txt").read_text()
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert entries
    for entry in entries:
        pin = PINNED.match(entry)
        assert pin, entry
        assert "+" not in pin[2], f"{pin[0]}: a local label ties the lock to one index"
        assert "--hash=sha256:" in entry, pin[0]
    assert "torch" not in pins(f"{name}.txt")


def test_locks_agree_with_each_other() -> None:
    versions: dict[str, set[str]] = {}
    for path in sorted((ROOT / "envs").glob("*.txt")):
        for package, version in pins(path.name).items():
            versions.setdefault(package, set()).add(version)
    assert {package: found for package, found in versions.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("build", ["build"]),
        ("cpu", ["project"]),
        ("cuda", ["project", "cuda"]),
        ("dev", ["dev"]),
    ],
)
def test_a_lock_holds_what_the_project_asks_for(name: str, sets: list[str]) -> None:
    locked = pins(f"{name}.txt") | pins("torch.txt")
    unmet = [str(r) for r in wanted(*sets) if locked.get(r.name, "") not in r.specifier]
    assert unmet == []


def test_no_part_of_cuda_is_in_the_cpu_lock() -> None:
    assert [p for p in pins("cpu.txt") if p.startswith(("nvidia-", "cuda-", "triton"))] == []
    assert any(p.startswith("nvidia-") for p in pins("cuda.txt"))


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_conda_files_pin_the_same_versions(name: str) -> None:
    environment = yaml.safe_load((ROOT / "envs" / f"{name}.yaml").read_text())
    assert environment.keys() == {"name", "channels", "dependencies"}
    *conda, last = environment["dependencies"]
    assert last.keys() == {"pip"}

    needed = wanted("build", "project", *(["cuda"] if name == "cuda" else []))
    locked = pins(f"{name}.txt") | pins("torch.txt")
    assert last["pip"] == [
        f"{r.name}{''.join(f'[{extra}]' for extra in r.extras)}=={locked[r.name]}" for r in needed
    ]
    assert f"python={project()['project']['requires-python'].removeprefix('>=')}" in conda
