# SPDX-License-Identifier: Apache-2.0
import json
import logging
from types import SimpleNamespace

import pytest

from trellisbank.errors import FormatError
from trellisbank.files import blake3_file
from trellisbank.provenance import digest
from trellisbank.provenance.record import run_job


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three modules: low <- middle, and aside, which nothing imports."""
    root = tmp_path / "trellisbank"
    (root / "part").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "low.py": '"""Low."""\n\n\ndef f(x):\n    """Say."""\n    return x + 1\n',
        "part/__init__.py": "",
        "part/middle.py": "from trellisbank import low\n\nVALUE = low.f(1)\n",
        "aside.py": "VALUE = 1\n",
    }.items():
        (root / name).write_text(text)
    script = tmp_path / "script.py"
    script.write_text("from trellisbank.part.middle import VALUE\n\nprint(VALUE)\n")
    monkeypatch.setattr(digest, "PACKAGE", root)

    def of(name=None, text=None):
        if name:
            (tmp_path / name).write_text(text)
        digest._imports.cache_clear()
        digest._dump.cache_clear()
        return digest.code_digest(script)

    return of


def test_comments_docstrings_and_layout_do_not_count(package):
    before = package()
    text = "# A remark.\ndef f(x):\n    '''Other words.'''\n\n    return (x +\n        1)\n"
    assert package("trellisbank/low.py", text) == before
    assert package("trellisbank/aside.py", "VALUE = 2\n") == before


def test_code_counts_wherever_it_is_imported_from(package):
    seen = {package()}
    seen.add(package("trellisbank/low.py", "def f(x):\n    return x + 2\n"))
    seen.add(package("trellisbank/__init__.py", "import os\n"))
    seen.add(package("script.py", "from trellisbank.part.middle import VALUE\n"))
    seen.add(package("trellisbank/part/middle.py", "from trellisbank import aside, low\n"))
    seen.add(package("trellisbank/aside.py", "VALUE = 3\n"))
    assert len(seen) == 6


class Files(list):
    """Named files, as Snakemake hands them over."""

    def __init__(self, **names):
        super().__init__(map(str, names.values()))
        self.__dict__.update({name: str(path) for name, path in names.items()})

    def items(self):
        return self.__dict__.items()


@pytest.fixture
def job(tmp_path):
    (tmp_path / "in.txt").write_text("in")
    yield SimpleNamespace(
        rule="make",
        input=Files(text=tmp_path / "in.txt"),
        output=Files(made=tmp_path / "out.txt", record=tmp_path / "record.json"),
        params=Files(code="abc", seed=3),
        wildcards=Files(layer="L01"),
        log=[str(tmp_path / "make.log")],
        threads=1,
    )
    logging.getLogger().handlers.clear()


def test_record_names_what_went_in_and_came_out(job):
    with open(job.output.made, "w") as handle:
        handle.write("out")
    run_job(job, lambda _: {job.input.text: "sha256:1234"})
    with open(job.output.record) as handle:
        record = json.load(handle)
    assert record["inputs"] == [{"path": job.input.text, "bytes": 2, "sha256": "1234"}]
    made = {"path": job.output.made, "bytes": 3, "blake3": blake3_file(job.output.made)}
    assert record["outputs"] == [made]
    assert record["code"] == "abc" and record["parameters"] == {"seed": "3"}
    assert record["wildcards"] == {"layer": "L01"}
    assert record["peak_memory_bytes"] > 1 << 20 and record["versions"]["torch"]


def test_trouble_is_logged_and_leaves_no_record(job, tmp_path):
    def work(_):
        raise FormatError("The bytes are wrong.", file="shard", fix="download it again")

    with pytest.raises(SystemExit) as stopped:
        run_job(job, work)
    assert stopped.value.code == 1
    log = (tmp_path / "make.log").read_text()
    assert "download it again" in log and "Traceback" not in log
    with pytest.raises(ZeroDivisionError):
        run_job(job, lambda _: 1 / 0)
    assert "Traceback" in (tmp_path / "make.log").read_text()
    assert not (tmp_path / "record.json").exists()
