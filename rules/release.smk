# SPDX-License-Identifier: Apache-2.0
# Source, bank and plan into a servable checkpoint. Its files are named by receipts: a hard link
# must not be a declared output, or Snakemake would touch the source's time stamps.


rule splice_shard:
    input:
        plan=rules.freeze_plan.output.plan,
        verified=rules.verify_shard.output.receipt,
        ledgers=lambda wildcards: expand(
            rules.encode.output.ledger,
            recipe=wildcards.recipe,
            layer=layers_of_shard(wildcards),
            block=BLOCKS,
        ),
    output:
        receipt="<run>/receipts/{recipe}/{shard}.json",
        record="<run>/provenance/splice_shard/{recipe}.{shard}.json",
    log:
        "<run>/logs/splice_shard/{recipe}.{shard}.log",
    benchmark:
        "<run>/benchmarks/splice_shard/{recipe}.{shard}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("splice_shard"),
        source=settings["source"],
        bank=settings["bank_store"],
        layers=lambda wildcards: [number(layer) for layer in layers_of_shard(wildcards)],
        release=lambda wildcards: f"{RUN}/release/{wildcards.recipe}",
    message:
        "Splice {wildcards.shard} of release {wildcards.recipe}"
    script:
        "../workflow/scripts/splice_shard.py"


rule finish_release:
    input:
        plan=rules.freeze_plan.output.plan,
        receipts=expand("<run>/receipts/{{recipe}}/{shard}.json", shard=SHARDS),
    output:
        receipt="<run>/receipts/{recipe}/repack-report.json",
        record="<run>/provenance/finish_release/{recipe}.json",
    log:
        "<run>/logs/finish_release/{recipe}.log",
    benchmark:
        "<run>/benchmarks/finish_release/{recipe}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("finish_release"),
        source=settings["source"],
        release=lambda wildcards: f"{RUN}/release/{wildcards.recipe}",
        calibration={"rows": CALIBRATION["windows"], "cols": CALIBRATION["window"]},
        out_scales=settings["encode"]["out_scales"],
    message:
        "Index and configuration of release {wildcards.recipe}"
    script:
        "../workflow/scripts/finish_release.py"


rule verify_release:
    input:
        plan=rules.freeze_plan.output.plan,
        report=rules.finish_release.output.receipt,
        ledgers=rules.freeze_plan.input.ledgers,
    output:
        receipt="<run>/receipts/{recipe}/verify.json",
        record="<run>/provenance/verify_release/{recipe}.json",
    log:
        "<run>/logs/verify_release/{recipe}.log",
    benchmark:
        "<run>/benchmarks/verify_release/{recipe}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("verify_release"),
        source=settings["source"],
        release=lambda wildcards: f"{RUN}/release/{wildcards.recipe}",
    message:
        "Hold release {wildcards.recipe} against source, plan and ledgers"
    script:
        "../workflow/scripts/verify_release.py"
