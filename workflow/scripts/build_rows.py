# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rules build_rows and build_panel."""

from pathlib import Path

from trellisbank.provenance.record import run_job
from trellisbank.rows import build_rows


def main(job):
    """Cut texts into the windows of a split or panel."""
    exclude = job.input.get("exclude", [])
    build_rows(
        texts=job.input.texts,
        tokenizer_path=job.input.tokenizer,
        separator=job.params.separator,
        window=job.params.window,
        windows=job.params.windows,
        part=tuple(job.params.part),
        exclude={Path(path).stem: path for path in exclude},
        ids_path=job.output.rows,
        receipt_path=job.output.receipt,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
