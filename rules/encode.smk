# SPDX-License-Identifier: Apache-2.0
# Wanted experts into the bank. What is there already costs reading its weights for their hash.


rule encode:
    input:
        wanted="<run>/wanted/{wanted}/{layer}.json",
        hessians=rules.hessians.output.receipt,
        weights=lambda wildcards: expand(
            rules.verify_shard.output.receipt, shard=LAYER_SHARDS[wildcards.layer]
        ),
    output:
        ledger="<run>/encoded/{wanted}/{layer}.{block}.json",
        record="<run>/provenance/encode/{wanted}.{layer}.{block}.json",
    log:
        "<run>/logs/encode/{wanted}.{layer}.{block}.log",
    benchmark:
        "<run>/benchmarks/encode/{wanted}.{layer}.{block}.tsv"
    conda:
        "../envs/cuda.yaml" if settings["encode"]["backend"] == "exllamav3" else "../envs/cpu.yaml"
    threads: settings["encode"]["threads"]
    params:
        code=code("encode"),
        source=settings["source"],
        bank=settings["bank_store"],
        # Not an input: a capture that is gone must not encode again what the bank holds.
        captures=lambda wildcards: [
            f"{RUN}/captures/{split}/{wildcards.layer}.safetensors" for split in SPLITS
        ],
        layer=lambda wildcards: number(wildcards.layer),
        block=lambda wildcards: number(wildcards.block),
        experts_per_block=settings["encode"]["experts_per_block"],
        backend=settings["encode"]["backend"],
        min_tokens=settings["encode"]["min_tokens"],
        sigma_reg=settings["encode"]["sigma_reg"],
        out_scales=settings["encode"]["out_scales"],
        refit=settings["encode"]["refit"],
        scaled_hessian=settings["encode"]["scaled_hessian"],
        down_weighting=settings["encode"]["down_weighting"],
    message:
        "Encode what {wildcards.wanted} wants of {wildcards.layer}, {wildcards.block}"
    script:
        "../workflow/scripts/encode.py"


rule probe_grid:
    input:
        weights=expand(rules.verify_shard.output.receipt, shard=SHARDS),
    output:
        probe="<run>/probe/grid.json",
        record="<run>/provenance/probe_grid/grid.json",
    log:
        "<run>/logs/probe_grid.log",
    benchmark:
        "<run>/benchmarks/probe_grid.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: settings["encode"]["threads"]
    params:
        code=code("probe_grid"),
        source=settings["source"],
        layers=list(range(MODEL.num_hidden_layers)),
        rates=[2, 3, 4, 5],
    message:
        "Trellis error of weights on the FP4 grid beside a Gaussian control"
    script:
        "../workflow/scripts/probe_grid.py"
