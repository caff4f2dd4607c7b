# SPDX-License-Identifier: Apache-2.0
"""Adapter of the rule of this name."""

from trellisbank.provenance.record import log, run_job
from trellisbank.quantize.block import encode_block
from trellisbank.quantize.expert import Options


def main(job):
    """Bring the wanted experts of a block into the bank."""
    encode_block(
        source=job.params.source,
        layer=job.params.layer,
        block=job.params.block,
        experts_per_block=job.params.experts_per_block,
        wanted_path=job.input.wanted,
        hessians_path=job.input.hessians,
        captures=job.params.captures,
        bank=job.params.bank,
        min_tokens=job.params.min_tokens,
        options=Options(
            sigma_reg=job.params.sigma_reg,
            out_scales=job.params.out_scales,
            refit=job.params.refit,
            scaled_hessian=job.params.scaled_hessian,
        ),
        down_weighting=job.params.down_weighting,
        backend=job.params.backend,
        threads=job.threads,
        ledger_path=job.output.ledger,
        progress=log.info,
    )


if __name__ == "__main__":
    run_job(snakemake, main)  # noqa: F821
