# SPDX-License-Identifier: Apache-2.0
# The source: is it complete, does it survive the way to bf16 and back.


rule inspect_source:
    input:
        config=f"{settings['source']}/config.json",
        index=f"{settings['source']}/model.safetensors.index.json",
    output:
        manifest="<run>/source/manifest.json",
        record="<run>/provenance/inspect_source/source.json",
    log:
        "<run>/logs/inspect_source.log",
    benchmark:
        "<run>/benchmarks/inspect_source.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("inspect_source"),
    message:
        "Check the headers of the source and list its tensors"
    script:
        "../workflow/scripts/inspect_source.py"


rule verify_shard:
    input:
        manifest=rules.inspect_source.output.manifest,
        shard=f"{settings['source']}/{{shard}}.safetensors",
    output:
        receipt="<run>/source/shards/{shard}.json",
        record="<run>/provenance/verify_shard/{shard}.json",
    log:
        "<run>/logs/verify_shard/{shard}.log",
    benchmark:
        "<run>/benchmarks/verify_shard/{shard}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("verify_shard"),
    message:
        "Hash {wildcards.shard} and check that its weights survive the way to bf16 and back"
    script:
        "../workflow/scripts/verify_shard.py"
